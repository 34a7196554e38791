"""Plan a run: describe and check its model before weights are read."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from prompt_tuning.adapters.adapter import ROWS_PATH
from prompt_tuning.checkpoints.run_store.checkpoint_files import check_storable
from prompt_tuning.config.config_values import (
    CONFIG_FILE,
    config_values,
    literal,
    resolved,
)
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.bounded_updates import stay_in_balls
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import WITH_VALUES
from prompt_tuning.core.parameters import Parameters, named_key
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.preference_examples import load_preferences
from prompt_tuning.data.examples.rated_examples import load_ratings
from prompt_tuning.decoding.row_checks import check_scores
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.ranking import build_candidates
from prompt_tuning.evaluation.retrieval import open_texts
from prompt_tuning.losses.foreign_objective import FunctionObjective
from prompt_tuning.losses.grpo import GroupPolicy
from prompt_tuning.losses.objective import Objective, ObjectiveConfig
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT, TokenObjective
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.trained_tokens import TrainedTokens
from prompt_tuning.sharding.mesh import build_mesh
from prompt_tuning.training import pipeline_setup
from prompt_tuning.training.distillation import open_teacher
from prompt_tuning.training.host_optimizer import HostOptimizer
from prompt_tuning.training.loggers import check_loggers
from prompt_tuning.training.method_checks import check_methods
from prompt_tuning.training.objective_data import (
    context_column,
    load_learned,
    open_evaluator_of,
)
from prompt_tuning.training.rollouts.prompt_table import load_prompts
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.transfer import (
    Transfer,
    TransferSource,
    plan_transfer,
    read_source,
)


def plan_run(run: Run) -> "RunPlan":
    """Opens the model of a run, and assigns its trained parameters to groups.

    Raises:
      InputError: if a setting or file cannot be used, or the run has no directory.
    """
    if not run.directory:
        raise InputError(
            f"the run has no directory: give {how_to_set('Run.directory', 'DIRECTORY')}"
        )
    check_loggers(run.loggers)
    if run.mesh is not None and run.stages > 1:
        build_mesh(run.mesh)  # refuses devices that cannot be arranged in stages
    # Whole arrays are sharded over the devices of all stages.
    model = open_pretrained(
        run.model, run.tuning, key=jax.random.key(run.seed), mesh=run.inference_mesh
    )
    pipeline_setup.check_division(run, model.config)
    check_methods(run, model)
    labels = parameter_groups.label(model.plan.abstract, run.groups)
    _check_fresh(model.plan.fresh, labels, run)
    parameter_groups.check_matches(
        run.save_paths, list(model.plan.abstract), "Run.save_paths"
    )
    return RunPlan(
        run=run,
        model=model.in_training(run.model.trained_weights, labels),
        labels=labels,
        optimizer=_group_optimizer(run, model, labels),
    )


def _group_optimizer(
    run: Run, model: PromptedModel, labels: Mapping[str, int]
) -> optax.GradientTransformation:
    """Returns the optimizer of the trained parameters, with frozen slots left alone."""
    frozen = model.prompts.frozen_slots(model.config.architecture)
    optimizer = parameter_groups.group_optimizer(run.groups, labels, frozen)
    balls = model.prompts.balls(model.config.architecture)
    return stay_in_balls(optimizer, {p: x for p, x in balls.items() if p in labels})


def _check_fresh(fresh: Collection[str], labels: Collection[str], run: Run) -> None:
    """Checks that all fresh parameters are trained; others would stay random."""
    untrained = [path for path in fresh if path not in labels]
    if not untrained:
        return
    listed = ", ".join([*untrained[:2], *(["..."] if len(untrained) > 2 else [])])
    regexes = ", ".join(regex for group in run.groups for regex in group.regexes)
    raise InputError(
        f"{listed} {'is' if len(untrained) == 1 else 'are'} fresh but not trained: "
        f"the parameter groups train {regexes or 'nothing'}. Add a regex to "
        "ParameterGroup.regexes, or leave out what is not trained; of several "
        "--gin_file, give an adapter's or prompt's file after the run's. A prompt that "
        "is only read from a file is an InferenceOnlyPrompt"
    )


def _check_tokens(source: TransferSource, run: Run, model: PromptedModel) -> None:
    """Checks that token rows to start from belong to the same tokens."""
    rows = model.prompts.tokens
    if rows is None or ROWS_PATH not in source.leaves:
        return
    same = (rows.ids, rows.head_ids) == (source.tokens.rows, source.tokens.head)
    if source.checkpoint is not None:
        file = source.checkpoint.parent.parent / CONFIG_FILE
        same = not file.is_file() or _tokens_in(file) == run.tuning.tokens
    if not same:
        raise InputError(
            f"{source.origin} has trained rows of other tokens than this run, or in "
            "another order: give the same TrainedTokens.tokens"
        )


def _tokens_in(file: Path) -> TrainedTokens | None:
    """Returns the trained tokens in a run's config, which is not read as a whole."""
    values = config_values(read_limited(file, MAXIMUM_BYTES).decode())
    tokens, head = (
        literal(resolved(values, f"TrainedTokens.{name}"))
        for name in ("tokens", "head")
    )
    return TrainedTokens(tokens=tokens, head=head) if tokens else None


