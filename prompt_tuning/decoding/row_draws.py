"""Numbers that make rows sample differently, even if they are equal.

The random key of a token combines the row's seed and content with the numbers of its
sample and token. Tokens therefore do not depend on other rows or their order. If two
rows agree in all of these, the second one continues the sample numbers of the first.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt32


def content_number(
    ids: Sequence[int], embeddings: Float[np.ndarray, "T D"] | None = None
) -> int:
    """Hashes a row's content to a number below 2^32."""
    content = np.asarray(ids, np.int64).tobytes()
    if embeddings is not None:
        content += np.ascontiguousarray(embeddings, np.float32).tobytes()
    return zlib.crc32(content)


def repetitions(rows: Sequence[int]) -> UInt32[np.ndarray, "R"]:
    """Counts the equal rows before each row.

    Args:
      rows: hash of each row; an `array` takes 8 bytes per row.

    >>> repetitions([7, 8, 7, 7]).tolist()
    [0, 0, 1, 2]
    """
    hashes = np.asarray(rows, np.int64)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
    places = np.arange(len(ordered))
    numbers = np.empty(len(ordered), np.uint32)
    numbers[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return numbers
