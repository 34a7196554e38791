"""Tables given from Python: their rows, whichever library made them.

The libraries are recognized by their methods, so none has to be installed.
"""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.errors import InputError, shown


def table_rows(data: Any, argument: str) -> Any:
    """Returns the rows of a table; other data is returned as it is.

    A table is a data frame of pandas or polars, a table of Arrow, a mapping of columns
    by name, or an array of pairs, `[n, 2]`.
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
    return (
        isinstance(data, Mapping) and bool(data) and all(map(_is_column, data.values()))
    )


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


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