def refuse_stages(run: Run, subject: str) -> None:
    """Raises an error for more than one stage, where stages are not supported."""
    if run.stages > 1:
        raise InputError(
            f"MeshShape.stage is {run.stages}, but {subject} supports one stage only: "
            "set it to 1 and Run.pipeline to None, and divide the model along fsdp or "
            "tensor"
        )


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A run with a described and checked model, before any weights are read."""

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

    def examples(self) -> Examples | ExampleGroups:
        """Opens the training examples, with one row per compared label or answer."""
        objective, share = self.run.objective or NATS_PER_WEIGHT, not self.run.pipeline
        self._check_head(objective)
        if self.run.rollouts is not None:
            return load_prompts(
                self.data, self.model, self.run.rollouts, context_column(objective)
            )
        if objective.embeds is not None:
            texts = open_texts(self.model, self.data, objective.embeds)
            if self.data.batch_tokens is None:
                texts.check_candidates(self.data.batch_size)
            return texts
        if objective.compares_answers:
            return load_preferences(self.data, self.model.interface, share=share)
        if objective.rates_answers:
            return load_ratings(self.data, self.model.interface)
        examples = load_learned(self.data, self.model.interface, objective)
        labels = objective.candidate_labels
        if labels is None:
            return examples
        return build_candidates(self.model, self.data, examples, labels, share=share)

    def objective(self, examples: Examples | ExampleGroups) -> Objective:
        """Builds the training objective for the result of `examples`.

        Raises:
          InputError: if the objective needs a teacher that cannot be built, or a column
            that the data does not have.
        """
        config = self.run.objective or NATS_PER_WEIGHT
        config.check_columns(examples.columns)
        config.check_model(self.model.config)
        prepared = config.prepare(
            functools.partial(
                open_teacher, model=self.model, trained=self.labels, examples=examples
            )
        )
        if isinstance(prepared, GroupPolicy) and self.run.rollouts is not None:
            return prepared.drawn(
                self.run.rollouts.temperature, self.run.rollouts.new_tokens
            )
        return prepared

    def _check_head(self, objective: ObjectiveConfig) -> None:
        """Checks that the loss fits the model's head, of classes or of tokens."""
        if objective.embeds is None:
            check_scores(self.model)
        known = isinstance(objective, TokenObjective | FunctionObjective)
        if self.model.config.labels and not known:
            raise InputError(
                f"Run.objective is a {type(objective).__name__}, which compares or "
                "samples texts, but the model has a class head, which scores classes: "
                "leave out ClassHead, or set Run.objective to None or @TokenObjective()"
            )
        changed = objective not in (None, TokenObjective(), NATS_PER_WEIGHT)
        if self.model.config.problem in WITH_VALUES and changed:
            raise InputError(
                f"Run.objective is {objective}, but the loss of the model's head is "
                f"that of its problem, {self.model.config.problem!r}: leave the "
                "objective out"
            )

    def batch_plan(
        self, examples: Examples | ExampleGroups, *, seed: int | None = None
    ) -> BatchPlan:
        """Plans the order of the run's examples; `seed` replaces that of the run."""
        return plan_batches(
            self.data,
            pipeline_setup.training_interface(self.run, self.model),
            examples,
            seed=self.run.order_seed if seed is None else seed,
            shuffle=True,
            accumulate=self.run.accumulate,
        )

    def evaluator(self) -> Evaluator | None:
        """Opens the held-out data, if the run has any.

        Raises:
          InputError: if the data cannot be used, or `Run.keep_best` or
            `Run.early_stopping_metric` names a metric that is not measured.
        """
        if self.run.evaluation is None:
            return None
        evaluator = open_evaluator_of(self.run, self.model, self.run.evaluation)
        if self.run.best_by is not None:
            evaluator.check_metric(self.run.best_by[0], "Run.keep_best")
        if self.run.early_stopping and self.run.stops_by is not None:
            evaluator.check_metric(self.run.stops_by[0], "Run.early_stopping_metric")
        return evaluator

    def transfer(self) -> Transfer | None:
        """Reads and checks what the run starts from, if `Run.start_from` is set.

        Raises:
          InputError: if it cannot be read, or does not match what the run trains.
        """
        run, abstract = self.run, self.model.plan.abstract
        if run.start_from is None:
            return None
        trained, frozen = parameter_groups.partition(abstract, self.labels)
        source = read_source(Path(run.start_from), self.model.config, run.model)
        _check_tokens(source, self.run, self.model)
        return plan_transfer(
            source,
            {path: trained[path] for path in self.labels},
            frozen,
            self.model.loras,
            self.optimizer if run.keep_optimizer_state else None,
        )

    def start(
        self, parameters: Parameters, transfer: Transfer | None = None
    ) -> TrainState:
        """Returns the state before the first step.

        Args:
          parameters: all parameters; trained ones are copied to float32, because a step
            donates its input.
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
        """Returns the optimizer of trained weights in host memory; None without any.

        Raises:
          InputError: if it cannot update them layer by layer.
        """
        paths = self.model.weight_storage.trained
        return HostOptimizer(paths, self.optimizer_of) if paths else None

    def optimizer_of(self, paths: Collection[str]) -> optax.GradientTransformation:
        """Returns the optimizer of some trained parameters."""
        labels = {path: self.labels[path] for path in paths}
        return _group_optimizer(self.run, self.model, labels)

    def pipeline_plan(self, batch_plan: BatchPlan) -> PipelinePlan | None:
        """Plans the run's pipeline; None without one.

        Raises:
          InputError: if the model or the rows cannot be split as configured.
        """
        if self.run.pipeline is None:
            return None
        shape = pipeline_setup.microbatch_shape(self.run, self.model, batch_plan)
        return pipeline_setup.plan_stages(self.run, self.model, self.labels, shape)
