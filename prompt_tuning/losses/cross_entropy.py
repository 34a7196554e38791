"""Cross-entropy from hidden states, with a backward pass of its own.

Softmax cross-entropy needs the logits once. Written as `hidden @ head.T` and left to
automatic differentiation, they are kept for the backward pass, and the head's matmul
runs a second time there. With a frozen head, d nll / d hidden does not depend on what
comes later: the forward pass works it out while it has the logits, keeps `[M, D]`
numbers, and the backward pass only scales them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


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
    logits = _logits(hidden, head, targets)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    return _outcome(logits, normaliser, targets)


def _logits(hidden: Array, head: Array, targets: Array) -> Array:
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden states {hidden.shape} and targets {targets.shape} must agree on "
            "every axis but the last; were the loss positions gathered on both sides?"
        )
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
    with jax.named_scope("cross_entropy"):
        logits = _logits(hidden, head, targets)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        excess = _excess(logits, normaliser, targets).astype(hidden.dtype)
        slope = jnp.einsum("...v,vd->...d", excess, head.astype(hidden.dtype))
        kept = (hidden, excess, head) if trained_head else None
        return _outcome(logits, normaliser, targets), (slope, kept, targets)


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
