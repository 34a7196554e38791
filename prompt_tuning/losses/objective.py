"""Objectives: what training minimizes, and what an objective needs for it.

To add one, write a module with a dataclass derived from `Objective`, and add a line to
`prompt_tuning.losses.FACTORIES`. Override the defaults of `ObjectiveConfig` where it
differs: the data columns that it reads, the labels that it compares, whether its loss
depends on padding.
"""

import abc
from collections.abc import Collection, Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.core.batch import Batch, value_columns
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import WITH_VALUES, Pooling
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.rows.token_columns import column_setting
from prompt_tuning.losses.cross_entropy import TokenLoss, token_loss
from prompt_tuning.losses.normalizers import weight_sum
from prompt_tuning.losses.output_head import AnyHead, as_output_head
from prompt_tuning.losses.value_loss import value_loss


class LossSums(NamedTuple):
    """Sums over a batch; batches of any total weight can be added.

    Attributes:
      loss: weighted loss that training minimizes, in nats.
      weight: sum of the weights of tokens, or of examples with classes.
      correct: total weight of tokens, or examples, with the highest score on the
        target.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]

    @property
    def accuracy(self) -> Float[Array, ""]:
        """Share of the weight with the highest score on the target."""
        return self.correct / self.weight


class MeasuredSums(NamedTuple):
    """`LossSums` of an objective that measures more.

    Attributes:
      loss: see `LossSums`.
      weight: see `LossSums`; may be 0.
      correct: see `LossSums`.
      measured: weighted sums of its other measures; see `Objective.measured`.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]
    measured: dict[str, Float[Array, ""]]

    @property
    def accuracy(self) -> Float[Array, ""]:
        """Share of the weight with the highest score on the target."""
        return self.mean(self.correct)

    def mean(self, total: Float[Array, ""]) -> Float[Array, ""]:
        """Divides a weighted sum by the weight; 0 if nothing has a weight."""
        return total / jnp.where(self.weight == 0, 1, self.weight)


AnySums = LossSums | MeasuredSums


def sum_losses(
    losses: Float[Array, "*lead"],
    factors: Float[Array, "*lead"],
    weights: Float[Array, "*lead"],
    correct: Array,
) -> LossSums:
    """Sums losses times their factors, the weights, and the weights of correct targets.

    Args:
      losses: loss of each token, or of each example with classes.
      factors: factor of each loss: its weight, or the objective's own.
      weights: weight of each token or example.
      correct: whether the target of each scored highest.
    """
    return LossSums(
        jnp.sum(factors * losses), jnp.sum(weights), jnp.sum(weights * correct)
    )


@runtime_checkable
class TeacherModel(Protocol):
    """A second model, computed from the student's frozen parameters."""

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """Hidden states that predict the targets at `batch.loss_positions`."""
        ...

    def read_context(self, student: Parameters) -> Parameters:
        """Returns arrays that `hidden` otherwise computes anew for each batch.

        They are added to the student's parameters; none if the teacher reads no text.
        """
        ...


class OwnContexts(NamedTuple):
    """Stands for texts that differ by example, in a column of the data.

    Attributes:
      cache_bytes: see `ContextDistillation`.
    """

    cache_bytes: int


TeacherContext = str | OwnContexts | None


@runtime_checkable
class OpenTeacher(Protocol):
    """Builds the frozen model: alone, reading a text, or with another run's adapter."""

    def __call__(
        self, context: TeacherContext = None, *, run: str | None = None
    ) -> TeacherModel:
        """Builds it.

        Args:
          context: text that it reads before each row.
          run: directory of a run to take prompts and adapters from.
        """
        ...


class ObjectiveConfig(abc.ABC):
    """Settings of an objective and what it needs: the type of `Run.objective`.

    Attributes:
      columns: data columns that the objective reads from `Batch.columns`, by the names
        that `DataSource.columns` gives them.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Paths of the model's intermediate arrays that the loss reads."""
        return ()

    @property
    def candidate_labels(self) -> tuple[str, ...] | None:
        """Labels to read every example with; None to read it once."""
        return None

    @property
    def compares_answers(self) -> bool:
        """Whether every example is a chosen and a rejected answer to one prompt."""
        return False

    @property
    def rates_answers(self) -> bool:
        """Whether every example is an answer to a prompt, rated good or bad."""
        return False

    @property
    def judges_answers(self) -> bool:
        """Whether the answers in the data are judged instead of simply learned."""
        return self.compares_answers or self.rates_answers

    @property
    def counts_padding(self) -> bool:
        """Whether the loss depends on the padded length of rows."""
        return False

    @property
    def embeds(self) -> Pooling | None:
        """States that make the vectors of texts to compare; None for other losses."""
        return None

    @property
    def samples_answers(self) -> bool:
        """Whether rows are answers sampled from the trained model (`Run.rollouts`)."""
        return False

    @property
    def learns_rewards(self) -> bool:
        """Whether it learns from differences between the rewards of sampled answers."""
        return False

    def check_packing(self) -> None:
        """Refuses packed rows if the objective compares the rows of an example.

        Raises:
          InputError: if it does; tells what to set.
        """
        compares = self.candidate_labels is not None or self.judges_answers
        if compares or self.embeds is not None:
            raise InputError(
                f"DataSource.packing is True, but Run.objective is a "
                f"{type(self).__name__}, which compares whole rows, one for each class "
                "or answer of an example: set packing = False, or use a TokenObjective"
            )

    def check_columns(self, available: Collection[str]) -> None:
        """Checks that the data provides the columns of this objective.

        Raises:
          InputError: if one is missing; names the setting that adds it.
        """
        for name in self.columns:
            if name not in available:
                setting = column_setting(name)
                raise InputError(
                    f"{type(self).__name__} needs {name}, and the data does not "
                    f"provide them: set {setting} to a jsonl key or an HDF5 data set "
                    f"(for the training data alone: train/{setting})"
                )

    def check_model(self, config: ModelConfig) -> None:
        """Checks that a model has all that the objective reads; nothing by default."""
        del config

    @abc.abstractmethod
    def prepare(self, open_teacher: OpenTeacher) -> "Objective":
        """Builds the objective that training minimizes.

        Raises:
          InputError: if a teacher that the objective needs cannot be built.
        """


