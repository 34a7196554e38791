"""A frozen model's predictions per row, computed once and stored in the run."""

import dataclasses
import hashlib
import io
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prompt_tuning import processes
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.numpy_files import read_npz
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.rows.token_columns import CONTEXTS
from prompt_tuning.evaluation.batch_scores import BatchFunction, score_batches
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource

MODEL, ROWS, SIZES = "model", "rows", "_sizes"
"""Additional arrays of a file.

They are the fingerprint of the model that computed the values, as bytes, and the digest
of each row. `NAME_sizes` is the number of a row's values of a name.
"""
DIGEST = 16
"""Size of a row's digest in bytes."""

Values = Mapping[str, np.ndarray]
"""A row's arrays by name; the first has a value for each learned token."""


@dataclasses.dataclass(frozen=True)
class ColumnForm:
    """How values of a row are stored, and become columns of its learned tokens.

    Attributes:
      names: names of the stored arrays.
      columns: dtype and shape of each column for one token, by name.
      pack: converts what is computed for a row's learned tokens to stored arrays.
      unpack: converts stored arrays to columns, each `[m, ...]`; raises ValueError if
        they are damaged.
    """

    names: tuple[str, ...]
    columns: Mapping[str, np.dtype]
    pack: Callable[[Any], Values] = lambda computed: computed
    unpack: Callable[[Values], Values] = lambda values: values


class StoredColumns:
    """Columns of rows, computed when first read.

    Values are taken from a file in the run directory if it has them for the same row
    and model. Without a file, they are kept only in memory.
    """

    def __init__(
        self,
        form: ColumnForm,
        examples: Examples | ExampleGroups,
        compute: Callable[[Collection[int]], list[Any]],
        file: Path | None,
        fingerprint: str,
    ):
        self.form, self._examples, self._compute = form, examples, compute
        self._file, self._fingerprint = file, fingerprint
        # Rows are read by several threads.
        self._lock = threading.Lock()
        self._known: dict[bytes, Values] | None = None

    def read(self) -> dict[bytes, Values]:
        """Returns the values of all rows by digest."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
        return self._known

    def complete(self, row: Example) -> Example:
        """Adds the columns to a row."""
        values = self.form.unpack(self.read()[digest(row)])
        columns = dict(row.columns)
        for name, kind in self.form.columns.items():
            columns[name] = np.zeros(len(row.weights), kind)
            columns[name][row.weights != 0] = values[name]
        return dataclasses.replace(row, columns=columns)

    def _read(self) -> dict[bytes, Values]:
        """Returns the values of all rows, computing missing ones."""
        model, known = self._fingerprint, {}
        if self._file is not None:
            known = read_stored(self._file, model, self.form.names)
        missing = {}
        for number in range(len(self._examples)):
            rows = rows_of(self._examples, number)
            if any(not self._has(known, row) for row in rows):
                missing[number] = rows
        if not missing:
            return known
        with status("computing the predictions of the frozen model"):
            computed = self._compute(missing)
        rows = [row for of_example in missing.values() for row in of_example]
        pairs = zip(rows, computed, strict=True)
        known |= {digest(row): self.form.pack(values) for row, values in pairs}
        file = self._file
        if file is not None:
            processes.run_on_first(lambda: write_stored(file, model, known))
        return known

    def _has(self, known: Mapping[bytes, Values], row: Example) -> bool:
        """Whether a row has stored values that fit the form."""
        stored, learned = known.get(digest(row)), int((row.weights != 0).sum())
        if stored is None:
            return False
        try:
            columns = self.form.unpack(stored)
            again = self.form.pack(columns)
        except (ValueError, TypeError):  # of a damaged file
            return False
        kinds = self.form.columns.items()
        expected = [((learned, *kind.shape), kind.base) for _, kind in kinds]
        found = [(columns[name].shape, columns[name].dtype) for name, _ in kinds]
        same = (np.array_equal(again[name], x) for name, x in stored.items())
        return found == expected and all(same)


class CompletedExamples(Examples):
    """Examples with stored columns."""

    def __init__(self, examples: Examples, stored: StoredColumns):
        self.__dict__.update(examples.__dict__)
        self._examples, self.stored = examples, stored
        self.columns = _kinds(examples.columns, stored.form)

    def __getitem__(self, number: int) -> Example:
        """Returns an example with the columns."""
        return self.stored.complete(self._examples[number])


class CompletedGroups(ExampleGroups):
    """Groups of rows with stored columns."""

    def __init__(self, examples: ExampleGroups, stored: StoredColumns):
        vars(self).update(vars(examples))
        self._examples, self.stored = examples, stored
        self.columns = _kinds(examples.columns, stored.form)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the rows of an example with the columns."""
        return [self.stored.complete(row) for row in self._examples[number]]


