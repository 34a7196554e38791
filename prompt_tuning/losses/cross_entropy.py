"""Cross-entropy from hidden states, with a custom backward pass.

Softmax cross-entropy needs the logits once. If you write `hidden @ head.T` and leave it
to automatic differentiation, the logits are stored for the backward pass, and the
product with the head runs a second time there. But with a frozen head, the gradient of
the loss with respect to the hidden state needs no later result:

    d nll / d hidden = (softmax(logits) - q) @ head,    q: target distribution

The forward pass computes it while the logits exist and stores `[M, D]` numbers; the
backward pass multiplies each row by the cotangent of its loss. Positions are processed
in chunks, so only one chunk of the `[M, V]` logits exists at any time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.errors import InputError
from prompt_tuning.losses import output_head
from prompt_tuning.losses.logit_losses import (
    FORWARD,
    Divergence,
    LogitShard,
    LossTerms,
    TopTargets,
    completed,
    divergence,
    divergence_gradient,
    is_highest,
    token_cost,
    token_cost_gradient,
)
from prompt_tuning.losses.output_head import AnyHead, OutputHead, ReplacedColumns
from prompt_tuning.sharding import collectives

LARGEST_CHUNK = 2**22
"""Maximum number of logits at once: 16 MB, which nearly fits the caches of a CPU."""

FEWEST_ROWS = 128
"""Minimum rows of a chunk: with fewer, the head would be read too often."""


class HeadWeights(NamedTuple):
    """Arrays of an `OutputHead`, or what the backward pass knows of them."""

    kernel: Any
    bias: Any
    rows: Any = None


class TokenLoss(NamedTuple):
    """Loss and correctness at every position.

    Attributes:
      nll: negative log likelihood of the target, in nats, float32. Includes the label
        smoothing and z-loss of `token_loss`; with a teacher it is the divergence.
      correct: whether no token scores higher than the target.
    """

    nll: Float[Array, "*lead"]
    correct: Bool[Array, "*lead"]


def token_loss(
    hidden: Float[Array, "*lead D"],
    head: AnyHead,
    targets: Int[Array, "*lead"],
    z_loss: float | int = 0.0,
    label_smoothing: float | int = 0.0,
    soft_cap: float | int | None = None,
) -> TokenLoss:
    """Cross-entropy of `softmax(head @ hidden)` at each position, summed in float32.

    You may combine the losses in any way: every cotangent of `nll` is supported. If the
    head is not differentiated, no gradient is computed for it.

    With label smoothing `s` the target is a distribution `q`: `1 - s` for the target
    token and `s / (V - 1)` for each other one. The loss is its cross-entropy minus its
    entropy, which is 0 if the model predicts `q` (Szegedy et al. 2016, section 7, with
    the constant of T5X, `losses.compute_weighted_cross_entropy`). The z-loss adds
    `z_loss * log(Z)**2`, where `Z` is the sum of the softmax (de Brebisson and Vincent
    2016). A soft cap `c` replaces the logits by `c * tanh(logits / c)` (Gemma Team
    2024, "Gemma 2", section 2).

    Args:
      hidden: normalized hidden states.
      head: output head, with the layout of an embedding table.
      targets: token ids.
      z_loss: a Python number, 0 or more.
      label_smoothing: `s`, a Python number from 0 to below 1.
      soft_cap: `c`, a Python number above 0, or None for the head's own cap.

    Raises:
      InputError: if both `soft_cap` and the head cap the logits.
      ValueError: if the leading shapes differ.
    """
    head = output_head.as_output_head(head)
    if soft_cap is not None and head.soft_cap is not None:
        raise InputError(
            f"TokenObjective.soft_cap is {soft_cap}, but the model caps its logits at "
            f"{head.soft_cap}: leave soft_cap out"
        )
    cap = soft_cap or head.soft_cap
    terms = LossTerms(z_loss, label_smoothing, cap, of_classes=head.of_classes)
    return _sharded_loss(hidden, head, targets, None, terms)


def distillation_loss(
    hidden: Float[Array, "*lead D"],
    head: AnyHead,
    targets: Int[Array, "*lead"],
    teacher: Float[Array, "*lead D"] | TopTargets,
    divergence: Divergence = FORWARD,
) -> TokenLoss:
    """Divergence of a model from its teacher at each position, over the vocabulary.

    Computed as in `token_loss`: the logits of both models exist for one chunk of
    positions at a time. The teacher is not differentiated.

    Args:
      hidden: normalized hidden states of the model.
      head: output head of both models.
      targets: token ids that `correct` is about.
      teacher: normalized hidden states of the teacher, or its likeliest tokens.
      divergence: which one; by default `KL(teacher || model)`.

    Raises:
      ValueError: if the leading shapes differ.
    """
    head = output_head.as_output_head(head)
    terms = LossTerms(soft_cap=head.soft_cap, divergence=divergence)
    return _sharded_loss(hidden, head, targets, teacher, terms)


def top_targets(
    hidden: Float[Array, "*lead D"], head: AnyHead, mass: float | int, count: int
) -> TopTargets:
    """Finds the fewest tokens at each position with a total probability of `mass`.

    There are at most `count`. The vocabulary of `head` must not be sharded.
    """
    head = output_head.as_output_head(head)
    terms, size = LossTerms(soft_cap=head.soft_cap), head.kernel.shape[0]
    weights = HeadWeights(head.kernel, head.bias, head.rows)

    def chunk(hidden: Array, _: Array, __: None) -> TopTargets:
        scores = _logit_shard(hidden, weights, terms, head.columns).log_softmax
        logprobs, ids = jax.lax.top_k(scores, min(count, size))
        found = jnp.exp(logprobs)
        needed = jnp.cumsum(found, axis=-1) - found < mass
        return TopTargets(ids, jnp.where(needed, logprobs, -jnp.inf))

    positions = jnp.zeros(hidden.shape[:-1], jnp.int32)
    return TopTargets(*_map_chunks(chunk, (hidden, positions, None), size))


def _sharded_loss(
    hidden, head: OutputHead, targets, teacher, terms: LossTerms
) -> TokenLoss:
    """Computes the loss on a mesh, where devices may hold shards of the vocabulary.

    Per position, devices exchange maxima, sums, the target's logit, and their shares of
    the hidden state's gradient; logits are never gathered.
    """
    teacher = jax.tree.map(collectives.gather_rows, teacher)
    weights = HeadWeights(head.kernel, head.bias, head.rows)
    losses: Any
    if terms.of_classes:
        losses = _loss(hidden, weights, targets, None, terms, None)
        return TokenLoss(*losses)
    shared = collectives.gather_rows(hidden), collectives.gather_rows(targets)
    losses = _loss(shared[0], weights, shared[1], teacher, terms, head.columns)
    return TokenLoss(*map(collectives.local_rows, losses))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(
    hidden, head, targets, teacher, terms: LossTerms, columns: ReplacedColumns | None
) -> TokenLoss:
    """Computes the loss; differentiated, `_forward` and `_backward` replace it."""

    def chunk(hidden, targets, teacher):
        logits = _logit_shard(hidden, head, terms, columns)
        return _loss_and_gradient(logits, targets, teacher, head, terms, columns)[0]

    return _map_chunks(chunk, (hidden, targets, teacher), head.kernel.shape[0])


def _map_chunks(function: Callable[..., Any], rows: tuple, width: int) -> Any:
    """Applies a function to one chunk of positions at a time.

    Args:
      function: takes and returns arrays with a leading axis `c` of positions.
      rows: arguments for all positions: hidden states `[*lead, D]`, targets `[*lead]`,
        and the teacher's hidden states `[*lead, D]`, its `TopTargets`, or None.
      width: how many numbers the function needs per position, `V`.

    Returns:
      the function's arrays, with the leading axes of the targets.

    Raises:
      ValueError: if the leading shapes differ.
    """
    lead = rows[1].shape
    for states in (rows[0], *jax.tree.leaves(rows[2])):
        if states.shape[:-1] != lead:
            raise ValueError(
                f"hidden states {states.shape} and targets {lead} must agree on every "
                "axis but the last; were the loss positions gathered on both sides?"
            )
    count = math.prod(lead)  # M
    chunks = max(1, -(-count // max(LARGEST_CHUNK // width, FEWEST_ROWS)))
    size = -(-count // chunks)  # c
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[len(lead) :]), rows)
    if chunks == 1:
        results = function(*flat)
    else:

        def split(x: Array) -> Array:  # [M, ...] -> [chunks, c, ...]
            padding = [(0, chunks * size - count), *[(0, 0)] * (x.ndim - 1)]
            return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

        results = jax.lax.map(lambda chunk: function(*chunk), jax.tree.map(split, flat))
        # [chunks, c, ...] -> [M, ...], without the padding of the last chunk
        results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], results)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)


def _logit_shard(
    hidden: Array, head: HeadWeights, terms: LossTerms, columns: ReplacedColumns | None
) -> LogitShard:
    """Computes this device's logits at some positions."""
    # [c, D], [v, D] -> [c, v]
    whole = OutputHead(head.kernel, head.bias, terms.soft_cap, head.rows, columns)
    logits = output_head.head_logits(hidden, whole)
    count = logits.shape[-1]
    shard = collectives.VocabularyShard(0, count, count)
    if not terms.of_classes:
        shard = collectives.vocabulary_shard(count)
    return LogitShard.from_logits(logits, shard)


