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

from prompt_tuning.losses.logit_losses import (
    LogitShard,
    LossTerms,
    divergence,
    divergence_gradient,
    is_highest,
    token_cost,
    token_cost_gradient,
)
from prompt_tuning.sharding import collectives

LARGEST_CHUNK = 2**22
"""Logits at once: 16 MB of them, which the caches of a CPU nearly hold."""

FEWEST_ROWS = 128
"""Of a chunk, however large the vocabulary: fewer would read the head too often."""


class TokenLoss(NamedTuple):
    """The outcome at every position.

    Attributes:
      nll: negative log likelihood of the target, in nats, float32; with label
        smoothing and z-loss what `token_loss` says, with a teacher the divergence.
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
    soft_cap: float | None = None,
) -> TokenLoss:
    """Cross-entropy of `softmax(head @ hidden)` at each position, summed in float32.

    What the losses are summed with is the caller's: any cotangent of `nll` works. If
    the head is not differentiated, nothing is computed for it.

    With label smoothing `s` the target is a distribution `q`: `1 - s` for the target
    token and `s / (V - 1)` for each other one, and the loss is its cross-entropy less
    its entropy, 0 where the model says `q` (Szegedy et al. 2016, section 7, with the
    constant of T5X, `losses.compute_weighted_cross_entropy`). The z-loss adds
    `z_loss * log(Z)**2`, `Z` the sum of the softmax (de Brebisson and Vincent 2016).
    A soft cap `c` puts `c * tanh(logits / c)` in place of the logits (Gemma Team 2024,
    "Gemma 2", section 2).

    Args:
      hidden: normed hidden states.
      head: output head, laid out like an embedding table.
      targets: token ids.
      z_loss: a Python number, 0 or more.
      label_smoothing: `s`, a Python number from 0 to below 1.
      soft_cap: `c`, a Python number above 0, or None for no cap.

    Raises:
      ValueError: if the leading shapes differ.
    """
    terms = LossTerms(z_loss, label_smoothing, soft_cap)
    return _divided_loss(hidden, head, targets, None, terms)


def distillation_loss(
    hidden: Float[Array, "*lead D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*lead"],
    teacher: Float[Array, "*lead D"],
) -> TokenLoss:
    """How far a model is from what a teacher says in its place: `KL(teacher || model)`.

    Computed as `token_loss` is: the logits of both exist for a chunk of positions at
    once. The teacher is not differentiated.

    Args:
      hidden: normed hidden states of the model.
      head: output head of both.
      targets: token ids, of which `correct` speaks.
      teacher: normed hidden states of the teacher.

    Raises:
      ValueError: if the leading shapes differ.
    """
    return _divided_loss(hidden, head, targets, teacher, LossTerms())


def _divided_loss(hidden, head, targets, teacher, terms: LossTerms) -> TokenLoss:
    """The loss where a mesh may give each device a part of the vocabulary.

    Of each position only maxima, sums and the target's logit are exchanged, and its
    hidden state's gradient, which every device has a part of.
    """
    if teacher is not None:
        teacher = collectives.gather_rows(teacher)
    shared = collectives.gather_rows(hidden), collectives.gather_rows(targets)
    outcome: Any = _loss(shared[0], head, shared[1], teacher, terms)
    return TokenLoss(*map(collectives.local_rows, outcome))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(hidden, head, targets, teacher, terms: LossTerms) -> TokenLoss:
    def chunk(hidden, targets, teacher):
        return _outcome(_scores(hidden, head, terms), targets, teacher, head, terms)[0]

    return _by_chunks(chunk, (hidden, targets, teacher), head.shape[0])


def _by_chunks(function: Callable[..., Any], rows: tuple, width: int) -> Any:
    """Applies a function to some positions at a time.

    Args:
      function: of arrays with a leading axis `c`; gives such arrays.
      rows: hidden states `[*lead, D]`, targets `[*lead]`, and the teacher's hidden
        states `[*lead, D]` or None: what the function takes of all positions.
      width: numbers that a position takes while it is worked on, `V`.

    Returns:
      the function's arrays, with the leading axes of the targets.

    Raises:
      ValueError: if the leading shapes differ.
    """
    lead = rows[1].shape
    for found in (rows[0], rows[2]):
        if found is not None and found.shape[:-1] != lead:
            raise ValueError(
                f"hidden states {found.shape} and targets {lead} must agree on every "
                "axis but the last; were the loss positions gathered on both sides?"
            )
    count = math.prod(lead)
    chunks = max(1, -(-count // max(LARGEST_CHUNK // width, FEWEST_ROWS)))
    size = -(-count // chunks)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[len(lead) :]), rows)
    if chunks == 1:
        made = function(*flat)
    else:

        def cut(x: Array) -> Array:
            padding = [(0, chunks * size - count), *[(0, 0)] * (x.ndim - 1)]
            return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

        made = jax.lax.map(lambda chunk: function(*chunk), jax.tree.map(cut, flat))
        made = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], made)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), made)


def _scores(hidden: Array, head: Array, terms: LossTerms) -> LogitShard:
    """Of some positions; the logits of a device's part of the vocabulary."""
    logits = jnp.einsum(
        "...d,vd->...v",
        hidden,
        head.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return LogitShard.from_logits(
        terms.cap(logits), collectives.vocabulary_shard(len(head))
    )


def _outcome(
    scores: LogitShard,
    targets: Array,
    teacher: Array | None,
    head: Array,
    terms: LossTerms,
) -> tuple[TokenLoss, Callable[[], Array]]:
    """The outcome of some positions, and what computes its gradient at the logits."""
    correct = is_highest(scores, targets)
    if teacher is None:
        cost = token_cost(terms, scores, targets)
        slope = functools.partial(token_cost_gradient, terms, scores, targets)
    else:
        said = _scores(teacher, head, terms)
        cost = divergence(scores, said)
        slope = functools.partial(divergence_gradient, scores, said)
    return TokenLoss(cost, correct), lambda: terms.cap_gradient(slope(), scores.logits)


def _forward(hidden, head, targets, teacher, terms: LossTerms):
    trained_head = head.perturbed
    values = (hidden.value, targets.value, None if teacher is None else teacher.value)
    head = head.value

    def chunk(hidden, targets, teacher):
        scores = _scores(hidden, head, terms)
        outcome, slope = _outcome(scores, targets, teacher, head, terms)
        excess = slope().astype(hidden.dtype)
        back = jnp.einsum("...v,vd->...d", excess, head.astype(hidden.dtype))
        return outcome, back, excess if trained_head else None

    with jax.named_scope("cross_entropy"):
        outcome, slope, excess = _by_chunks(chunk, values, head.shape[0])
    kept = (values[0], excess, head) if trained_head else None
    return outcome, (slope, kept, targets.value)


def _backward(terms, residuals, cotangent: TokenLoss):
    del terms  # they are in the slope
    slope, kept, targets = residuals
    scale = cotangent.nll
    no_targets = np.zeros(targets.shape, jax.dtypes.float0)
    if isinstance(scale, jax.custom_derivatives.SymbolicZero):
        return None, None, no_targets, None
    # Rounded after the product: a weight over the sum of all is no bfloat16 number, and
    # rounded by itself it would move the gradients of all positions one way.
    d_hidden = (slope * scale[..., None]).astype(slope.dtype)
    if kept is None:
        return d_hidden, None, no_targets, None
    hidden, excess, head = kept
    scaled = (hidden * scale[..., None]).astype(hidden.dtype)
    d_head = jnp.einsum(
        "...v,...d->vd", excess, scaled, preferred_element_type=jnp.float32
    )
    return d_hidden, d_head.astype(head.dtype), no_targets, None


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
