"""Sizes and starts of prompts that attach at every block of a stack."""

import math
from typing import NamedTuple


class StateShape(NamedTuple):
    """Shape of the states of recurrent layers.

    Attributes:
      layers: number of recurrent layers `M`.
      others: number of layers without attention, recurrent ones included.
      window: inputs and channels of a convolution's window, `(W, C)`.
      memory: `(H, K, V)`, or None.
    """

    layers: int
    others: int
    window: tuple[int, int]
    memory: tuple[int, int, int] | None

    @property
    def size(self) -> int:
        """Number of elements `S` of one layer's state."""
        return math.prod(self.window) + math.prod(self.memory or (0,))


class StackShape(NamedTuple):
    """Shape of the stack of blocks that a prompt attaches to.

    Attributes:
      layers: number of blocks `L`.
      key_value_heads: number `G` of key/value heads in self-attention.
      head_width: width `K` of each head.
      states: shape of the states of recurrent layers; None without such layers.
      sharing: number of blocks that reuse other blocks' keys and values (Gemma 4).
    """

    layers: int
    key_value_heads: int
    head_width: int
    states: StateShape | None = None
    sharing: int = 0


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
