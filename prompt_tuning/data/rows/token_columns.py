"""Data columns besides ids and types: weights, and numbers that an objective reads.

A column has one number for each token or for each row. Either way it becomes a number
for each token: a factor of the loss weight that its type gives, or a value for the
objective, such as an advantage.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.token_weights import PADDING
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.settings.data_source import ADVANTAGES

LOSS_WEIGHTS = "loss_weights"
"""The HDF5 data set `[rows, length]` with a factor for each token."""

CONTEXTS = "contexts"
"""The column that `context_key` names: the number of each example's context."""

Numbers = Float32[np.ndarray, "..."]
NO_COLUMNS: Mapping[str, Any] = types.MappingProxyType({})


class TokenValues(NamedTuple):
    """Numbers of tokens, float32: `[n]` for a row, `[c, n]` for a block.

    Attributes:
      loss_weights: factor of the loss weight that a token's type gives; None for 1.
      columns: numbers that an objective reads, by the column's name.
    """

    loss_weights: Numbers | None = None
    columns: Mapping[str, Numbers] = NO_COLUMNS

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "TokenValues":
        """Applies a function to each array."""
        weights = self.loss_weights
        return TokenValues(
            None if weights is None else function(weights),
            {name: function(column) for name, column in self.columns.items()},
        )

    def scale(self, weights: Float32[np.ndarray, "..."]) -> np.ndarray:
        """Multiplies weights by `loss_weights`."""
        return weights if self.loss_weights is None else weights * self.loss_weights


@dataclasses.dataclass(frozen=True)
class TokenColumns:
    """The columns of the data to read: HDF5 data sets or keys of jsonl lines.

    Attributes:
      loss_weights: whether to read the data set `loss_weights [rows, length]`, if an
        HDF5 file contains it.
      example_weights: column of the rows' weights, above 0, `[rows]`; None for 1.
      balance: column of classes, `[rows]`, or in HDF5 `[rows, length]` for tokens,
        negative for none. Tokens of rare classes get larger weights, so that all
        classes have the same total. None for no balancing.
      columns: key of an objective's column, by the column's name; numbers `[rows]`, or
        in HDF5 `[rows, length]`.
    """

    loss_weights: bool = True
    example_weights: str | None = None
    balance: str | None = None
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in self.columns:
            if name in RESERVED:
                raise InputError(
                    f"DataSource.columns has the name {name!r}, which has another "
                    f"meaning: expected a name other than {', '.join(RESERVED)}"
                )

    @property
    def keys(self) -> dict[str, tuple[str | None, str]]:
        """The key of a column and the setting that names it, by column name."""
        columns = {n: (key, column_setting(n)) for n, key in self.columns.items()}
        return {
            "example_weights": (self.example_weights, "DataSource.example_weight_key"),
            "balance": (self.balance, "DataSource.balance_key"),
        } | columns

    def read_line(self, line: JsonLine) -> dict[str, Any]:
        """Returns the values of a jsonl line, by column name."""
        values = {}
        for role, (key, setting) in self.keys.items():
            if key is None:
                continue
            read = line.value if role == "balance" else line.scalar
            value = read(key, setting)
            if role in self.columns and isinstance(value, bool):
                value = int(value)
            values[role] = value
            accepted = (str, int) if role == "balance" else (int, float)
            if isinstance(value, bool) or not isinstance(value, accepted):
                names = " or ".join(kind.__name__ for kind in accepted)
                raise InputError(
                    f"{line.location}: {key!r} is {shown(value)}, expected {names} "
                    f"({setting})"
                )
            if role != "balance":
                check_column(role, key, np.array([value]), lambda row: line.location)
        return values


RESERVED = (
    "input_ids",
    "token_types",
    "prompt_ids",
    LOSS_WEIGHTS,
    "example_weights",
    "balance",
)
"""Names of columns that rows use themselves, which an objective cannot use."""


def column_setting(name: str) -> str:
    """Returns the setting that names the key of an objective's column."""
    if name == ADVANTAGES:
        return "DataSource.advantages_key"
    if name == CONTEXTS:
        return "ContextDistillation.context_key"
    return f"DataSource.columns[{name!r}]"


