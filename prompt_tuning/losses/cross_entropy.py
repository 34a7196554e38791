"""Cross-entropy from hidden states, with a backward pass of its own.

Softmax cross-entropy needs the logits once. Written as `hidden @ head.T` and left to
automatic differentiation, they are kept for the backward pass, and the head's matmul
runs a second time there. With a frozen head, d nll / d hidden does not depend on what
comes later: the forward pass works it out while it has the logits, keeps `[M, D]`
numbers, and the backward pass only scales them. It does so for some positions at a
time, so that of all `[M, V]` logits only a chunk exists at once.
"""

import functools
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
      nll: negative log likelihood of the target, in nats, float32; with label
        smoothing and z-loss what `token_loss` says.
      correct: whether no token scores higher than the target.
    """

    nll: Float[Array, "*lead"]
    correct: Bool[Array, "*lead"]


def token_loss(
    hidden: Float[Array, "*lead D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*lead"],
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLoss:
    """Cross-entropy of `softmax(head @ hidden)` at each position, summed in float32.

    What the losses are summed with is the caller's: any cotangent of `nll` works. If
    the head is not differentiated, nothing is computed for it.

    With label smoothing `s` the target is a distribution `q`: `1 - s` for the target
    token and `s / (V - 1)` for each other one, and the loss is its cross-entropy less
    its entropy, 0 where the model says `q` (Szegedy et al. 2016, section 7, with the
    constant of T5X, `losses.compute_weighted_cross_entropy`). The z-loss adds
    `z_loss * log(Z)**2`, `Z` the sum of the softmax (de Brebisson and Vincent 2016).

    Args:
      hidden: normed hidden states.
      head: output head, laid out like an embedding table.
      targets: token ids.
      z_loss: a Python number, 0 or more.
      label_smoothing: `s`, a Python number from 0 to below 1.

    Raises:
      ValueError: if the leading shapes differ.
    """
    return _token_loss(hidden, head, targets, z_loss, label_smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_loss(hidden, head, targets, z_loss, label_smoothing) -> TokenLoss:
    loss = functools.partial(_outcome, z_loss, label_smoothing)

    def chunk(hidden, targets):
        logits = _logits(hidden, head)
        return loss(logits, jax.nn.logsumexp(logits, axis=-1), targets)

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


def _outcome(
    z_loss: float,
    label_smoothing: float,
    logits: Array,
    normaliser: Array,
    targets: Array,
) -> TokenLoss:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    correct = picked >= logits.max(axis=-1)
    loss = normaliser - picked
    if label_smoothing:
        high, low = _smoothed(label_smoothing, logits.shape[-1])
        spread = jnp.sum(normaliser[..., None] - logits, axis=-1)
        entropy = _entropy(high, low, logits.shape[-1])
        loss = (high - low) * loss + low * spread - entropy
    if z_loss:
        loss = loss + z_loss * jnp.square(normaliser)
    return TokenLoss(loss, correct)


def _smoothed(label_smoothing: float, width: int) -> tuple[float, float]:
    """What is asked of the target token, and of each other one."""
    return 1 - label_smoothing, label_smoothing / (width - 1)


def _entropy(high: float, low: float, width: int) -> float:
    """Of the smoothed target, in nats, with T5X's guard of the logarithm."""
    return -(high * math.log(high) + (width - 1) * low * math.log(low + 1e-20))


def _excess(
    z_loss: float,
    label_smoothing: float,
    logits: Array,
    normaliser: Array,
    targets: Array,
) -> Array:
    """The gradient d loss / d logits: the softmax, less what the target asks for.

    The z-loss scales the softmax by `1 + 2 * z_loss * log(Z)`.
    """
    tokens = jnp.arange(logits.shape[-1])
    hit = tokens == targets[..., None]
    wanted = hit.astype(logits.dtype)
    if label_smoothing:
        wanted = jnp.where(hit, *_smoothed(label_smoothing, logits.shape[-1]))
    said = jnp.exp(logits - normaliser[..., None])
    if z_loss:
        said = said * (1 + 2 * z_loss * normaliser)[..., None]
    return said - wanted


def _forward(hidden, head, targets, z_loss, label_smoothing):
    trained_head = head.perturbed
    hidden, head, targets = hidden.value, head.value, targets.value
    outcome_of = functools.partial(_outcome, z_loss, label_smoothing)
    excess_of = functools.partial(_excess, z_loss, label_smoothing)

    def chunk(hidden, targets):
        logits = _logits(hidden, head)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        excess = excess_of(logits, normaliser, targets).astype(hidden.dtype)
        slope = jnp.einsum("...v,vd->...d", excess, head.astype(hidden.dtype))
        kept = excess if trained_head else None
        return outcome_of(logits, normaliser, targets), slope, kept

    with jax.named_scope("cross_entropy"):
        outcome, slope, excess = _by_chunks(chunk, hidden, targets, head.shape[0])
    kept = (hidden, excess, head) if trained_head else None
    return outcome, (slope, kept, targets)


def _backward(z_loss, label_smoothing, residuals, cotangent: TokenLoss):
    del z_loss, label_smoothing  # both are in the slope
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


_token_loss.defvjp(_forward, _backward, symbolic_zeros=True)
