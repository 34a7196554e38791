"""Cross-entropy from hidden states, with a backward pass of its own.

Softmax cross-entropy needs the logits once. Written as `hidden @ head.T` and left to
automatic differentiation, they are kept for the backward pass, and the head's matmul
runs a second time there. With a frozen head, d nll / d hidden does not depend on what
comes later: the forward pass works it out while it has the logits, keeps `[M, D]`
numbers, and the backward pass only scales them. It does so for some positions at a
time, so that of all `[M, V]` logits only a chunk exists at once.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LARGEST_CHUNK = 2**22
"""Logits at once: 16 MB of them, which the caches of a CPU nearly hold."""

FEWEST_ROWS = 128
"""Of a chunk, however large the vocabulary: fewer would read the head too often."""


class TokenLoss(NamedTuple):
    """The outcome at every position.

    Attributes:
      nll: negative log likelihood of the target, in nats, float32.
      correct: whether no token scores higher than the target.
    """

    nll: Float[Array, "*lead"]
    correct: Bool[Array, "*lead"]


@jax.custom_vjp
def token_loss(
    hidden: Float[Array, "*lead D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*lead"],
) -> TokenLoss:
    """Cross-entropy of `softmax(head @ hidden)` at each position, summed in float32.

    What the losses are summed with is the caller's: any cotangent of `nll` works. If
    the head is not differentiated, nothing is computed for it.

    Args:
      hidden: normed hidden states.
      head: output head, laid out like an embedding table.
      targets: token ids.

    Raises:
      ValueError: if the leading shapes differ.
    """

    def chunk(hidden, targets):
        logits = _logits(hidden, head)
        return _outcome(logits, jax.nn.logsumexp(logits, axis=-1), targets)

    return _by_chunks(chunk, hidden, targets, head.shape[0])


def _by_chunks(
    function: Callable[[Array, Array], Any], hidden: Array, targets: Array, width: int
) -> Any:
    """Applies a function of `[c, D]` and `[c]` to some positions at a time.

    Args:
      function: gives arrays with a leading axis `c`.
      hidden: `[*lead, D]`.
      targets: `[*lead]`.
      width: numbers that a position takes while it is worked on, `V`.

    Returns:
      the function's arrays, with the leading axes of `targets`.

    Raises:
      ValueError: if the leading shapes differ.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden states {hidden.shape} and targets {targets.shape} must agree on "
            "every axis but the last; were the loss positions gathered on both sides?"
        )
    count = math.prod(targets.shape)
    chunks = max(1, -(-count // max(LARGEST_CHUNK // width, FEWEST_ROWS)))
    size = -(-count // chunks)
    rows = hidden.reshape(count, -1), targets.reshape(count)
    if chunks == 1:
        made = function(*rows)
    else:
        cut = [
            jnp.pad(x, [(0, chunks * size - count), *[(0, 0)] * (x.ndim - 1)]).reshape(
                chunks, size, *x.shape[1:]
            )
            for x in rows
        ]
        made = jax.lax.map(lambda chunk: function(*chunk), tuple(cut))
        made = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], made)
    return jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[1:]), made)


def _logits(hidden: Array, head: Array) -> Array:
    return jnp.einsum(
        "...d,vd->...v",
        hidden,
        head.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def _outcome(logits: Array, normaliser: Array, targets: Array) -> TokenLoss:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return TokenLoss(normaliser - picked, picked >= logits.max(axis=-1))


def _excess(logits: Array, normaliser: Array, targets: Array) -> Array:
    """The gradient d nll / d logits: the softmax, less one at the target."""
    tokens = jnp.arange(logits.shape[-1])
    hit = (tokens == targets[..., None]).astype(logits.dtype)
    return jnp.exp(logits - normaliser[..., None]) - hit


def _forward(hidden, head, targets):
    trained_head = head.perturbed
    hidden, head, targets = hidden.value, head.value, targets.value

    def chunk(hidden, targets):
        logits = _logits(hidden, head)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        excess = _excess(logits, normaliser, targets).astype(hidden.dtype)
        slope = jnp.einsum("...v,vd->...d", excess, head.astype(hidden.dtype))
        kept = excess if trained_head else None
        return _outcome(logits, normaliser, targets), slope, kept

    with jax.named_scope("cross_entropy"):
        outcome, slope, excess = _by_chunks(chunk, hidden, targets, head.shape[0])
    kept = (hidden, excess, head) if trained_head else None
    return outcome, (slope, kept, targets)


def _backward(residuals, cotangent: TokenLoss):
    slope, kept, targets = residuals
    scale = cotangent.nll
    no_targets = np.zeros(targets.shape, jax.dtypes.float0)
    if isinstance(scale, jax.custom_derivatives.SymbolicZero):
        return None, None, no_targets
    d_hidden = slope * scale[..., None].astype(slope.dtype)
    if kept is None:
        return d_hidden, None, no_targets
    hidden, excess, head = kept
    scaled = hidden * scale[..., None].astype(hidden.dtype)
    d_head = jnp.einsum(
        "...v,...d->vd", excess, scaled, preferred_element_type=jnp.float32
    )
    return d_hidden, d_head.astype(head.dtype), no_targets


token_loss.defvjp(_forward, _backward, symbolic_zeros=True)