def check_column(
    role: str,
    name: str,
    values: np.ndarray,
    describe_row: Callable[[int], str],
    token_types: Integer[np.ndarray, "c n"] | None = None,
) -> None:
    """Refuses infinite values of a column, and impossible weights.

    Args:
      role: field of `TokenColumns`, or the name of an objective's column.
      name: name of the column, for the message.
      values: `[c]` or `[c, n]`.
      describe_row: returns the location of a row.
      token_types: types of the tokens, `[c, n]`, for values of tokens.
    """
    expected = {
        "loss_weights": "a finite number of 0 or more",
        "example_weights": "a finite number above 0; leave the row out instead of 0",
    }.get(role, "a finite number")
    invalid = ~_is_finite(values)
    if role == "loss_weights":
        invalid |= values < 0
    elif role == "example_weights":
        invalid |= values <= 0
    if not invalid.any() and role == "loss_weights" and token_types is not None:
        invalid = (values != 0) & (token_types == PADDING)
        expected = "0: the token is padding (type 2), which is never learned"
    if invalid.any():
        row, *token = np.argwhere(invalid)[0].tolist()
        location = describe_row(row) + (f", token {token[0]}" if token else "")
        found = shown(values[invalid].tolist()[0])
        raise InputError(f"{location}: {name} is {found}, expected {expected}")


def _is_finite(values: np.ndarray) -> np.ndarray:
    """Tests which numbers are finite in float32, the type that uses them."""
    try:
        with np.errstate(over="ignore"):
            return np.isfinite(values.astype(np.float32))
    except OverflowError:  # an integer of JSON with hundreds of digits
        return np.zeros(values.shape, bool)


class ClassBalance:
    """Weights of classes that give all of them the same total.

    A class with `n` of `N` rows, or tokens with `n` of a total weight of `N`, has the
    weight `N / (C * n)` among `C` classes; the mean over all is 1. Negative numbers in
    `totals` stand for no class.
    """

    def __init__(self, totals: Mapping[Any, int | float]):
        real = {k: n for k, n in totals.items() if isinstance(k, str) or k >= 0}
        total = sum(real.values())
        self._weights = {k: total / (len(real) * n) for k, n in real.items()}

    def __getitem__(self, name: Any) -> float:
        """Returns the weight of a class; 1 for no class."""
        return self._weights.get(name, 1.0)

    def weights(self, classes: Integer[np.ndarray, "..."]) -> np.ndarray:
        """Returns the weights of an array of class numbers."""
        distinct, inverse = np.unique(classes, return_inverse=True)
        weights = np.array([self[int(number)] for number in distinct])
        return weights[inverse].reshape(classes.shape)


def class_totals(
    classes: Integer[np.ndarray, "*shape"],
    weights: Float32[np.ndarray, "*shape"] | None = None,
) -> dict[int, float]:
    """Returns the total weight by class among rows `[c]` or tokens `[c, n]`.

    Without weights, it counts them. Classes with a total of 0 are left out.
    """
    distinct, inverse = np.unique(classes, return_inverse=True)
    flat = np.ones(classes.size) if weights is None else weights.ravel()
    totals = np.bincount(inverse.ravel(), flat, minlength=len(distinct))
    pairs = zip(distinct.tolist(), totals.tolist(), strict=True)
    return {number: total for number, total in pairs if total}


def combine_columns(
    shape: tuple[int, int],
    factors: Mapping[str, np.ndarray | None],
    columns: Mapping[str, np.ndarray],
) -> TokenValues:
    """Combines columns of rows or of tokens into numbers for tokens, `(c, n)`.

    Columns are `[c]` or `[c, n]`; `factors` are multiplied, and an objective reads
    `columns`.
    """

    def broadcast(column: np.ndarray) -> np.ndarray:
        table = column if column.ndim == 2 else column[:, None]
        return np.broadcast_to(table, shape).astype(np.float32)

    present = [broadcast(column) for column in factors.values() if column is not None]
    return TokenValues(
        np.prod(present, axis=0, dtype=np.float32) if present else None,
        {name: broadcast(column) for name, column in columns.items()},
    )
