"""Rows from Python, written to a JSON lines file that a run reads like any other.

The file is part of the run: `evaluate` and a resumed run read it again.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.data.rows.data_files import SPLIT_NAMES
from prompt_tuning.data.rows.parquet_files import drop_nulls


def is_files(data: Any) -> bool:
    """Tests whether data is a path or a list of paths."""
    if isinstance(data, str | Path):
        return True
    listed = isinstance(data, Sequence) and len(data) > 0
    return listed and all(isinstance(item, str | Path) for item in data)


@contextlib.contextmanager
def data_files(data: Any, source: Any) -> Iterator[list[str]]:
    """Yields held-out data as file names; rows in memory are written to a file.

    Messages about a row, also those of the block, name the argument `data`.

    Args:
      data: paths, or rows; see `write_rows`. Only the held-out one of its splits.
      source: `DataSource` with the keys of rows.
    """
    data = split_of(data, "data", held_out=True)
    if is_files(data):
        yield [str(data)] if isinstance(data, str | Path) else [str(x) for x in data]
        return
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(data, file, source.prompt_key, source.completion_key)
        with naming_rows({str(file): "data"}):
            yield [str(file)]


@contextlib.contextmanager
def naming_rows(arguments: Mapping[str, str]) -> Iterator[None]:
    """Names `arguments` and rows in the block's messages, instead of their files."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for file, argument in arguments.items():
            message = re.sub(
                rf"{re.escape(file)}, line (\d{{1,15}})",
                lambda match, name=argument: f"{name}, row {int(match[1]) - 1}",
                message,
            ).replace(file, argument)
        if message == str(error):
            raise
        raise InputError(message) from error


def has_held_out(data: Any) -> bool:
    """Tests whether data has splits, one of them for development."""
    return _is_splits(data) and "dev" in _by_split(data)


def split_of(data: Any, argument: str, *, held_out: bool) -> Any:
    """Returns one split of data with splits, e.g. a `datasets.DatasetDict`.

    Data without splits is returned as it is. With `held_out` this is the development or
    test split, or else the training split.
    """
    if not _is_splits(data):
        return data
    splits = _by_split(data)
    for name in ("dev", "test") if held_out else ("train",):
        if name in splits:
            return splits[name]
    expected = "'validation' or 'test'" if held_out else "'train'"
    raise InputError(
        f"{argument} has the splits {shown(list(data))}, expected one named "
        f"{expected}: give one of them"
    )


def _is_splits(data: Any) -> bool:
    if not isinstance(data, Mapping) or not data:
        return False
    if all(hasattr(part, "column_names") for part in data.values()):
        return True
    named = any(name in SPLIT_NAMES for name in map(str, data))
    return named and not any(isinstance(part, str) for part in data.values())


def _by_split(data: Mapping[Any, Any]) -> dict[str | None, Any]:
    return {SPLIT_NAMES.get(str(name).lower()): part for name, part in data.items()}


def write_rows(
    data: Any,
    file: Path,
    prompt_key: str | None,
    completion_key: str,
    argument: str = "data",
) -> None:
    """Writes rows as JSON lines; a file with the same rows is left as it is.

    Args:
      data: pairs `(prompt, completion)`, mappings such as the rows of a
        `datasets.Dataset` (without the keys with None that Arrow adds), or a table; see
        `table_rows`.
      file: file to write; one that holds other rows is refused.
      prompt_key: key of the first of a pair; None if completions are given alone.
      completion_key: key of the second.
      argument: name of the argument, for messages.
    """
    rows = table_rows(data, argument)
    if not isinstance(rows, Iterable):
        raise InputError(
            f"{argument} is {kind_of(rows)}, expected rows: pairs (prompt, "
            "completion), mappings, a table, or the paths of files"
        )
    if type(data).__module__.partition(".")[0] in ("datasets", "pyarrow"):
        rows = ({name: drop_nulls(x) for name, x in row.items()} for row in rows)
    lines = [
        json.dumps(
            _row(item, f"{argument}, row {index}", prompt_key, completion_key),
            ensure_ascii=False,
        ).encode()
        for index, item in enumerate(rows)
    ]
    if not lines:
        raise InputError(f"{argument} has no rows, expected at least one")
    content = b"\n".join(lines) + b"\n"
    if file.exists():
        if file.read_bytes() != content:
            raise InputError(
                f"{file} holds other rows than {argument} has now; a run keeps the "
                "data it was started with: choose another directory"
            )
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, content)


def _row(
    item: Any, location: str, prompt_key: str | None, completion_key: str
) -> dict[str, Any]:
    item = _plain(item)
    row: dict[str, Any]
    if isinstance(item, Mapping):
        row = {str(key): _plain(value) for key, value in item.items()}
    elif isinstance(item, str) and prompt_key is None:
        row = {completion_key: item}
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        row = {prompt_key or "prompt": item[0], completion_key: item[1]}
    else:
        raise InputError(
            f"{location} is {_shortened(item)}, expected a pair (prompt, completion) "
            "or a mapping with these keys"
        )
    for key, value in row.items():
        if _is_missing(value):
            if key in (prompt_key, completion_key):
                raise InputError(
                    f"{location}: {key!r} is missing ({value}): leave such rows out, "
                    "with pandas by data.dropna()"
                )
            row[key] = None
    try:
        json.dumps(row)
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"{location} is {_shortened(item)}, which JSON cannot hold: {problem}"
        ) from problem
    return row


def _is_missing(value: Any) -> bool:
    """Tests whether a value is what tables have in empty cells, such as NaN."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _shortened(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:77]}..."


def table_rows(data: Any, argument: str) -> Any:
    """Returns the rows of a table; other data is returned as it is.

    A table is a data frame of pandas or polars, a table of Arrow, a mapping of columns
    by name, or an array of pairs, `[n, 2]`. The libraries are recognized by their
    methods, so none has to be installed.
    """
    if hasattr(data, "to_dicts") and hasattr(data, "columns"):  # polars
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return data.to_dict("records")
    if hasattr(data, "to_pylist"):  # Arrow
        return data.to_pylist()
    if isinstance(data, Mapping):
        return _rows_of_columns(data, argument)
    if hasattr(data, "tolist") and hasattr(data, "shape"):  # NumPy
        if len(data.shape) != 1 and data.shape[1:] != (2,):
            raise InputError(
                f"{argument} is an array of shape {tuple(data.shape)}, expected pairs "
                "(prompt, completion), [n, 2]"
            )
        return data.tolist()
    return data


def is_columns(data: Any) -> bool:
    """Tests whether data is a mapping of columns, rather than one row."""
    if not isinstance(data, Mapping) or not data:
        return False
    columns = data.values()
    return all(isinstance(x, list | tuple) or hasattr(x, "tolist") for x in columns)


def _rows_of_columns(columns: Mapping[Any, Any], argument: str) -> list[dict[str, Any]]:
    if not is_columns(columns):
        raise InputError(
            f"{argument} is one mapping with the keys {shown(list(columns))}, expected "
            "a list of mappings, or a mapping of columns, each a list"
        )
    lists = [x.tolist() if hasattr(x, "tolist") else x for x in columns.values()]
    lengths = {str(name): len(x) for name, x in zip(columns, lists, strict=True)}
    if len(set(lengths.values())) != 1:
        raise InputError(
            f"{argument} has columns of the lengths {shown(lengths)}, expected one "
            "length"
        )
    names = list(lengths)
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
