"""Contextual calibration (Zhao et al. 2021, "Calibrate before use", section 5).

A model prefers some labels for every input. Inputs without content, such as "N/A",
measure this bias: each label's probability is divided by its probability there.
"""

import numpy as np
from jaxtyping import Float


def calibrate_nats(
    nats: Float[np.ndarray, "n C"], content_free: Float[np.ndarray, "n f C"]
) -> Float[np.ndarray, "n C"]:
    """Calibrates the cost of each label by its cost without content; the lowest wins.

    With the probabilities `p` of the labels, normalized among the labels, and their
    mean `q` over the inputs without content, the result is `-log(p / q)`: the paper's
    diagonal matrix `diag(q)^-1`, without a bias.

    Args:
      nats: negative log likelihood of each label for each example.
      content_free: negative log likelihood of each label for each of `f` inputs
        without content, with the example's prompt.
    """
    # Mean probability of each label without content, [n, C]
    q = np.exp(log_probabilities(content_free)).mean(axis=1)
    return np.log(q) - log_probabilities(nats)


def log_probabilities(
    nats: Float[np.ndarray, "*lead C"],
) -> Float[np.ndarray, "*lead C"]:
    """Returns the log-probability of each label among the labels, given its cost."""
    minimum = nats.min(axis=-1, keepdims=True)
    total = np.exp(minimum - nats).sum(axis=-1, keepdims=True)
    return minimum - nats - np.log(total)