def _loss_and_gradient(
    logits: LogitShard,
    targets: Array,
    teacher: Array | TopTargets | None,
    head: HeadWeights,
    terms: LossTerms,
    columns: ReplacedColumns | None,
) -> tuple[TokenLoss, Callable[[], Array]]:
    """Computes the losses at some positions.

    Returns:
      the losses, and a function that computes their gradient `[c, v]` with respect to
      the logits before the soft cap.
    """
    correct = is_highest(logits, targets)
    if teacher is None:
        cost = token_cost(terms, logits, targets)
        gradient = functools.partial(token_cost_gradient, terms, logits, targets)
    else:
        if isinstance(teacher, TopTargets):
            teacher_logits = completed(teacher, logits)
        else:
            teacher_logits = _logit_shard(teacher, head, terms, columns)
        compared = terms.divergence, logits, teacher_logits
        cost = divergence(*compared)
        gradient = functools.partial(divergence_gradient, *compared)
    return (
        TokenLoss(cost, correct),
        lambda: terms.cap_gradient(gradient(), logits.logits),
    )


def _forward(hidden, head, targets, teacher, terms: LossTerms, columns):
    """Computes the loss and, while the logits exist, `d nll / d hidden`.

    Only a trained head needs `d nll / d logits` in the backward pass, so only then are
    these `[M, V]` numbers stored; `[M, n]` if only replaced rows are trained.
    """
    # A kernel is an array, or a quantized table of several, which is never trained.
    trains_kernel, trains_bias, trains_rows = (
        any(leaf.perturbed for leaf in jax.tree.leaves(part, is_leaf=_is_primal))
        for part in head
    )
    trained_head = trains_kernel or trains_bias
    values, head = jax.tree.map(
        lambda leaf: leaf.value, ((hidden, targets, teacher), head), is_leaf=_is_primal
    )
    kernel = head.kernel

    def chunk(hidden, targets, teacher):
        logits = _logit_shard(hidden, head, terms, columns)
        losses, gradient = _loss_and_gradient(
            logits, targets, teacher, head, terms, columns
        )
        d_logits, d_own = gradient().astype(hidden.dtype), None  # [c, v]
        if columns is not None:
            d_logits, d_own = columns.split(d_logits, len(kernel))
        d_hidden = output_head.hidden_gradient(d_logits, kernel)
        if d_own is not None:
            d_hidden += output_head.hidden_gradient(d_own, head.rows)
        kept = (d_logits if trained_head else None, d_own if trains_rows else None)
        return losses, d_hidden, *kept

    with jax.named_scope("cross_entropy"):
        losses, d_hidden, *d_head = _map_chunks(chunk, values, kernel.shape[0])
    trains = (trains_kernel, trains_bias, trains_rows)
    trained = HeadWeights(
        *(
            leaf if is_trained else None
            for leaf, is_trained in zip(head, trains, strict=True)
        )
    )
    for_head = (values[0], *d_head, trained) if any(trains) else None
    return losses, (d_hidden, for_head, targets.value)


