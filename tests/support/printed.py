"""Compares what commands print."""

import re

import numpy as np

NUMBER = re.compile(r"(\d+\.\d+)")


def assert_same_printed(actual: str, expected: str) -> None:
    """Asserts the same text, whose numbers may differ in their last printed digit.

    The sums of programs over different shards have other orders, so numbers that are
    printed in full may differ by 1e-5 of their size.
    """
    texts = [NUMBER.split(printed) for printed in (actual, expected)]
    assert texts[0][::2] == texts[1][::2]
    for first, second in zip(texts[0][1::2], texts[1][1::2], strict=True):
        digits = len(second.partition(".")[2])
        np.testing.assert_allclose(
            float(first), float(second), rtol=1e-5, atol=1.1 * 10**-digits
        )
