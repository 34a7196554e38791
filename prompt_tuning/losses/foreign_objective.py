"""Objectives from other code: functions, and objects with `sums` and `divisor`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from prompt_tuning import losses
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.output_head import AnyHead, as_output_head, head_logits
from prompt_tuning.sharding import collectives


@runtime_checkable
class LossFunctions(Protocol):
    """Methods that make any object an objective; see `Objective`."""

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch or micro-batch."""
        ...

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """Computes the divisor of the summed loss."""
        ...


@dataclasses.dataclass(frozen=True)
class ForeignObjective(Objective):
    """An object that has the methods of `Objective` without deriving from it.

    Attributes:
      wrapped: the object; it must be hashable, e.g. a frozen dataclass. Its attribute
        `columns`, if it has one, names the data columns that it reads.
    """

    wrapped: LossFunctions

    @property
    def columns(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Data columns that the object reads."""
        return tuple(getattr(self.wrapped, "columns", ()))

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the object's sums."""
        return self.wrapped.sums(hidden, head, batch, parameters)

    def divisor(self, batch: Batch) -> Any:
        """Computes the object's divisor."""
        return self.wrapped.divisor(batch)


def foreign_objective(value: Any) -> ForeignObjective:
    """Wraps an object with the methods of an objective.

    Raises:
      InputError: if it lacks a method, or cannot be hashed.
    """
    if isinstance(value, type) or not isinstance(value, LossFunctions):
        raise InputError(
            f"Run.objective is {shown(value)}, {kind_of(value)}; expected "
            f"{' or '.join(f'@{name}()' for name in losses.FACTORIES)}, an object with "
            "the methods sums and divisor, or None"
        )
    try:
        hash(value)
    except TypeError as problem:
        raise InputError(
            f"Run.objective is {kind_of(value)}, which cannot be hashed, as a compiled "
            "step needs: make its class a dataclass(frozen=True) with hashable fields"
        ) from problem
    return ForeignObjective(value)


LossFunction = Callable[[Float[Array, "B m V"], Int[Array, "B m"]], Float[Array, "B m"]]


@dataclasses.dataclass(frozen=True)
class FunctionObjective(objective.Objective):
    """Averages a function's losses over the learned tokens, by their loss weights.

    It computes the logits of all learned tokens together, `[B, m, V]` in float32; the
    built-in objectives compute them in chunks.

    Attributes:
      function: `(logits [B, m, V], targets [B, m]) -> losses [B, m]`, in JAX.
    """

    function: LossFunction

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> objective.LossSums:
        """Sums the losses of a batch; see `Objective`.

        Raises:
          ValueError: if the function's result does not have the shape `[B, m]`.
        """
        del parameters
        targets = objective.learned_targets(batch)  # [B, m]
        # [B, m, v] on each device, then [B, m, V] where the vocabulary is sharded.
        head = as_output_head(head)
        logits = head_logits(hidden, head)
        if not head.of_classes:
            logits = collectives.gather_vocabulary(logits)
        losses = self.function(logits, targets)
        if losses.shape != targets.shape:
            name = getattr(self.function, "__name__", repr(self.function))
            raise ValueError(
                f"the loss function {name} returned shape {losses.shape}, expected "
                f"{targets.shape}: one loss for each target, without a mean"
            )
        correct = logits.argmax(axis=-1) == targets
        return objective.sum_losses(
            losses, batch.loss_weights, batch.loss_weights, correct
        )
