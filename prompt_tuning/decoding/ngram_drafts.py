"""Guesses of a row's next tokens from its own text (prompt lookup decoding).

Saxena 2023, "Prompt lookup decoding": where the last tokens of a row occurred before,
the tokens after that occurrence are guessed to follow again.
"""

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 1
"""Numbers of last tokens that are looked up, the longest first."""


def guess_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """Returns up to `count` guesses of what follows some tokens.

    >>> guess_tokens([5, 1, 2, 3, 4, 9, 1, 2], 3)
    [3, 4, 9]
    """
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        last = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == last:
                return list(tokens[start + size : start + size + count])
    return []
