"""The operations of a stage; without JAX."""

from typing import Literal, NamedTuple

FORWARD = "forward"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"
BACKWARD = "backward"
PREFIX_FORWARD = "prefix_forward"
PREFIX_BACKWARD = "prefix_backward"
JOINED_GRADIENT = "joined_gradient"
"""All weight gradients that are left, as one product; see `join_end`."""

Kind = Literal[
    "forward",
    "input_gradient",
    "weight_gradient",
    "backward",
    "prefix_forward",
    "prefix_backward",
    "joined_gradient",
]


class Operation(NamedTuple):
    """One operation of a stage.

    Attributes:
      kind: what is computed; `PREFIX_FORWARD` and `PREFIX_BACKWARD` run once per step,
        for a prompt shared by all rows.
      microbatch: the micro-batch's index; 0 for the prefix.
      chunk: which of the stage's chunks computes it.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0


Order = tuple[Operation, ...]
"""The operations of one stage, in the order in which it computes them."""
