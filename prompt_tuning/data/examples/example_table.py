"""Tables of examples, checked once and read on demand."""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.context_column import ContextColumn
from prompt_tuning.data.examples.row_readers import (
    Example,
    ExampleIndex,
    RowReader,
    concatenate_indexes,
)
from prompt_tuning.data.examples.truncation import NothingLearnedError, Truncation
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.hdf5_rows import INPUT_IDS, TOKEN_TYPE_IDS
from prompt_tuning.data.rows.row_sources import RowBlock, RowSource
from prompt_tuning.data.rows.tasks import Tasks
from prompt_tuning.data.rows.token_columns import CONTEXTS
from prompt_tuning.settings.data_source import DataSource


@dataclasses.dataclass(eq=False, repr=False)
class Examples:
    """`E` examples that can be read in any order, by several threads.

    Attributes:
      rows: source of the rows that the examples are read from.
      reader: reads rows as examples.
      index: locations and sizes of the examples.
      skipped: number of examples left out because they are too long.
      has_prompt_ids: whether the data selects the prompts of the examples.
      columns: names of the columns that the data provides for an objective.
      truncation: cuts examples that are too long; None to leave all as they are.
      truncated: number of examples that are cut.
      unlearned: number of rows left out because nothing in them is learned.
      contexts: column of the text that a teacher reads before an example, or None.
      without_completion: see `RowSource`.
      repetition: see `RowSource`.
      has_groups: whether an example consists of more than one row; always False.
      shares_prompt: see `ExampleGroups`; always False.
      rows_per_example: number of rows of a batch that an example takes; always 1.
      uncounted: number of targets that a comparison leaves out, because another model
        in it has nothing to predict them from.
    """

    has_groups = shares_prompt = False
    rows_per_example = 1
    uncounted = 0

    rows: RowSource
    reader: RowReader
    index: ExampleIndex
    skipped: int = 0
    _: dataclasses.KW_ONLY
    has_prompt_ids: bool = False
    columns: Collection[str] = ()
    truncation: Truncation | None = None
    truncated: int = 0
    unlearned: int = 0
    contexts: ContextColumn | None = None

    def __post_init__(self):
        self.columns = tuple(self.columns)
        self.without_completion = self.rows.without_completion
        self.repetition = self.rows.repetition

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Example:
        """Returns one example, read from its file in the case of HDF5."""
        if not 0 <= number < len(self):
            raise IndexError(f"example {number} of {len(self)}")
        row, start, stop = self.locate(number)
        example = self.reader.example(self.rows.read(row, slice(start, stop)))
        if self.truncation is not None:
            example = self.truncation(example)
        prompt_id = int(self.index.prompt_ids[number])
        return dataclasses.replace(example, prompt_id=prompt_id)

    def locate(self, number: int) -> tuple[int, int, int]:
        """Returns the row of an example, and the bounds of its tokens in the row."""
        columns = self.index.rows, self.index.starts, self.index.stops
        row, start, stop = (int(column[number]) for column in columns)
        return row, start, stop

    def kept(self, number: int) -> Bool[np.ndarray, "n"]:
        """Returns which tokens between an example's bounds are not padding."""
        row, start, stop = self.locate(number)
        types = self.rows.read(row, slice(start, stop)).token_types
        if types is None:
            return np.ones(stop - start, bool)
        return self.reader.kept(types)

    def describe(self, number: int) -> str:
        """Returns the location of an example, for messages."""
        return self.rows.describe(self.locate(number)[0])

    @property
    def input_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of inputs of each example."""
        return self.index.input_lengths

    @property
    def target_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example."""
        return self.index.target_lengths

    @property
    def context_numbers(self) -> Int64[np.ndarray, "E"]:
        """Number of the context of each example, read again; see `contexts`."""
        blocks = [x.values.columns[CONTEXTS][:, 0] for x in self.rows.blocks()]
        return np.concatenate(blocks).astype(np.int64)[self.index.rows]

    @property
    def weight_counts(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example with nonzero loss weight."""
        return self.index.weight_counts


class ScannedRows(NamedTuple):
    """The examples of some rows, and how many were left out or cut.

    `unlearned` counts rows where nothing is learned, and examples that lose their
    learned tokens by a cut.
    """

    index: ExampleIndex
    skipped: int
    truncated: int
    unlearned: int


def scan_rows(
    rows: RowSource,
    reader: RowReader,
    source: DataSource,
    model: ModelInterface,
    *,
    soft_ids: int,
    tasks: Tasks | None,
    truncation: Truncation | None,
) -> ScannedRows:
    """Checks rows in order until `source.maximum_examples` examples are found.

    There are `soft_ids` more ids than the model's, for prompt vectors of a template.
    """
    parts, count, skipped, unlearned = [], 0, 0, 0
    is_cut: list[np.ndarray] = []
    maximum, count_limit = model.maximum_length, source.maximum_examples
    for block in rows.blocks():
        _check_ranges(block, model.vocabulary_size + soft_ids)
        index = reader.scan(block)
        unlearned += len(block.input_ids) - len(np.unique(index.rows))
        if tasks is not None:
            index = _set_tasks(index, block, tasks)
        short = np.ones(len(index), bool)
        if truncation is not None:
            skips, fits = source.on_nothing_learned == "skip", _fits(index, maximum)
            index = _truncate(index, block, reader, truncation, skip_unlearned=skips)
            learned = index.weight_counts > 0
            is_cut.append(~fits[learned])
            index, short = index.select(learned), short[learned]
            unlearned += int(np.count_nonzero(~learned))
        else:
            short = _fits(index, maximum)
            if source.on_too_long == "error":
                _check_lengths(index, short, model, block)
        parts.append(index.select(short))
        count += len(parts[-1])
        skipped += len(index) - len(parts[-1])
        if count_limit is not None and count >= count_limit:
            break
    if not count:
        reason = f"longer than the maximum of {maximum} tokens"
        if unlearned:
            reason = "nothing is learned" + (f", or {reason}" if skipped else "")
        raise InputError(
            f"{rows.describe(0)}, and all {len(rows)} rows: {reason}; no example is "
            "left"
        )
    selected = concatenate_indexes(parts).select(slice(count_limit))
    truncated = 0
    if truncation is not None:
        truncated = np.concatenate(is_cut)[: len(selected)].sum()
    return ScannedRows(selected, skipped, int(truncated), unlearned)


def _truncate(
    index: ExampleIndex,
    block: RowBlock,
    reader: RowReader,
    truncation: Truncation,
    *,
    skip_unlearned: bool,
) -> ExampleIndex:
    """Returns the index with the sizes that examples have when they are cut.

    With `skip_unlearned`, an example that loses its learned tokens has 0 of them.
    """
    lengths = np.maximum(index.input_lengths, index.target_lengths)
    columns = [index.input_lengths, index.target_lengths, index.weight_counts]
    sizes = [column.copy() for column in columns]
    for number in np.flatnonzero(lengths > truncation.maximum).tolist():
        row = int(index.rows[number])
        tokens = slice(index.starts[number], index.stops[number])
        example = reader.example(block.read(row, tokens))
        try:
            example = truncation(example)
        except NothingLearnedError as error:
            if not skip_unlearned:
                raise InputError(f"{block.describe(row)}: {error}") from error
            sizes[2][number] = 0
            continue
        except InputError as error:
            raise InputError(f"{block.describe(row)}: {error}") from error
        learned = int(np.count_nonzero(example.weights))
        new = len(example.inputs), len(example.targets), learned
        for size, value in zip(sizes, new, strict=True):
            size[number] = value
    inputs, targets, counts = sizes
    return dataclasses.replace(
        index, input_lengths=inputs, target_lengths=targets, weight_counts=counts
    )


def _set_tasks(index: ExampleIndex, block: RowBlock, tasks: Tasks) -> ExampleIndex:
    """Sets prompt ids from the block's column of tasks, and checks them."""
    prompt_ids = index.prompt_ids
    if block.prompt_ids is not None:
        prompt_ids = block.prompt_ids[index.rows - block.start].astype(np.int64)
    outside = (prompt_ids < 0) | (prompt_ids >= tasks.count)
    if outside.any():
        first = int(np.argmax(outside))
        row = block.describe(int(index.rows[first]))
        raise InputError(f"{row}: {tasks.range_error(int(prompt_ids[first]))}")
    return dataclasses.replace(index, prompt_ids=prompt_ids)


def _check_ranges(block: RowBlock, vocabulary_size: int) -> None:
    columns = [(INPUT_IDS, block.input_ids, vocabulary_size, "the vocabulary")]
    if block.token_types is not None:
        columns.append((TOKEN_TYPE_IDS, block.token_types, 4, "the four token types"))
    for name, values, end, meaning in columns:
        outside = (values < 0) | (values >= end)
        if outside.any():
            row, token = np.argwhere(outside)[0]
            raise InputError(
                f"{block.describe(block.start + int(row))}, token {token}: {name} is "
                f"{values[row, token]}, expected 0 to {end - 1} ({meaning}); was the "
                "data prepared for this model?"
            )


def _fits(index: ExampleIndex, maximum: int | None) -> Bool[np.ndarray, "E"]:
    if maximum is None:
        return np.ones(len(index), bool)
    return np.maximum(index.input_lengths, index.target_lengths) <= maximum


def _check_lengths(
    index: ExampleIndex,
    fits: Bool[np.ndarray, "E"],
    model: ModelInterface,
    block: RowBlock,
) -> None:
    if not fits.all():
        first = int(np.argmin(fits))
        length = max(index.input_lengths[first], index.target_lengths[first])
        raise InputError(
            f"{block.describe(int(index.rows[first]))}: {length} tokens, expected at "
            f"most {model.maximum_length} (the model's positions minus the prompt "
            f"vectors{model.positions_note}); to remove the beginning of such rows, "
            f"type {how_to_set('DataSource.on_too_long', 'truncate')}, and to leave "
            f"them out {how_to_set('DataSource.on_too_long', 'skip')}"
        )
