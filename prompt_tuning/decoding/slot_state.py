"""Device arrays of the rows in slots, and the arguments that describe a row."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.block_arrays import BlockArrays
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.layer_kinds import key_layers, key_value_sizes
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.recurrent_state import RecurrentState

Integers = Int[Array, "..."] | Int[np.ndarray, "..."]

SECTION = 512
"""Minimum number of columns in the first section; the actual number is little more."""


def section_sizes(length: int, chunk: int) -> list[int]:
    """Returns the number of columns of each section.

    Every section after the first doubles the total length, so few programs serve rows
    of all lengths. Sizes are multiples of `chunk`, so a chunk never crosses sections.
    """
    ends = [min(-(-SECTION // chunk) * chunk, length)]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return [end - start for start, end in itertools.pairwise([0, *ends])]


class BlockKeyValues(NamedTuple):
    """Keys and values `[L, G, B, S, K]`, stored as one array per block.

    A step writes into them in place and reads them without a copy.
    """

    keys: BlockArrays
    values: BlockArrays

    @classmethod
    def zeros(
        cls, config: ModelConfig, rows: int, length: int, *, compressed: bool
    ) -> "BlockKeyValues":
        """Returns zeros for so many columns of rows; see `key_value_sizes`."""
        groups, *widths = key_value_sizes(config, compressed=compressed)
        shape = (key_layers(config), groups, rows, length)
        return cls(*(BlockArrays.zeros((*shape, x), config.dtype) for x in widths))

    def map(self, function: Callable[..., Array], *others: Any) -> "BlockKeyValues":
        """Applies a function to the arrays of each block.

        Args:
          function: takes an array `[G, B, S, K]` and the matching arrays of `others`.
          *others: more keys and values, stacked or not.
        """
        return BlockKeyValues(
            *(
                part.map(function, *entries)
                for part, *entries in zip(self, *others, strict=True)
            )
        )

    @property
    def length(self) -> int:
        """Number of columns `S`."""
        return self.keys.shape[3]

    def as_source(self) -> KeyValues:
        """Returns them for a model that runs its blocks one by one."""
        return KeyValues(*(cast(Array, part) for part in self))

    def stacked(self) -> KeyValues:
        """Returns a stacked copy, for a model that scans over its blocks."""
        return KeyValues(*(part.stacked() for part in self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Device arrays of all rows.

    Attributes:
      own: keys and values of each row, in sections of columns, `[L, G, B, section, K]`.
        A program reads only the first sections, up to the longest row.
      hidden: state that predicts each row's next token, `[B, D]`.
      cross: keys and values of each row's encoder output, `[L, G, B, E, K]`; None in a
        decoder-only model.
      cross_mask: marks those that are not padding, `[B, E]`.
      state: states of the recurrent layers after each row's last token; None without
        such layers.
    """

    own: tuple[BlockKeyValues, ...]
    hidden: Float[Array, "B D"]
    cross: BlockKeyValues | None
    cross_mask: Bool[Array, "B E"] | None
    state: RecurrentState | None = None

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        count: int,
        length: int,
        chunk: int,
        *,
        compressed: bool = False,
    ) -> "Slots":
        """Returns empty slots.

        `chunk` divides `length`; `compressed` is for `LatentAttention`.
        """
        zeros = functools.partial(
            BlockKeyValues.zeros, config, count, compressed=compressed
        )
        decodes_alone = config.architecture == "decoder_only"
        return cls(
            tuple(map(zeros, section_sizes(length, chunk))),
            jnp.zeros((count, config.width), config.dtype),
            None if decodes_alone else zeros(length),
            None if decodes_alone else jnp.zeros((count, length), bool),
            RecurrentState.zeros(config, count) if config.recurrent_layers else None,
        )

    def in_form(self, key_values: KeyValues, model: LanguageModel) -> KeyValues:
        """Returns what a model kept of rows, expanded if the slots are."""
        if key_values.keys.shape[-1] == self.own[0].keys.shape[-1]:
            return key_values
        return cast(DecoderOnly, model).decoder.expanded(key_values)

    @property
    def section_ends(self) -> list[int]:
        """The end column of each section, exclusive."""
        return list(itertools.accumulate(section.length for section in self.own))

    @property
    def key_value_bytes(self) -> int:
        """Size of all keys and values."""
        parts = (*self.own, *([self.cross] if self.cross is not None else []))
        return sum(array.nbytes for part in parts for array in part)


