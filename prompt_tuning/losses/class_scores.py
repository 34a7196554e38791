"""Losses of the scores that a model gives an example's classes.

A class is scored by the log-probability of its verbalizer; the highest score is the
answer (rank classification).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def total_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Log-probability of each row's targets in nats: minus the weighted NLL."""
    return -jnp.sum(weights * nll, axis=-1)


def mean_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Mean log-probability by weight, which does not penalize long labels."""
    total = jnp.sum(weights, axis=-1)  # [*lead]
    # Filling rows have no weight; a divisor of 1 avoids 0 / 0.
    return total_scores(nll, weights) / jnp.where(total == 0, 1, total)


def class_cross_entropy(
    scores: Float[Array, "B C"], gold: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Cross-entropy of the softmax over the classes, in nats."""
    return jax.nn.logsumexp(scores, axis=-1) - _gold_scores(scores, gold)


def class_hinge(
    scores: Float[Array, "B C"], gold: Int[Array, "B"], margin: float | int
) -> Float[Array, "B"]:
    """Returns how far the gold class falls short of leading by a margin, at least 0.

    The multi-class hinge loss `max(0, margin + max_{c != gold} s_c - s_gold)` (Crammer
    and Singer 2001). google-research/prompt-tuning's perceptron loss includes the gold
    class in the maximum: there, an example in which the gold class leads by any amount
    costs the constant `margin` and has no gradient.
    """
    # [B]: highest score among the wrong classes
    best_wrong = jnp.where(_is_gold(scores, gold), -jnp.inf, scores).max(axis=-1)
    return jax.nn.relu(margin + best_wrong - _gold_scores(scores, gold))


def _is_gold(scores: Array, gold: Array) -> Bool[Array, "B C"]:
    return jnp.arange(scores.shape[-1]) == gold[..., None]


def _gold_scores(scores: Array, gold: Array) -> Float[Array, "B"]:
    return jnp.sum(jnp.where(_is_gold(scores, gold), scores, 0), axis=-1)
