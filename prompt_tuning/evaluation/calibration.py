"""Contextual calibration (Zhao et al. 2021, "Calibrate before use", section 5).

A model prefers some labels whatever the input. Inputs without content, e.g. "N/A",
measure this bias: each label's probability is divided by its probability given these.
"""

import numpy as np
from jaxtyping import Float


def calibrate_nats(
    nats: Float[np.ndarray, "n C"], content_free: Float[np.ndarray, "n f C"]
) -> Float[np.ndarray, "n C"]:
    """Calibrates the cost of each label by its cost without content; the lowest wins.

    With the labels' probabilities `p`, normalized over the labels, and their mean `q`
    over the inputs without content, the result is `-log(p / q)`: the paper's diagonal
    matrix `diag(q)^-1`, without a bias.

    Args:
      nats: negative log likelihood of each label for each example.
      content_free: the same for each of `f` inputs without content, with the example's
        prompt.
    """
    # Mean probability of each label without content, [n, C]
    q = np.exp(log_probabilities(content_free)).mean(axis=1)
    return np.log(q) - log_probabilities(nats)


def log_probabilities(
    nats: Float[np.ndarray, "*lead C"],
) -> Float[np.ndarray, "*lead C"]:
    """Normalizes costs to log-probabilities over the labels."""
    minimum = nats.min(axis=-1, keepdims=True)
    total = np.exp(minimum - nats).sum(axis=-1, keepdims=True)
    return minimum - nats - np.log(total)
