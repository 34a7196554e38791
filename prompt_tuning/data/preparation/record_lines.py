"""Copies records to lines of JSON if a file gives no access to a single record."""

import json
import math
from pathlib import Path
from typing import Any

from prompt_tuning.data.rows.text_records import read_records


def write_lines(source: Path, target: Path, quotes: bool = True) -> None:
    """Writes the records of a JSON list, a parquet file or a table as lines of JSON.

    `quotes` tells whether `"` quotes the cells of a table.
    """
    with target.open("wb") as file:
        for record in read_records(source, quotes):
            text = json.dumps(_to_json(record.content), ensure_ascii=False)
            # Half a surrogate pair is refused with its record.
            file.write(text.encode("utf-8", "surrogatepass") + b"\n")


def _to_json(value: Any) -> Any:
    """Converts what parquet has and JSON lacks: dates to text, infinities to null."""
    if isinstance(value, dict):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
