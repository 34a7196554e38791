"""Rows that Python passes, in the forms that other libraries have them."""

import json
import math

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.python_rows import (
    has_held_out,
    naming_rows,
    split_of,
    write_rows,
)

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
PAIRS = [("a", "b"), ("c", "d")]
COLUMNS = {"prompt": ["a", "c"], "completion": ["b", "d"]}


class Frame:
    """A table with the methods of a `pandas.DataFrame`."""

    def __init__(self, rows):
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient):
        return {"records": self.rows}[orient]


class Polars:
    """A table with the methods of a `polars.DataFrame`."""

    columns = tuple(COLUMNS)

    def to_dict(self):
        return COLUMNS

    def to_dicts(self):
        return ROWS


def written(tmp_path, data, **choices):
    file = tmp_path / "rows.jsonl"
    write_rows(data, file, "prompt", "completion", **choices)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "data",
    [
        *(PAIRS, ROWS, iter(ROWS), COLUMNS, Frame(ROWS), Polars()),
        {name: np.array(column) for name, column in COLUMNS.items()},
        np.array(PAIRS),
        np.array(PAIRS, object),
        [np.array(pair) for pair in PAIRS],
    ],
    ids=[
        *("pairs", "mappings", "iterator", "columns", "pandas", "polars"),
        *("columns of NumPy", "array", "array of objects", "arrays"),
    ],
)
def test_all_forms_have_the_same_rows(tmp_path, data):
    assert written(tmp_path, data) == ROWS


def test_a_table_of_arrow_has_the_same_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    assert written(tmp_path, arrow.Table.from_pylist(ROWS)) == ROWS


def test_splits_are_chosen_by_name():
    data = {"train": ROWS, "validation": PAIRS, "test": COLUMNS}
    assert split_of(data, "data", held_out=False) is ROWS
    assert split_of(data, "data", held_out=True) is PAIRS
    assert has_held_out(data)
    del data["validation"]
    assert split_of(data, "data", held_out=True) is COLUMNS
    # A test split is not used during training unless it is asked for.
    assert not has_held_out(data)
    for other in (ROWS, COLUMNS, Frame(ROWS), "train.jsonl"):
        assert split_of(other, "data", held_out=False) is other
    with pytest.raises(InputError, match=r"splits \['test'\], expected one named 'tra"):
        split_of({"test": ROWS}, "data", held_out=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([("a", "b"), ("a",)], "evaluation, row 1 is ..a.,., expected a pair"),
        (3, "evaluation is an int, expected rows"),
        ([], "evaluation has no rows"),
        (ROWS[0], "evaluation is one mapping with the keys"),
        ({"prompt": ["a"], "completion": []}, "columns of the lengths"),
        (np.zeros((2, 3)), r"array of shape \(2, 3\), expected pairs"),
        (Frame([ROWS[0], {**ROWS[0], "completion": math.nan}]), "row 1: 'completion' "),
        ([{"prompt": "a", "completion": object()}], "row 0 is .*JSON cannot hold"),
    ],
)
def test_data_of_other_forms_is_refused(tmp_path, data, message):
    with pytest.raises(InputError, match=message):
        written(tmp_path, data, argument="evaluation")
    assert not list(tmp_path.iterdir())


def test_a_missing_number_that_is_not_learned_is_null(tmp_path):
    row = {**ROWS[0], "score": math.nan}
    assert written(tmp_path, [row]) == [{**ROWS[0], "score": None}]


def test_messages_name_the_argument_and_the_row():
    with (
        pytest.raises(InputError, match=r"^data, row 3: no; see data$"),
        naming_rows({"/tmp/x/rows.jsonl": "data"}),
    ):
        raise InputError("/tmp/x/rows.jsonl, line 4: no; see /tmp/x/rows.jsonl")
