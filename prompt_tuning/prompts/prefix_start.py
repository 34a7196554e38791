"""What a key/value prefix starts from, if the model has to compute it."""

from typing import NamedTuple


class PrefixStart(NamedTuple):
    """What the values of a prefix are computed from, once the model is read.

    Attributes:
      tokens: tokens that the model reads.
      windows: number of windows of them whose attention the prefix is to reproduce;
        0 if the keys and values of the tokens themselves are the prefix.
      begin: number of first tokens that begin each text, such as BOS.
    """

    tokens: tuple[int, ...]
    windows: int = 0
    begin: int = 0
