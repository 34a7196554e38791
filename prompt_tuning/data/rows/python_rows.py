"""Rows given from Python, written to a JSON lines file that a run reads like any other.

The file is part of the run: it is what `evaluate` and a resumed run read again.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.parquet_files import drop_nulls


def is_files(data: Any) -> bool:
    """Returns whether data is a path or a list of paths."""
    if isinstance(data, str | Path):
        return True
    listed = isinstance(data, Sequence) and len(data) > 0
    return listed and all(isinstance(item, str | Path) for item in data)


@contextlib.contextmanager
def data_files(data: Any, source: Any) -> Iterator[list[str]]:
    """Yields data as file names; rows in memory are written to a temporary file.

    Args:
      data: paths, or rows; see `write_rows`.
      source: `DataSource` with the keys of rows.
    """
    if is_files(data):
        yield [str(data)] if isinstance(data, str | Path) else [str(x) for x in data]
        return
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(data, file, source.prompt_key, source.completion_key)
        yield [str(file)]


def write_rows(
    data: Iterable[Any], file: Path, prompt_key: str | None, completion_key: str
) -> None:
    """Writes rows as JSON lines; a file with the same rows is left as it is.

    Args:
      data: pairs `(prompt, completion)`, or mappings such as the rows of a
        `datasets.Dataset`, whose keys with None that Arrow adds are left out.
      file: file to write.
      prompt_key: key of the first of a pair; None if completions are given alone.
      completion_key: key of the second.

    Raises:
      InputError: for a row of another kind, no row at all, or a file that holds other
        rows.
    """
    rows = map(_without_nulls, data) if _is_of_arrow(data) else data
    lines = [
        json.dumps(
            _row(item, index, prompt_key, completion_key), ensure_ascii=False
        ).encode()
        for index, item in enumerate(rows)
    ]
    if not lines:
        raise InputError("the data has no rows, expected at least one")
    content = b"\n".join(lines) + b"\n"
    if file.exists():
        if file.read_bytes() != content:
            raise InputError(
                f"{file} holds other rows than the data given now; a run keeps the "
                "data it was started with: choose another directory"
            )
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, content)


def _is_of_arrow(data: Any) -> bool:
    """Returns whether the rows of data come from Arrow's tables."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: drop_nulls(value) for name, value in row.items()}


def _row(
    item: Any, index: int, prompt_key: str | None, completion_key: str
) -> dict[str, Any]:
    if isinstance(item, Mapping):
        row = {str(key): _plain(value) for key, value in item.items()}
    elif isinstance(item, str) and prompt_key is None:
        row = {completion_key: item}
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        row = {prompt_key or "prompt": item[0], completion_key: item[1]}
    else:
        raise InputError(
            f"row {index} of the data is {_shortened(item)}, expected a pair (prompt, "
            "completion) or a mapping with these keys"
        )
    try:
        json.dumps(row)
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"row {index} of the data is {_shortened(item)}, which JSON cannot hold: "
            f"{problem}"
        ) from problem
    return row


def _plain(value: Any) -> Any:
    """Turns NumPy scalars and arrays into plain numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shortened(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:77]}..."