@functools.partial(WeightedJit, static_argnames="graph")
def expand_slots(parameters: Parameters, slots: Slots, *, graph: nnx.GraphDef) -> Slots:
    """Expands compressed keys and values of rows to all heads."""
    decoder = cast(DecoderOnly, merge(graph, parameters)).decoder
    expanded = [decoder.expanded(section.stacked()) for section in slots.own]
    own = [BlockKeyValues(*map(BlockArrays.of, section)) for section in expanded]
    return dataclasses.replace(slots, own=tuple(own))


class Page(NamedTuple):
    """Keys and values of a part of a prompt or shared text.

    Attributes:
      keys: `[L, G, 1, K, page]`, in the order that products on CPUs read them.
      values: `[L, G, 1, page, K]`.
      start: position of the first key.
    """

    keys: BlockArrays
    values: BlockArrays
    start: Int[Array, ""]

    @classmethod
    def create(cls, key_values: KeyValues, start: Int[Array, ""] | int) -> "Page":
        """Returns a page of keys and values `[L, G, 1, page, K]`."""
        keys, values = map(BlockArrays.of, key_values)
        return cls(keys.map(_transposed), values, jnp.asarray(start, jnp.int32))

    @classmethod
    def empty(
        cls, config: ModelConfig, size: int, *, compressed: bool = False
    ) -> "Page":
        """Returns a page of zeros; see `Slots.create`."""
        zeros = BlockKeyValues.zeros(config, 1, size, compressed=compressed)
        return cls(zeros.keys.map(_transposed), zeros.values, jnp.zeros((), jnp.int32))

    @property
    def size(self) -> int:
        """Number of keys."""
        return self.values.shape[3]

    @property
    def key_value_bytes(self) -> int:
        """Size of its keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def key_values(self) -> BlockKeyValues:
        """Returns keys and values `[L, G, 1, page, K]`; call it inside a program."""
        return BlockKeyValues(self.keys.map(_transposed), self.values)


def _transposed(array: Array) -> Array:
    return jnp.swapaxes(array, -1, -2)


class RowStates(NamedTuple):
    """What a program needs to know about each row.

    Attributes:
      written: number of the row's keys.
      first: position of the first of these.
      active: whether the row reads a token.
      entry: its entry in the adapter tables.
      visible: number of keys that it sees of each page.
      active_from: column from which its adapter is active; None if all adapters are
        always active.
    """

    written: Integers
    first: Integers
    active: Bool[Array, "B"] | Bool[np.ndarray, "B"]
    entry: Integers
    visible: Integers
    active_from: Integers | None = None

    def active_at(self, columns: Int[Array, "B W"]) -> Bool[Array, "B W"] | None:
        """Marks where the rows' adapters are active, for `Stream.active`."""
        if self.active_from is None:
            return None
        return columns >= jnp.asarray(self.active_from)[:, None]


def write_rows(
    buffer: BlockKeyValues, new: KeyValues, numbers: Integers, columns: Integers
) -> BlockKeyValues:
    """Writes `[L, G, R, S, K]` into slots, each row starting at its column.

    Rows with a column in another section are skipped.
    """
    slots, starts = jnp.asarray(numbers), jnp.asarray(columns)
    inside = (starts >= 0) & (starts < buffer.length)

    def write_row(row: Int[Array, ""], buffer: BlockKeyValues) -> BlockKeyValues:
        def write(old: Array, parts: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(parts, row, 1, axis=1)
            place = (0, slots[row], starts[row], 0)
            old_part = jax.lax.dynamic_slice(old, place, part.shape)
            return jax.lax.dynamic_update_slice(
                old, jnp.where(inside[row], part, old_part), place
            )

        return buffer.map(write, new)

    return jax.lax.fori_loop(0, len(slots), write_row, buffer)


def page_counts(largest: int) -> list[int]:
    """Returns the numbers of pages that programs are compiled for: 0, 1, 2, 4, ..."""
    counts = [0]
    while counts[-1] < largest:
        counts.append(max(2 * counts[-1], 1))
    return counts


def padded_pages(pages: Sequence[Page], empty: Page) -> tuple[Page, ...]:
    """Pads pages to one of these numbers."""
    count = page_counts(len(pages))[-1]
    return (*pages, *[empty] * (count - len(pages)))
