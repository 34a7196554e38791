"""The operations of a stage; without JAX."""

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
    """What an operation computes.

    The prefix is a prompt shared by all rows, whose two passes run once per step.
    """

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    BACKWARD = "backward"
    PREFIX_FORWARD = "prefix_forward"
    PREFIX_BACKWARD = "prefix_backward"
    JOINED_GRADIENT = "joined_gradient"
    """All weight gradients that are left, as one product; see `join_end`."""


class Operation(NamedTuple):
    """One operation of a stage.

    Attributes:
      kind: what is computed.
      microbatch: the micro-batch's index; 0 for the prefix.
      chunk: which of the stage's chunks computes it.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0


Order = tuple[Operation, ...]
"""The operations of one stage, in the order in which it computes them."""
