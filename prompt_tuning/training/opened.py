"""A run between its config and its first step: everything checked, little read."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from prompt_tuning import optim
from prompt_tuning.checkpoints.checkpoint_files import check_storable
from prompt_tuning.data.examples import Examples
from prompt_tuning.data.plan import BatchPlan
from prompt_tuning.errors import InputError
from prompt_tuning.models.parameters import Parameters, named_key
from prompt_tuning.pretrained import PromptedModel, open_pretrained
from prompt_tuning.run import DataSource, Run
from prompt_tuning.training.evaluation import Evaluator
from prompt_tuning.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Opened:
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

    def plan(self, examples: Examples) -> BatchPlan:
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

    def start(self, parameters: Parameters) -> TrainState:
        """The state before the first step.

        Args:
          parameters: of which the trained ones are copied, to float32, because a step
            uses up what it is given.

        Raises:
          InputError: if a checkpoint could not hold it.
        """
        trained = {
            path: jnp.array(parameters[path], jnp.float32) for path in self.labels
        }
        key = named_key(jax.random.key(self.run.seed), "training")
        start = TrainState.create(trained, self.optimizer, key)
        check_storable(start.trained, start.optimizer_state)
        return start


def open_run(run: Run) -> Opened:
    """Opens a run's model, starts its prompt, and finds what is trained.

    Raises:
      InputError: if something cannot be used.
    """
    model = open_pretrained(
        run.model,
        prompt=run.prompt,
        prompting=run.prompting,
        key=jax.random.key(run.seed),
    )
    labels = optim.label(model.plan.abstract, run.groups)
    return Opened(run, model, labels, optim.group_optimizer(run.groups, labels))
