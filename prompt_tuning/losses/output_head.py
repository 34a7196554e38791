"""The output head as losses take it: an array, or one with a bias or a soft cap."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputHead:
    """A head with more in its logits than products of hidden states and its kernel.

    Attributes:
      kernel: `[V, D]`, with the layout of an embedding table.
      bias: bias of each logit, `[V]`, or None (GPT-J, Phi).
      soft_cap: bound `c` on the absolute value of the logits, which become
        `c * tanh(logits / c)` (Gemma Team 2024, "Gemma 2", section 2); None for none.
    """

    kernel: Float[Array, "V D"]
    bias: Float[Array, "V"] | None = None
    soft_cap: float | int | None = dataclasses.field(
        default=None, metadata={"static": True}
    )


FEW_ROWS = range(2, 65)
"""Numbers of rows of which XLA's products with a whole vocabulary are slow on CPUs. In
parts they take a third to nine tenths of the time."""

MAXIMUM_PARTS = 64

MINIMUM_PART = 256
"""Least number of tokens in a part; products with fewer are not slow."""

AnyHead = Float[Array, "V D"] | OutputHead
"""A head: its kernel alone, if the logits have neither a bias nor a soft cap."""


def as_output_head(head: AnyHead) -> OutputHead:
    """Returns a head of either form as an `OutputHead`."""
    return head if isinstance(head, OutputHead) else OutputHead(head)


def head_logits(
    hidden: Float[Array, "*lead D"], head: OutputHead
) -> Float[Array, "*lead V"]:
    """Computes logits in float32, of the tokens in this device's shard."""
    kernel = head.kernel.astype(hidden.dtype)
    rows = hidden.size // hidden.shape[-1]
    parts = _parts(len(kernel))
    if jax.default_backend() == "cpu" and rows in FEW_ROWS and parts > 1:
        logits = _logits_in_parts(hidden, kernel, parts)
    else:
        logits = jnp.einsum(
            "...d,vd->...v", hidden, kernel, preferred_element_type=jnp.float32
        )
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)
    return soft_capped(logits, head.soft_cap)


def _parts(size: int) -> int:
    """Returns the least number of equal parts of a vocabulary, or 1 where none fits."""
    most = min(MAXIMUM_PARTS, size // MINIMUM_PART)
    return next((n for n in range(2, most + 1) if size % n == 0), 1)


def _logits_in_parts(
    hidden: Float[Array, "*lead D"], kernel: Float[Array, "V D"], parts: int
) -> Float[Array, "*lead V"]:
    """Computes the logits of parts of the vocabulary by one batched product."""
    size, width = kernel.shape
    rows = hidden.reshape(-1, width)  # [n, D]
    logits = jnp.einsum(
        "pvd,pnd->pvn",
        kernel.reshape(parts, size // parts, width),
        jnp.broadcast_to(rows, (parts, *rows.shape)),
        preferred_element_type=jnp.float32,
    )
    logits = logits.reshape(size, -1).T.reshape(*hidden.shape[:-1], size)
    # Without it, XLA joins a softmax to the transposition, and its results are wrong.
    return jax.lax.optimization_barrier(logits)


def soft_capped(
    logits: Float[Array, "*lead"], cap: float | int | None
) -> Float[Array, "*lead"]:
    """Computes `c * tanh(logits / c)`, or returns the logits without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
