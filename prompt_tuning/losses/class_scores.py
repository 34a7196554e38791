"""Losses of the scores that a model gives the classes of an example.

A class's score is the log-probability of its verbalizer; the class that scores highest
is the answer (rank classification).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def total_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Log-probability of each row's targets, in nats: minus the weighted sum."""
    return -jnp.sum(weights * nll, axis=-1)


def mean_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Log-probability over the sum of the weights, so that long labels do not lose."""
    total = jnp.sum(weights, axis=-1)
    return total_scores(nll, weights) / jnp.where(total == 0, 1, total)


def class_cross_entropy(
    scores: Float[Array, "B C"], gold: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Cross-entropy of the softmax over the classes, in nats."""
    return jax.nn.logsumexp(scores, axis=-1) - _of_gold(scores, gold)


def class_hinge(
    scores: Float[Array, "B C"], gold: Int[Array, "B"], margin: float
) -> Float[Array, "B"]:
    """How much the gold class lacks of leading by a margin; 0 where it leads.

    The multi-class hinge loss `max(0, margin + max_{c != gold} s_c - s_gold)` (Crammer
    and Singer 2001). The perceptron loss of google-research/prompt-tuning takes the
    maximum over the gold class too: there an example that leads at all, by a margin or
    not, costs the constant `margin` and has no gradient.

    Args:
      scores: of each class.
      gold: the right one.
      margin: by how much it should score above every other.
    """
    others = jnp.where(_is_gold(scores, gold), -jnp.inf, scores).max(axis=-1)
    return jax.nn.relu(margin + others - _of_gold(scores, gold))


def _is_gold(scores: Array, gold: Array) -> Bool[Array, "B C"]:
    return jnp.arange(scores.shape[-1]) == gold[..., None]


def _of_gold(scores: Array, gold: Array) -> Float[Array, "B"]:
    return jnp.sum(jnp.where(_is_gold(scores, gold), scores, 0), axis=-1)
