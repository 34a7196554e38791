"""Objectives from other code: any object with `sums` and `divisor`."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from prompt_tuning import losses
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.output_head import AnyHead


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
