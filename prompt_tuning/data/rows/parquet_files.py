"""Rows of parquet files, which are read with pyarrow if it is installed."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError
from prompt_tuning.data.rows.jsonl import JsonLine

ROWS = 256
"""Number of rows that are read at a time."""

MAXIMUM_ROWS = 2**31
MAXIMUM_COLUMNS = 2**12
MAXIMUM_GROUP = 2**31
"""Maximum size in bytes of a row group after decompression, as the file declares it."""

MAXIMUM_BATCH = 2**28
"""Maximum size in bytes of `ROWS` rows."""

FREE_VALUES = 2**20
VALUES_PER_BYTE = 16
"""A column has at most `FREE_VALUES` values and as many more for each byte of the file.
Repeated values take no space in parquet, so that kilobytes may stand for billions."""

EXPANDED_BATCH = 2**30
"""Size in bytes of a batch if each of its values is as large as a column's dictionary.
"""


def read_parquet(path: Path) -> Iterator[JsonLine]:
    """Yields the rows of a parquet file; columns of binary data are left out.

    It needs pyarrow, and the file must be within the limits of this module.
    """
    parquet = _import_parquet(path)
    number = 0
    with _reporting_damage(path), parquet.ParquetFile(path) as file:
        _check_sizes(path, file)
        columns = [
            field.name for field in file.schema_arrow if "binary" not in str(field.type)
        ]
        batches = file.iter_batches(
            batch_size=_batch_rows(file.metadata), columns=columns, use_threads=False
        )
        for batch in batches:
            if batch.nbytes > MAXIMUM_BATCH:
                raise InputError(
                    f"{path}: {batch.num_rows} rows from row {number} have "
                    f"{batch.nbytes:,} bytes, expected at most {MAXIMUM_BATCH:,}"
                )
            for row in batch.to_pylist():
                content = {name: drop_nulls(value) for name, value in row.items()}
                yield JsonLine(path, number, content, unit="row")
                number += 1


def drop_nulls(value: Any) -> Any:
    """Drops the keys of objects that hold None.

    Arrow gives all objects of a column the same keys, with None for missing ones.
    """
    if isinstance(value, dict):
        return {name: drop_nulls(x) for name, x in value.items() if x is not None}
    if isinstance(value, list):
        return [drop_nulls(x) for x in value]
    return value


def _import_parquet(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            f"{path} is a parquet file, which needs pyarrow: install it with "
            "pip install 'prompt-tuning[parquet]', or write the data as .jsonl"
        ) from error


def _check_sizes(path: Path, file: Any) -> None:
    metadata = file.metadata
    sizes = {"rows": (metadata.num_rows, MAXIMUM_ROWS)}
    sizes["columns"] = metadata.num_columns, MAXIMUM_COLUMNS
    groups = [
        metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
    ]
    sizes["bytes in a row group"] = max(groups, default=0), MAXIMUM_GROUP
    sizes["values in a column"] = (
        _longest_column(metadata),
        FREE_VALUES + VALUES_PER_BYTE * path.stat().st_size,
    )
    for name, (size, maximum) in sizes.items():
        if not 0 <= size <= maximum:
            raise InputError(
                f"{path} has {size:,} {name}, expected at most {maximum:,} in a file "
                f"of {path.stat().st_size:,} bytes"
            )


def _longest_column(metadata: Any) -> int:
    """Returns the most values of a column, with the members of lists."""
    if not 0 <= metadata.num_columns <= MAXIMUM_COLUMNS:
        return 0  # refused for their number
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    counts = [
        sum(group.column(i).num_values for group in groups)
        for i in range(metadata.num_columns)
    ]
    return max([metadata.num_rows, *counts])


def _batch_rows(metadata: Any) -> int:
    """Returns how many rows are read at a time: fewer if values may be large.

    A dictionary has each distinct value once, and every row may refer to the longest.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [
        group.column(i).total_uncompressed_size
        for group in groups
        for i in range(metadata.num_columns)
        if group.column(i).has_dictionary_page
    ]
    return max(1, min(ROWS, EXPANDED_BATCH // max([1, *sizes])))


@contextlib.contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    """Reports errors of the parquet library within the block as a damaged file."""
    try:
        yield
    except (InputError, GeneratorExit):
        raise
    # pyarrow raises its own errors, and OSError, ValueError, KeyError and others for
    # damaged files.
    except Exception as error:
        reason = str(error)[:MAXIMUM_SHOWN] or type(error).__name__
        raise InputError(f"{path} cannot be read as parquet: {reason}") from error
