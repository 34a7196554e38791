"""The output head as losses take it: an array, or one with a bias or a soft cap."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputHead:
    """A head whose logits are more than products of hidden states and its kernel.

    Attributes:
      kernel: `[V, D]`, with the layout of an embedding table.
      bias: bias of each logit, `[V]`, or None (GPT-J, Phi).
      soft_cap: bound `c` on the absolute value of the logits, which become
        `c * tanh(logits / c)` (Gemma Team 2024, "Gemma 2", section 2); None for none.
    """

    kernel: Float[Array, "V D"]
    bias: Float[Array, "V"] | None = None
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})


AnyHead = Float[Array, "V D"] | OutputHead
"""A head: its kernel alone, if the logits have neither a bias nor a soft cap."""


def as_output_head(head: AnyHead) -> OutputHead:
    """Returns a head of either form as an `OutputHead`."""
    return head if isinstance(head, OutputHead) else OutputHead(head)


def head_logits(
    hidden: Float[Array, "*lead D"], head: OutputHead
) -> Float[Array, "*lead V"]:
    """Computes logits in float32, of the tokens in this device's shard."""
    logits = jnp.einsum(
        "...d,vd->...v",
        hidden,
        head.kernel.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)
    return soft_capped(logits, head.soft_cap)


def soft_capped(
    logits: Float[Array, "*lead"], cap: float | None
) -> Float[Array, "*lead"]:
    """Computes `c * tanh(logits / c)`, or returns the logits without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
