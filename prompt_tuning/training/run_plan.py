"""A run between its config and its first step: everything checked, little read."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from prompt_tuning.checkpoints.run_store.checkpoint_files import check_storable
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, named_key
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.examples.candidates import Candidates
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.ranking import candidates
from prompt_tuning.losses.objective import (
    NATS_PER_WEIGHT,
    NO_ADVANTAGES,
    ClassObjective,
    ContextDistillation,
    Objective,
    PolicyGradient,
)
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.training.distillation import open_distillation
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.transfer import Transfer, plan_transfer, read_source


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A run whose model is described and checked; the model is not read yet.

    Attributes:
      run: what was asked for.
      model: the frozen model and the prompt as they start.
      labels: the group of each trained parameter, by path.
      optimizer: of the trained parameters.
    """

    run: Run
    model: PromptedModel
    labels: dict[str, int]
    optimizer: optax.GradientTransformation

    @property
    def data(self) -> DataSource:
        """The training files.

        Raises:
          InputError: if the run names none.
        """
        if self.run.data is None:
            raise InputError("Run.data is None: there is nothing to train on")
        return self.run.data

    def objective(self, examples: Examples | Candidates) -> Objective:
        """What training descends.

        Args:
          examples: what `examples` gave.

        Raises:
          InputError: if the run asks for a teacher that cannot be built, or for
            advantages that the data does not say.
        """
        asked = self.run.objective
        if isinstance(asked, PolicyGradient) and not examples.has_advantages:
            raise InputError(NO_ADVANTAGES)
        if isinstance(asked, ContextDistillation):
            assert isinstance(examples, Examples)  # candidates are of ClassObjective
            return open_distillation(asked, self.model, self.labels, examples)
        return asked or NATS_PER_WEIGHT

    def examples(self) -> Examples | Candidates:
        """The training examples; with an objective of classes each with every label.

        Raises:
          InputError: if a file or a row cannot be used.
        """
        examples = self.data.load(self.model)
        objective = self.run.objective
        if not isinstance(objective, ClassObjective):
            return examples
        return candidates(self.model, self.data, examples, objective.labels)

    def plan(self, examples: Examples | Candidates) -> BatchPlan:
        """The order in which the run reads the examples."""
        return self.data.plan(
            self.model,
            examples,
            seed=self.run.order_seed,
            shuffle=True,
            accumulate=self.run.accumulate,
        )

    def evaluator(self) -> Evaluator | None:
        """What measures held-out data, if the run names any.

        Raises:
          InputError: if the data cannot be used, or the best is to be chosen by what
            is not measured.
        """
        if self.run.evaluation is None:
            return None
        evaluator = Evaluator(self.model, self.run.evaluation)
        if self.run.keep_best is not None:
            evaluator.check_metric(self.run.keep_best[0])
        return evaluator

    def transfer(self) -> Transfer | None:
        """What the run starts from, if it names anything; it is read and checked.

        Raises:
          InputError: if it cannot be read, or does not fit what the run trains.
        """
        run, abstract = self.run, self.model.plan.abstract
        if run.start_from is None:
            return None
        trained, frozen = parameter_groups.partition(abstract, self.labels)
        return plan_transfer(
            read_source(Path(run.start_from), self.model.config),
            {path: trained[path] for path in self.labels},
            frozen,
            run.tuning.loras(abstract),
            self.optimizer if run.keep_optimizer_state else None,
        )

    def start(
        self, parameters: Parameters, transfer: Transfer | None = None
    ) -> TrainState:
        """The state before the first step.

        Args:
          parameters: of which the trained ones are copied, to float32, because a step
            uses up what it is given.
          transfer: what some of them start from in place of that.

        Raises:
          InputError: if a checkpoint could not hold it.
        """
        trained = {
            path: jnp.array(parameters[path], jnp.float32) for path in self.labels
        }
        placement = self.model.placement
        if placement is not None:
            trained = jax.jit(placement.unpad)(trained)
        key = named_key(jax.random.key(self.run.seed), "training")
        if transfer is None:
            start = TrainState.create(trained, self.optimizer, key)
        else:
            everything = self.model.weight_storage.with_streamed(parameters)
            restored = {p: everything[p] for p in self.model.plan.restored}
            transfer.check_model(restored, placement)
            start = transfer.start(trained, self.optimizer, key)
        check_storable(start.trained, start.optimizer_state)
        return start if placement is None else placement.put_tree(start)


def open_run(run: Run) -> RunPlan:
    """Opens a run's model, starts its prompt, and finds what is trained.

    Raises:
      InputError: if something cannot be used, or the run has no directory.
    """
    if not run.directory:
        raise InputError("Run.directory is empty: say where the run is to be kept")
    model = open_pretrained(
        run.model, run.tuning, key=jax.random.key(run.seed), mesh=run.mesh
    )
    labels = parameter_groups.label(model.plan.abstract, run.groups)
    model = dataclasses.replace(
        model, weight_storage=model.weight_storage.frozen(labels)
    )
    return RunPlan(
        run, model, labels, parameter_groups.group_optimizer(run.groups, labels)
    )
