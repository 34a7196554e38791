"""Numbers that make rows draw differently, even if they are equal.

A row draws with a key made of its seed, its content, and the numbers of its sample and
token. So its tokens do not depend on other rows or on their order. If two rows are
equal in all of this, the second one continues the samples of the first.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt32


def content_number(
    ids: Sequence[int], embeddings: Float[np.ndarray, "T D"] | None = None
) -> int:
    """Returns a number below 2^32 that is nearly always another for other content.

    Args:
      ids: token ids of the row.
      embeddings: vectors that are read, not the vectors of the tokens.
    """
    content = np.asarray(ids, np.int64).tobytes()
    if embeddings is not None:
        content += np.ascontiguousarray(embeddings, np.float32).tobytes()
    return zlib.crc32(content)


def repetitions(rows: Sequence[int]) -> UInt32[np.ndarray, "R"]:
    """Returns the number of equal rows before each row.

    Args:
      rows: the hash of each row, which takes 8 bytes in an `array`.

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