def _backward(terms, columns, residuals, cotangent: TokenLoss):
    """Scales the stored gradients by the cotangent `g` of each position's loss.

    `d_hidden[m] = g[m] * (d nll[m] / d hidden[m])`, and for a trained head
    `d_head = sum_m (d nll[m] / d logits[m]) outer (g[m] * hidden[m])`.
    """
    del terms, columns  # applied in the forward pass
    d_nll, for_head, targets = residuals
    scale = cotangent.nll  # g, [*lead]
    no_targets = np.zeros(targets.shape, jax.dtypes.float0)
    if isinstance(scale, jax.custom_derivatives.SymbolicZero):
        return None, None, no_targets, None
    # Rounded after the product: a weight over the sum of all weights is not exact in
    # bfloat16, and rounding it first would bias the gradients of all positions alike.
    d_hidden = (d_nll * scale[..., None]).astype(d_nll.dtype)
    if for_head is None:
        return d_hidden, None, no_targets, None
    hidden, d_logits, d_own, head = for_head
    scaled = (hidden * scale[..., None]).astype(hidden.dtype)
    d_kernel = _rows_gradient(d_logits, scaled, head.kernel)
    d_rows = _rows_gradient(d_own, scaled, head.rows)
    d_bias = None
    if head.bias is not None:
        d_bias = jnp.einsum(  # [*lead, v], [*lead] -> [v]
            "...v,...->v", d_logits, scale, preferred_element_type=jnp.float32
        ).astype(head.bias.dtype)
    return d_hidden, HeadWeights(d_kernel, d_bias, d_rows), no_targets, None


def _is_primal(leaf: Any) -> bool:
    """Tests whether an argument of a custom rule stands for a single array."""
    return hasattr(leaf, "perturbed")


def _rows_gradient(d_logits, scaled, rows) -> Array | None:
    """Returns the gradient of a head's rows, `[v, D]`; None if they are frozen."""
    if rows is None:
        return None
    return jnp.einsum(  # [*lead, v], [*lead, D] -> [v, D]
        "...v,...d->vd", d_logits, scaled, preferred_element_type=jnp.float32
    ).astype(rows.dtype)


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
