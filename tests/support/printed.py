"""Compares what commands print."""

import re

import numpy as np


def assert_same_printed(actual: str, expected: str) -> None:
    """Asserts the same text, whose numbers may differ in their last digits.

    The sums of programs over different shards have other orders.
    """
    texts = [
        re.split(r"(\d+\.\d+(?:e[+-]\d+)?)", printed) for printed in (actual, expected)
    ]
    assert texts[0][::2] == texts[1][::2]
    numbers = [np.array(text[1::2], float) for text in texts]
    np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1.1e-4)