def _kinds(columns: Collection[str], form: ColumnForm) -> dict[str, np.dtype]:
    """Returns the types of columns; those of the data are float32."""
    return dict.fromkeys(columns, np.dtype(np.float32)) | dict(form.columns)


def rows_of(examples: Examples | ExampleGroups, number: int) -> list[Example]:
    """Returns the rows of an example."""
    row = examples[number]
    return row if isinstance(row, list) else [row]


def digest(row: Example) -> bytes:
    """Returns a digest of a row's tokens, learned positions and context."""
    content = hashlib.sha256()
    for array in (row.inputs, row.targets, row.weights != 0):
        content.update(
            f"{len(array)} ".encode() + np.ascontiguousarray(array).tobytes()
        )
    content.update(str(row.prefix_length).encode())
    if CONTEXTS in row.columns:
        content.update(f" {int(row.columns[CONTEXTS][0])}".encode())
    return content.digest()[:DIGEST]


def read_stored(file: Path, model: str, names: Sequence[str]) -> dict[bytes, Values]:
    """Reads stored values; none from another model or from a damaged file."""
    check_links(file.parent, file.name)
    if not file.is_file():
        return {}
    try:
        arrays = read_npz(file)
        if arrays[MODEL].tobytes() != model.encode():
            return {}
        columns = []
        for name in names:
            sizes = arrays[name + SIZES]
            stops = np.cumsum(sizes)
            if (sizes < 0).any() or stops[-1] != len(arrays[name]):
                return {}
            columns.append(np.split(arrays[name], stops[:-1]))
        rows = zip(arrays[ROWS], *columns, strict=True)
        return {row.tobytes(): dict(zip(names, x, strict=True)) for row, *x in rows}
    except (InputError, ValueError, KeyError, IndexError, TypeError):
        return {}  # they are computed again


def write_stored(file: Path, model: str, known: Mapping[bytes, Values]) -> None:
    """Stores the values of rows by digest."""
    content = io.BytesIO()
    digests = np.frombuffer(b"".join(known), np.uint8).reshape(-1, DIGEST)
    arrays = {MODEL: np.frombuffer(model.encode(), np.uint8), ROWS: digests}
    for name in next(iter(known.values())):
        parts = [values[name] for values in known.values()]
        arrays[name] = np.concatenate(parts)
        arrays[name + SIZES] = np.array([len(part) for part in parts], np.int64)
    np.savez(content, allow_pickle=False, **arrays)
    replace_file(file, content.getvalue())


def compute_rows(
    function: BatchFunction[Any],
    model: PromptedModel,
    parameters: Parameters,
    examples: Examples | ExampleGroups,
    data: DataSource,
    numbers: Collection[int],
) -> list[Any]:
    """Applies a function to some examples, and returns its values by row.

    The function returns arrays `[R, m, ...]` for a batch, in any structure. Returns the
    arrays of each row, `[m, ...]`, in the order of the numbers.
    """
    data = dataclasses.replace(data, packing=False)
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    chosen = set(numbers)
    planned = [
        batch
        for index in range(plan.batches_per_epoch)
        if chosen & {*(batch := plan.batch(index)).rows.reshape(-1).tolist()}
    ]
    pad_id, columns = model.config.pad_id, examples.columns
    batches = (build_batch(examples, x, pad_id, columns=columns) for x in planned)
    found: dict[int, list[Any]] = {}
    for each, (batch, scores) in zip(
        planned, score_batches(function, model, parameters, batches), strict=True
    ):
        learned = (batch.loss_weights != 0).reshape(len(each.rows), -1, each.positions)
        for place, number in enumerate(each.rows.tolist()):
            if number == FILLING:
                continue
            rows = range(place * learned.shape[1], (place + 1) * learned.shape[1])
            found[number] = [
                jax.tree.map(
                    lambda x, row=row, mask=mask: np.asarray(x)[row][mask], scores
                )
                for row, mask in zip(rows, learned[place], strict=True)
            ]
    return [row for number in numbers for row in found[number]]
