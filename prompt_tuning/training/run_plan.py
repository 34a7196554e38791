"""How a run is opened, stage by stage, from its configuration to its first step.

`open_run` lists the stages in order. The first, `plan_run`, describes the model and
checks everything that can be checked without reading weights; a sweep and the memory
estimate stop there or share what follows among runs.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store.checkpoint_files import check_storable
from prompt_tuning.checkpoints.run_store.checkpoint_names import holds_checkpoints
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.activity import activity
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, named_key
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.ranking import build_candidates
from prompt_tuning.losses.objective import Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pipeline.stage_parameters import FrozenParts
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.training.distillation import open_evaluator, open_teacher
from prompt_tuning.training.group_checks import check_constant, check_fresh
from prompt_tuning.training.host_optimizer import HostOptimizer
from prompt_tuning.training.pipelined_step import (
    PipelinedStep,
    pipelined_gradients,
    stage_devices,
)
from prompt_tuning.training.stage_plan import (
    check_division,
    microbatch_shape,
    plan_stages,
    training_interface,
    whole_mesh,
)
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import StreamedStep
from prompt_tuning.training.trainer import Step, Trainer
from prompt_tuning.training.transfer import Transfer, plan_transfer, read_source


def open_run(run: Run, reuse: Mapping[str, Array] | None = None) -> Trainer:
    """Opens and checks everything that a run needs, then reads the frozen model.

    The first half of `tune`; `train` is the second. Use both where you need the opened
    model, data and compiled step in between.

    Args:
      run: configuration of the run.
      reuse: parameters of the frozen model, if it was read before.

    Returns:
      a `Trainer`: run, model, frozen parameters, first state, step and data.

    Raises:
      InputError: if something cannot be used; nothing has been written then.

    Examples:
      >>> trainer = pt.open_run(run, reuse=model.parameters)  # a `Run`
      >>> list(trainer.start.trained), trainer.run.steps
      (['decoder/prompt/prompt'], 2)
    """
    # Checkpoint, tokenizer, prompts, parameter groups: described, not read.
    plan = plan_run(run)
    # Data, and what is computed from it.
    with activity("reading the data"):
        examples = plan.examples()
        objective = plan.objective(examples)
        batch_plan = plan.batch_plan(examples)
        evaluator = plan.evaluator()
    # A run with checkpoints resumes from them and needs no other starting point.
    resumes = processes.run_on_first(lambda: holds_checkpoints(run.directory))
    transfer = None if resumes else plan.transfer()
    step = plan.step(objective, batch_plan)
    # Only now is the frozen model read.
    parameters = plan.model.read_parameters(reuse)
    _, frozen = parameter_groups.partition(parameters, plan.labels)
    return Trainer(
        run=run,
        model=plan.model,
        frozen=frozen,
        start=plan.start(parameters, transfer),
        step=step,
        examples=examples,
        batch_plan=batch_plan,
        evaluator=evaluator,
        transfer=transfer,
    )


def plan_run(run: Run) -> "RunPlan":
    """Opens the model of a run and assigns its trained parameters to groups.

    Raises:
      InputError: if something cannot be used, or the run has no directory.
    """
    if not run.directory:
        raise InputError(
            f"the run has no directory: give {how_to_set('Run.directory', 'DIRECTORY')}"
        )
    # Whole arrays are sharded over the devices of all stages.
    model = open_pretrained(
        run.model, run.tuning, key=jax.random.key(run.seed), mesh=whole_mesh(run)
    )
    check_division(run, model.config)
    check_constant(model.plan.abstract, run)
    labels = parameter_groups.label(model.plan.abstract, run.groups)
    check_fresh(model.plan.fresh, labels, run)
    parameter_groups.check_matches(
        run.save_paths, list(model.plan.abstract), "Run.save_paths"
    )
    return RunPlan(
        run=run,
        model=model.in_training(run.model.trained_weights, labels),
        labels=labels,
        optimizer=parameter_groups.group_optimizer(run.groups, labels),
    )


def refuse_stages(run: Run, subject: str) -> None:
    """Refuses several stages where they are not supported.

    Args:
      run: the run.
      subject: what was started.

    Raises:
      InputError: with what to set.
    """
    if run.stages > 1:
        raise InputError(
            f"MeshShape.stage is {run.stages}, but {subject} supports one stage only: "
            "set it to 1 and Run.pipeline to None, and divide the model along fsdp or "
            "tensor"
        )


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A run whose model is described and checked, before any weights are read.

    Attributes:
      run: configuration of the run.
      model: frozen model with its initialized prompts, described.
      labels: parameter group of each trained parameter, by path.
      optimizer: optimizer of the trained parameters.
    """

    run: Run
    model: PromptedModel
    labels: dict[str, int]
    optimizer: optax.GradientTransformation

    @property
    def data(self) -> DataSource:
        """The training data.

        Raises:
          InputError: if the run names none.
        """
        if self.run.data is None:
            raise InputError(
                "Run.data is None: there is nothing to train on; give "
                f"{how_to_set('train/DataSource.files', ['FILE'])} and "
                "--gin.Run.data='@train/DataSource()'"
            )
        return self.run.data

    def examples(self) -> Examples | ClassExamples:
        """Opens the training examples, with one row per label if labels are compared.

        Raises:
          InputError: if a file or a row cannot be used.
        """
        examples = load_examples(self.data, self.model.interface)
        labels = (self.run.objective or NATS_PER_WEIGHT).candidate_labels
        if labels is None:
            return examples
        return build_candidates(self.model, self.data, examples, labels)

    def objective(self, examples: Examples | ClassExamples) -> Objective:
        """Builds the training objective.

        Args:
          examples: result of `examples`.

        Raises:
          InputError: if the objective needs a teacher that cannot be built, or a
            column that the data does not provide.
        """
        config = self.run.objective or NATS_PER_WEIGHT
        config.check_columns(examples.columns)
        config.check_model(self.model.config)
        return config.prepare(
            lambda context: open_teacher(context, self.model, self.labels, examples)
        )

    def batch_plan(self, examples: Examples | ClassExamples) -> BatchPlan:
        """Plans the order in which the run reads the examples."""
        return plan_batches(
            self.data,
            training_interface(self.run, self.model),
            examples,
            seed=self.run.order_seed,
            shuffle=True,
            accumulate=self.run.accumulate,
        )

    def evaluator(self) -> Evaluator | None:
        """Opens the held-out data, if the run names any.

        Raises:
          InputError: if the data cannot be used, or `Run.keep_best` or
            `Run.early_stopping_metric` names a metric that is not measured.
        """
        if self.run.evaluation is None:
            return None
        evaluator = open_evaluator(self.run.objective, self.model, self.run.evaluation)
        if self.run.best_by is not None:
            evaluator.check_metric(self.run.best_by[0], "Run.keep_best")
        if self.run.early_stopping and self.run.stops_by is not None:
            evaluator.check_metric(self.run.stops_by[0], "Run.early_stopping_metric")
        return evaluator

    def transfer(self) -> Transfer | None:
        """Reads and checks what the run starts from, if `Run.start_from` is set.

        Raises:
          InputError: if it cannot be read, or does not fit what the run trains.
        """
        run, abstract = self.run, self.model.plan.abstract
        if run.start_from is None:
            return None
        trained, frozen = parameter_groups.partition(abstract, self.labels)
        return plan_transfer(
            read_source(Path(run.start_from), self.model.config, run.model),
            {path: trained[path] for path in self.labels},
            frozen,
            run.tuning.loras(abstract),
            self.optimizer if run.keep_optimizer_state else None,
        )

    def start(
        self, parameters: Parameters, transfer: Transfer | None = None
    ) -> TrainState:
        """Builds the state before the first step.

        Args:
          parameters: all parameters; trained ones are copied to float32, because a
            step donates its input.
          transfer: replaces the initial values that it covers.

        Raises:
          InputError: if a checkpoint could not store the state.
        """
        key = named_key(jax.random.key(self.run.seed), "training")
        host = self.host_optimizer()
        if host is not None:
            return host.start(self.labels, parameters, transfer, key)
        trained = {
            path: jnp.array(parameters[path], jnp.float32) for path in self.labels
        }
        placement = self.model.placement
        if placement is not None:
            trained = jax.jit(placement.unpad)(trained)
        if transfer is None:
            start = TrainState.create(trained, self.optimizer, key)
        else:
            everything = self.model.weight_storage.with_streamed(parameters)
            restored = {p: everything[p] for p in self.model.plan.restored}
            transfer.check_model(restored, placement)
            start = transfer.start(trained, self.optimizer, key)
        check_storable(start.trained, start.optimizer_state)
        return start if placement is None else placement.put_tree(start)

    def host_optimizer(self) -> HostOptimizer | None:
        """Returns the updates of trained weights in host memory; None without any.

        Raises:
          InputError: if their optimizer cannot update them layer by layer.
        """
        paths = self.model.weight_storage.trained
        return HostOptimizer(paths, self.optimizer_of) if paths else None

    def optimizer_of(self, paths: Collection[str]) -> optax.GradientTransformation:
        """Returns the optimizer of some trained parameters."""
        labels = {path: self.labels[path] for path in paths}
        return parameter_groups.group_optimizer(self.run.groups, labels)

    def step(self, objective: Objective, batch_plan: BatchPlan) -> Step:
        """Builds the training step, which is compiled for each shape of batch."""
        model = self.model
        if model.weight_storage.by_layer:
            here = model.weight_storage.trained
            return StreamedStep(
                model.graph,
                self.optimizer_of([path for path in self.labels if path not in here]),
                model.weight_storage.streamed,
                dropout=model.drops,
                objective=objective,
                reader=model.weight_storage.reader(),
                checkpoint_activation=self.run.model.checkpoint_activation,
                host=self.host_optimizer(),
                placement=model.placement,
            )
        stages = self.pipeline_plan(batch_plan)
        if stages is not None:
            gradients = self.pipelined_gradients(objective, stages)
            return self.step_in_stages(gradients, objective, stages)
        return compile_step(
            model.graph,
            self.optimizer,
            dropout=model.drops,
            objective=objective,
            placement=model.placement,
            shapes=len(batch_plan.shapes()),
        )

    def pipeline_plan(self, batch_plan: BatchPlan) -> PipelinePlan | None:
        """Plans the run's pipeline; None without one.

        Raises:
          InputError: if the model or the rows cannot be divided as they are to be.
        """
        if self.run.pipeline is None:
            return None
        shape = microbatch_shape(self.run, self.model, batch_plan)
        return plan_stages(self.run, self.model, self.labels, shape)

    def pipelined_gradients(
        self,
        objective: Objective,
        plan: PipelinePlan,
        placed: FrozenParts | None = None,
    ) -> PipelinedGradients:
        """Divides the run's model into the stages of a plan.

        Args:
          objective: the training objective.
          plan: blocks and schedule of the stages.
          placed: frozen parameters on the stages, which several pipelines may share.

        Raises:
          InputError: if the stages cannot compute it.
        """
        mesh, model = self.run.mesh, self.model
        assert mesh is not None and model.placement is not None
        assert self.run.pipeline is not None
        stages = stage_devices(mesh, model.config)
        return pipelined_gradients(
            model.graph,
            stages,
            plan,
            model.placement,
            objective,
            placed,
            joined_p2=self.run.pipeline.joined_p2,
        )

    def step_in_stages(
        self, gradients: PipelinedGradients, objective: Objective, plan: PipelinePlan
    ) -> PipelinedStep:
        """Builds the step of a model in stages, with the run's optimizer."""
        assert self.model.placement is not None
        return PipelinedStep(
            gradients,
            self.model.graph,
            self.optimizer,
            plan,
            placement=self.model.placement,
            dropout=self.model.drops,
            objective=objective,
        )
