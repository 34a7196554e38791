"""Examples, their index, and the interface of readers that turn rows into them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer, Shaped

from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.rows.row_sources import Row, RowBlock

TokenTypes = Integer[np.ndarray, "*rows n"]
TokenMask = Bool[np.ndarray, "*rows n"]


@dataclasses.dataclass(frozen=True)
class Example:
    """The tokens that a model receives, and those that it learns to predict.

    Attributes:
      inputs: token ids of the encoder, or of the decoder-only model, `[n]`.
      targets: token ids to predict, `[u]`; equal to `inputs` in a decoder-only model.
      weights: loss weights of the targets, `[w]`, with `w = u`; in a text that becomes
        a vector `w = u + 1`, as a state counts as the prediction of the next token.
      prefix_length: number of inputs of a decoder-only model before its first
        completion token, BOS included; 0 in an encoder-decoder model.
      prompt_id: index of the example's prompt, below `N`.
      columns: numbers that an objective reads by target, `[u, ...]`, by name.
    """

    inputs: Int32[np.ndarray, "n"]
    targets: Int32[np.ndarray, "u"]
    weights: Float32[np.ndarray, "w"]
    prefix_length: int
    prompt_id: int = 0
    columns: Mapping[str, Shaped[np.ndarray, "u ..."]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class ExampleIndex:
    """The locations of `E` examples among the rows, and their sizes; arrays `[E]`.

    Attributes:
      rows: number of the example's row.
      starts: position of its first token in the row.
      stops: position after its last token.
      input_lengths: number of inputs.
      target_lengths: number of targets.
      weight_counts: number of targets with nonzero loss weight.
      prompt_ids: index of its prompt; 0 if the data does not select one.
    """

    rows: Int64[np.ndarray, "E"]
    starts: Int64[np.ndarray, "E"]
    stops: Int64[np.ndarray, "E"]
    input_lengths: Int64[np.ndarray, "E"]
    target_lengths: Int64[np.ndarray, "E"]
    weight_counts: Int64[np.ndarray, "E"]
    prompt_ids: Int64[np.ndarray, "E"]

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> list[Int64[np.ndarray, "E"]]:
        """Returns the arrays, in the order of the attributes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def select(self, chosen: Bool[np.ndarray, "E"] | slice) -> "ExampleIndex":
        """Returns the index of some of the examples."""
        return ExampleIndex(*(column[chosen] for column in self.columns()))


def how_to_skip() -> str:
    """Returns how to leave out rows without a learned token, for messages."""
    skipping = how_to_set("DataSource.on_nothing_learned", "skip")
    return f"to leave such rows out, type {skipping}"


def concatenate_indexes(parts: Sequence[ExampleIndex]) -> ExampleIndex:
    """Concatenates indexes of the same row source."""
    columns = zip(*(part.columns() for part in parts), strict=True)
    return ExampleIndex(*(np.concatenate(column) for column in columns))


@runtime_checkable
class RowReader(Protocol):
    """A way to read rows as examples."""

    @property
    def same_tokens(self) -> bool:
        """Whether the inputs are also the targets, as in decoder-only models."""
        ...

    def scan(self, block: RowBlock) -> ExampleIndex:
        """Returns the index of a block's examples, with values in range.

        Raises InputError if a row cannot be read this way, or has no learned token.
        """
        ...

    def example(self, row: Row) -> Example:
        """Builds the example of the tokens between its bounds."""
        ...

    def kept(self, token_types: TokenTypes) -> TokenMask:
        """Returns which tokens are not padding; padding is left out of examples."""
        ...
