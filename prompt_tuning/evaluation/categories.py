"""Additional columns of held-out data: categories and references."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from jaxtyping import Int

from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.rows import hdf5_files
from prompt_tuning.data.rows.hdf5_rows import INPUT_IDS
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.source_reading import files_of, reads_text
from prompt_tuning.settings.evaluation_settings import Evaluation

NO_CATEGORY = -1
"""Category of an example or a token without one."""


@dataclasses.dataclass(frozen=True)
class Categories:
    """Categories of the examples and of their learned tokens.

    Attributes:
      names: names of the categories.
      example_categories: first category of each example, an index into `names`, or
        `NO_CATEGORY`, `[E]`.
      target_categories: the same for each learned token, example after example, `[t]`.
    """

    names: tuple[str, ...]
    example_categories: Int[np.ndarray, "E"]
    target_categories: Int[np.ndarray, "t"]


def read_categories(
    evaluation: Evaluation,
    examples: Examples,
    *,
    separate: bool,
    dropped: int | None = None,
) -> Categories:
    """Reads the categories from the column `evaluation.category_key`.

    Args:
      evaluation: settings with the files and the key.
      examples: examples loaded from these files.
      separate: whether targets are separate from inputs (encoder-decoder); all targets
        of an example then have its first category.
      dropped: position of a token that examples leave out of a row (the task token).

    Raises:
      InputError: if the key or data set does not exist, or a number has no name.
    """
    key = evaluation.category_key
    assert key is not None
    if reads_text(evaluation.data):
        return _read_line_categories(evaluation, examples, key)
    column, parts = _Column(files_of(evaluation.data), key), []
    if examples.truncated and not separate and not column.by_row:
        raise InputError(
            f"Evaluation.category_key is {key!r}, which has a category for each token, "
            f"and {examples.truncated} rows are truncated: give "
            f"{how_to_set('DataSource.on_too_long', 'skip')}"
        )
    for index in range(len(examples)):
        numbers = column.read(*examples.locate(index))
        weights = examples[index].weights
        token_numbers = np.full(len(weights), _first(numbers), np.int64)
        if not separate and not column.by_row:
            numbers = numbers[examples.kept(index)]
            numbers = numbers if dropped is None else np.delete(numbers, dropped)
            # Aligned at the end: a text may have been inserted before the row's tokens.
            token_numbers[len(weights) - len(numbers) :] = numbers
        parts.append(token_numbers[weights != 0])
    example_categories = np.array([_first(part) for part in parts])
    return _name_categories(evaluation, example_categories, np.concatenate(parts))


def read_references(evaluation: Evaluation, examples: Examples) -> list[list[str]]:
    """Reads each example's reference texts from `evaluation.references_key`.

    Raises:
      InputError: if the files contain token ids, or a line has no text under the key.
    """
    key = evaluation.references_key
    assert key is not None
    if not reads_text(evaluation.data):
        raise InputError(
            f"Evaluation.references_key is {key!r}, but {evaluation.data.files} has "
            "token ids and no texts: use jsonl files, or leave it out to compare with "
            "the completions"
        )
    return [_texts(line, key) for line in _lines(evaluation, examples)]


def _lines(evaluation: Evaluation, examples: Examples) -> list[JsonLine]:
    """Returns the line of each example."""
    lines = [line for path in files_of(evaluation.data) for line in read_records(path)]
    rows = examples.rows
    assert isinstance(rows, JsonlRows)
    return [lines[rows.records[row]] for row in examples.index.rows]


def _texts(line: JsonLine, key: str) -> list[str]:
    value = line.value(key, "Evaluation.references_key")
    texts = [value] if isinstance(value, str) else value
    if not (
        isinstance(texts, list) and texts and all(isinstance(x, str) for x in texts)
    ):
        raise InputError(
            f"{line.location}: {key!r} is {json.dumps(value)[:60]}, expected a text or "
            "a list of at least one"
        )
    return texts


def _read_line_categories(
    evaluation: Evaluation, examples: Examples, key: str
) -> Categories:
    """Reads the categories of jsonl lines: texts or numbers, null for none."""
    if evaluation.category_names is not None:
        raise InputError(
            "Evaluation.category_names is set, but jsonl lines name their categories: "
            "leave category_names out"
        )
    values = [_category(line, key) for line in _lines(evaluation, examples)]
    names = tuple(sorted({name for name in values if name is not None}))
    example_categories = np.array(
        [NO_CATEGORY if x is None else names.index(x) for x in values]
    )
    return Categories(
        names, example_categories, np.repeat(example_categories, examples.weight_counts)
    )


def _category(line: JsonLine, key: str) -> str | None:
    value: Any = line.value(key, "Evaluation.category_key")
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value in (None, NO_CATEGORY) else str(value)
    raise InputError(
        f"{line.location}: {key!r} is {kind_of(value)}, expected the "
        "category's name or number, or null for none"
    )


class _Column:
    """An integer data set in one or more HDF5 files, with a number per row or token."""

    def __init__(self, paths: Sequence[Path], key: str):
        self._paths = paths
        self._tables = [_open(path, key) for path in paths]
        self._ends = np.cumsum([len(table) for table in self._tables])
        self.by_row = any(len(table.shape) == 1 for table in self._tables)

    def read(self, row: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        """Reads the numbers of a range of tokens, or the number of the row."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        table = self._tables[number]
        row -= int(self._ends[number - 1]) if number else 0
        with hdf5_files.reporting_damage(self._paths[number], f"row {row}"):
            if self.by_row:
                return np.atleast_1d(np.asarray(table[row]))
            return np.asarray(table[row, start:stop])


