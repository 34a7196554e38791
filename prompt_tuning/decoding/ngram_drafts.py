"""Guess a row's next tokens from its own text (prompt lookup decoding).

Saxena 2023, "Prompt lookup decoding": where a row's last tokens occurred earlier, the
tokens after that occurrence are likely to follow again.
"""

from collections.abc import Sequence

LONGEST = 32
"""Maximum number of last tokens compared with earlier ones."""


def guess_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """Guesses up to `count` tokens that follow.

    Continues the earlier occurrence that agrees with the most last tokens, the latest
    one if lengths are equal. At the end of the tokens the continuation starts over, as
    in a text with a short period.

    >>> guess_tokens([5, 1, 2, 3, 4, 9, 1, 2], 3)
    [3, 4, 9]
    >>> guess_tokens([7, 1, 2, 1, 2, 1], 4)
    [2, 1, 2, 1]
    """
    longest, period = 0, 0
    for distance in range(1, len(tokens)):
        same = _common_end(tokens, distance)
        if same > longest:
            longest, period = same, distance
            if same == LONGEST:
                break
    if not longest:
        return []
    repeated = list(tokens[len(tokens) - period :])
    return [repeated[i % period] for i in range(count)]


def _common_end(tokens: Sequence[int], distance: int) -> int:
    """Returns how many last tokens equal those `distance` earlier, up to a limit."""
    last = len(tokens) - 1
    limit = min(LONGEST, len(tokens) - distance)
    for i in range(limit):
        if tokens[last - i] != tokens[last - i - distance]:
            return i
    return limit
