"""Start of a key/value prefix that the model has to compute."""

from typing import NamedTuple


class PrefixStart(NamedTuple):
    """Input from which the model computes a prefix's first values.

    Attributes:
      tokens: tokens that the model reads.
      windows: in how many windows of them the prefix should reproduce attention; 0 if
        the tokens' own keys and values are the prefix.
      begin: how many of the first tokens begin every text, e.g. BOS.
    """

    tokens: tuple[int, ...]
    windows: int = 0
    begin: int = 0