class Objective(ObjectiveConfig):
    """A sum over the batch, and the divisor that turns it into the loss."""

    def prepare(self, open_teacher: OpenTeacher) -> "Objective":
        """Returns the objective itself, which needs no teacher."""
        del open_teacher
        return self

    def context(self, parameters: Parameters) -> Parameters:
        """Computes arrays that no step changes, once for the whole run; none here.

        `parameters` are all of the model's, on one device. The arrays are added to
        them, at paths that start with `parameters.CONTEXT`.
        """
        del parameters
        return {}

    @property
    def measured(self) -> tuple[str, ...]:
        """Names in `MeasuredSums.measured`; training logs their weighted means."""
        return ()

    @abc.abstractmethod
    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> AnySums:
        """Computes the sums of a batch or micro-batch.

        Args:
          hidden: hidden states that predict the targets at `batch.loss_positions`.
          head: output head.
          batch: one batch, without an accumulation axis.
          parameters: all parameters of the model, for objectives with a teacher.
        """

    def intermediate_loss(
        self, arrays: Mapping[str, Float[Array, "B S D"]], batch: Batch
    ) -> Float[Array, ""] | float:
        """Computes what intermediate arrays add to the sum of the loss."""
        del arrays, batch
        return 0.0

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """Computes the divisor of the summed loss: by default the sum of the weights.

        `batch` is the whole batch, with its accumulation axis if it has one.
        """
        return weight_sum(batch)


class HeldOutObjective(Objective):
    """An objective that evaluations measure, too, as their `loss`.

    With any other objective their `loss` is the cross-entropy.

    Attributes:
      meaning: meaning of the loss, for reports.
    """

    meaning: ClassVar[str]

    @abc.abstractmethod
    def token_losses(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> TokenLoss:
        """Computes the loss at each of `batch.loss_positions`; see `sums`."""


def target_losses(
    hidden: Float[Array, "B m D"],
    head: AnyHead,
    batch: Batch,
    z_loss: float | int = 0.0,
    label_smoothing: float | int = 0.0,
    soft_cap: float | int | None = None,
) -> TokenLoss:
    """Computes the loss at each of `batch.loss_positions`; see `token_loss`.

    For a head whose classes have values it is `value_loss`, without the other terms.
    """
    head = as_output_head(head)
    if head.problem in WITH_VALUES:
        names = value_columns(len(head.kernel))
        values = jnp.stack([batch.columns[name] for name in names], axis=-1)
        return value_loss(hidden, head, values)
    targets = learned_targets(batch)
    return token_loss(hidden, head, targets, z_loss, label_smoothing, soft_cap)


def learned_targets(batch: Batch) -> Int[Array, "B m"]:
    """Returns the targets at `batch.loss_positions`, and 0 at unused positions."""
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    # The target at an unused position may be no class, whose loss were nan.
    return jnp.where(batch.loss_weights != 0, targets, 0)


def token_sums(
    losses: TokenLoss, factors: Float[Array, "B m"], batch: Batch
) -> LossSums:
    """Sums the losses at a batch's learned positions, each times its factor."""
    return sum_losses(losses.nll, factors, batch.loss_weights, losses.correct)


def scatter_to_targets(
    values: Float[Array, "*lead m"], batch: Batch
) -> Float[Array, "*lead U"]:
    """Scatters values at the learned positions to their targets; the rest get 0.

    `values` has one for each of `batch.loss_positions`; padding is dropped. The batch
    may have an accumulation axis.
    """
    length = batch.targets.shape[-1]

    def scatter_row(values, positions):  # [m], [m] -> [U]
        return jnp.zeros(length, values.dtype).at[positions].set(values, mode="drop")

    # Unused positions are 0. Moved past the end, they do not overwrite target 0.
    positions = jnp.where(batch.loss_weights != 0, batch.loss_positions, length)
    return jnp.vectorize(scatter_row, signature="(m),(m)->(u)")(values, positions)
