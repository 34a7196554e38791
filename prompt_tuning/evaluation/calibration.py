"""Contextual calibration (Zhao et al. 2021, "Calibrate before use", section 5).

A model prefers some labels whatever it is given. How much, inputs without content say,
such as "N/A": each label's probability is divided by the one that it has there.
"""

import numpy as np
from jaxtyping import Float


def calibrate_nats(
    nats: Float[np.ndarray, "n C"], content_free: Float[np.ndarray, "n f C"]
) -> Float[np.ndarray, "n C"]:
    """What each label costs over what it costs without content; the least wins.

    With `p` the probabilities of the labels, normalised among them, and `q` their mean
    over the inputs without content, it is `-log(p / q)`: the diagonal matrix of the
    paper, `diag(q)^-1`, and no bias.

    Args:
      nats: of each label after each example.
      content_free: of each label after each of `f` inputs without content, for the
        example's prompt.
    """
    q = np.exp(_log_shares(content_free)).mean(axis=1)
    return np.log(q) - _log_shares(nats)


def _log_shares(nats: Float[np.ndarray, "*lead C"]) -> Float[np.ndarray, "*lead C"]:
    """The logarithms of the labels' probabilities, normalised among them."""
    least = nats.min(axis=-1, keepdims=True)
    total = np.exp(least - nats).sum(axis=-1, keepdims=True)
    return least - nats - np.log(total)
