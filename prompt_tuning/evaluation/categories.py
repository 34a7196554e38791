"""What data files say of examples beside their tokens: categories and references."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from jaxtyping import Int

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS
from prompt_tuning.data.rows.jsonl import JsonLine, read_lines
from prompt_tuning.data.rows.row_sources import JSONL_SUFFIX, list_files
from prompt_tuning.evaluation.evaluation_settings import Evaluation

NO_CATEGORY = -1
"""The category of what has none."""


@dataclasses.dataclass(frozen=True)
class Categories:
    """Which category each example, and each token that is learned of it, is of.

    Attributes:
      names: of the categories.
      of_examples: the first category of each example, an index of `names`, `NONE` for
        one without, `[E]`.
      of_targets: that of each target that carries weight, example after example, `[t]`.
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
    """The categories that `evaluation.category_key` names.

    Args:
      evaluation: names the files and the key.
      examples: as they were loaded from these files.
      separate: whether targets are apart from inputs (encoder-decoder); all targets of
        an example are then of its first category.
      dropped: the place of a token that examples leave out of a row (that of a task).

    Raises:
      InputError: if there is no such key or data set, or a number in it has no name.
    """
    key = evaluation.category_key
    assert key is not None
    if _holds_text(evaluation):
        return _of_lines(evaluation, examples, key)
    column, parts = _Column(list_files(evaluation.data.files), key), []
    for index in range(len(examples)):
        found = column.read(*examples.locate(index))
        weights = examples[index].weights
        of_tokens = np.full(len(weights), _first(found), np.int64)
        if not separate and not column.by_row:
            kept = found if dropped is None else np.delete(found, dropped)
            # From the right: a text may have been put before the row's own tokens.
            of_tokens[len(weights) - len(kept) :] = kept
        parts.append(of_tokens[weights != 0])
    of_examples = np.array([_first(part) for part in parts])
    return _named(evaluation, of_examples, np.concatenate(parts))


def read_references(evaluation: Evaluation, examples: Examples) -> list[list[str]]:
    """The texts under `evaluation.references_key`, of each example.

    Raises:
      InputError: if the data is no text, or a line has none there.
    """
    key = evaluation.references_key
    assert key is not None
    if not _holds_text(evaluation):
        raise InputError(
            f"Evaluation.references_key is {key!r}, but {evaluation.data.files} holds "
            "token ids and no texts: use jsonl files, or leave it out to compare with "
            "the completions"
        )
    lines = _lines(evaluation)
    return [_texts(lines[examples.locate(i)[0]], key) for i in range(len(examples))]


def _holds_text(evaluation: Evaluation) -> bool:
    return list_files(evaluation.data.files)[0].suffix == JSONL_SUFFIX


def _lines(evaluation: Evaluation) -> list[JsonLine]:
    """The lines that rows were made of, in the rows' order."""
    paths = list_files(evaluation.data.files)
    return [line for path in paths for line in read_lines(path)]


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


def _of_lines(evaluation: Evaluation, examples: Examples, key: str) -> Categories:
    """The categories of jsonl lines: texts or numbers, null for none."""
    if evaluation.category_names is not None:
        raise InputError(
            "Evaluation.category_names is set, but lines name their categories: leave "
            "the names out"
        )
    lines = _lines(evaluation)
    found = [_category(lines[examples.locate(i)[0]], key) for i in range(len(examples))]
    names = tuple(sorted({name for name in found if name is not None}))
    of_examples = np.array(
        [NO_CATEGORY if x is None else names.index(x) for x in found]
    )
    return Categories(
        names, of_examples, np.repeat(of_examples, examples.weight_counts)
    )


def _category(line: JsonLine, key: str) -> str | None:
    value: Any = line.value(key, "Evaluation.category_key")
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value in (None, NO_CATEGORY) else str(value)
    raise InputError(
        f"{line.location}: {key!r} is a {type(value).__name__}, expected the "
        "category's name or number, or null for none"
    )


class _Column:
    """An integer data set of several HDF5 files, one number to a row or to a token."""

    def __init__(self, paths: Sequence[Path], key: str):
        self._tables = [_open(path, key) for path in paths]
        self._ends = np.cumsum([len(table) for table in self._tables])
        self.by_row = any(len(table.shape) == 1 for table in self._tables)

    def read(self, row: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        """The numbers of some tokens of a row, or the row's own."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        table = self._tables[number]
        row -= int(self._ends[number - 1]) if number else 0
        if self.by_row:
            return np.atleast_1d(np.asarray(table[row]))
        return np.asarray(table[row, start:stop])


def _open(path: Path, key: str) -> h5py.Dataset:
    file = h5py.File(path, "r")
    found = file.get(key)
    if not isinstance(found, h5py.Dataset):
        raise InputError(
            f"{path} has the data sets {sorted(file)}, expected {key!r}; "
            "Evaluation.category_key names it (usually 'category_ids')"
        )
    ids = file[INPUT_IDS]
    assert isinstance(ids, h5py.Dataset)  # the rows were opened before
    rows, length = ids.shape
    if found.shape not in ((rows,), (rows, length)) or found.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {key} has shape {found.shape} and type {found.dtype}, expected "
            f"integers [{rows}] or [{rows}, {length}], one of each row or token"
        )
    return found


def _first(numbers: Int[np.ndarray, "n"]) -> int:
    """The first category among some numbers."""
    real = numbers[numbers != NO_CATEGORY]
    return int(real[0]) if len(real) else NO_CATEGORY


def _named(
    evaluation: Evaluation,
    of_examples: Int[np.ndarray, "E"],
    of_targets: Int[np.ndarray, "t"],
) -> Categories:
    """The categories that occur, in the order of their numbers."""
    numbers = np.unique(of_targets[of_targets != NO_CATEGORY])
    known = _names(evaluation)
    unnamed = [n for n in numbers.tolist() if known is not None and n not in known]
    if unnamed or (len(numbers) and numbers[0] < NO_CATEGORY):
        raise InputError(
            f"the data has category {unnamed[0] if unnamed else numbers[0]}, expected "
            f"{NO_CATEGORY} for none"
            + ("" if known is None else f" or one of {known}")
            + "; see Evaluation.category_names"
        )
    names = [str(n) if known is None else known[n] for n in numbers.tolist()]

    def index(values: np.ndarray) -> np.ndarray:
        return np.where(
            values == NO_CATEGORY, NO_CATEGORY, np.searchsorted(numbers, values)
        )

    return Categories(tuple(names), index(of_examples), index(of_targets))


def _names(evaluation: Evaluation) -> dict[int, str] | None:
    """The names of the numbers, if any are given."""
    given = evaluation.category_names
    if not isinstance(given, str):
        return None if given is None else dict(enumerate(given))
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
        return {int(number): str(name) for name, number in content.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"Evaluation.category_names: {given} cannot be read as an object of names "
            f'and numbers, such as {{"news": 0}}: {error}'
        ) from error