def _open(path: Path, key: str) -> h5py.Dataset:
    file = hdf5_files.open_hdf5(path)
    if not hdf5_files.contains(path, file, key):
        raise InputError(
            f"{path} has the data sets {hdf5_files.list_names(path, file)}, expected "
            f"{key!r}; {how_to_set('Evaluation.category_key', 'NAME')} names it "
            "(usually 'category_ids')"
        )
    column = hdf5_files.open_data_set(path, file, key, None)
    rows, length = hdf5_files.open_data_set(path, file, INPUT_IDS).shape
    if column.shape not in ((rows,), (rows, length)):
        raise InputError(
            f"{path}: {key} has shape {column.shape}, expected integers [{rows}] or "
            f"[{rows}, {length}], one for each row or token"
        )
    return column


def _first(numbers: Int[np.ndarray, "n"]) -> int:
    """Returns the first category among some numbers."""
    real = numbers[numbers != NO_CATEGORY]
    return int(real[0]) if len(real) else NO_CATEGORY


def _name_categories(
    evaluation: Evaluation,
    example_categories: Int[np.ndarray, "E"],
    target_categories: Int[np.ndarray, "t"],
) -> Categories:
    """Replaces numbers by indices into the names of those that occur, in order."""
    numbers = np.unique(target_categories[target_categories != NO_CATEGORY])
    known_names = _category_names(evaluation)
    unnamed = [
        n for n in numbers.tolist() if known_names is not None and n not in known_names
    ]
    if unnamed or (len(numbers) and numbers[0] < NO_CATEGORY):
        raise InputError(
            f"the data has category {unnamed[0] if unnamed else numbers[0]}, expected "
            f"{NO_CATEGORY} for none"
            + ("" if known_names is None else f" or one of {shown(known_names)}")
            + "; see Evaluation.category_names"
        )
    names = [
        str(n) if known_names is None else known_names[n] for n in numbers.tolist()
    ]

    def index(values: np.ndarray) -> np.ndarray:
        return np.where(
            values == NO_CATEGORY, NO_CATEGORY, np.searchsorted(numbers, values)
        )

    return Categories(tuple(names), index(example_categories), index(target_categories))


def _category_names(evaluation: Evaluation) -> dict[int, str] | None:
    """Returns the name of each number, if the settings name them."""
    given = evaluation.category_names
    if not isinstance(given, str):
        return None if given is None else dict(enumerate(given))
    content = read_object(Path(given))
    problem = InputError(
        f"Evaluation.category_names: {given} contains no object of names and numbers, "
        'such as {"news": 0}'
    )
    names = {}
    for name, number in content.values.items():
        if not isinstance(number, int | str) or isinstance(number, bool):
            raise problem
        try:
            names[int(number)] = name
        except ValueError:
            raise problem from None
    return names
