"""Data columns besides ids and types: weights, and numbers that an objective reads.

Whether a column has one number for each token or one for each row, it becomes a number
for each token: a factor of the loss weight that the token's type gives, or a value for
the objective, such as an advantage.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING
from prompt_tuning.data.rows.jsonl import Line

LOSS_WEIGHTS = "loss_weights"
"""The HDF5 data set `[rows, length]` of a factor for each token."""

ADVANTAGES = "advantages"
"""The column that `DataSource.advantages_key` names."""

Numbers = Float32[np.ndarray, "..."]
NO_COLUMNS: Mapping[str, Any] = types.MappingProxyType({})


class TokenValues(NamedTuple):
    """Numbers of some tokens, float32: `[n]` for one row, `[c, n]` for several.

    Attributes:
      loss_weights: factor of the weight of each token's type; None for 1.
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

    def weighted(self, weights: Float32[np.ndarray, "..."]) -> np.ndarray:
        """The weights of the types times these."""
        return weights if self.loss_weights is None else weights * self.loss_weights


@dataclasses.dataclass(frozen=True)
class TokenColumns:
    """Which columns of the data are read; HDF5 data sets or keys of jsonl lines.

    Attributes:
      loss_weights: whether the data set `loss_weights [rows, length]` multiplies the
        weights of the types, where an HDF5 file has it.
      example_weights: what each row weighs, above 0, `[rows]`; None for 1.
      balance: the class of each row, `[rows]`, or in HDF5 of each token, `[rows,
        length]` and negative for none: tokens of rare classes weigh more, so that each
        class weighs the same in all. None for no balance.
      columns: key of each column that an objective reads, by the column's name; one
        number for each row, `[rows]`, or in HDF5 for each token.

    Raises:
      InputError: if the name of a column is one that the rows need themselves.
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
        """The key of each column and the setting that names it, by column name."""
        columns = {n: (key, column_setting(n)) for n, key in self.columns.items()}
        return {
            "example_weights": (self.example_weights, "DataSource.example_weight_key"),
            "balance": (self.balance, "DataSource.balance_key"),
        } | columns

    def of_line(self, line: Line) -> dict[str, Any]:
        """What a line says under the keys that are asked for, by the field's name.

        Raises:
          InputError: if a key is missing, a number is none or out of range, or a class
            is neither a text nor an integer.
        """
        found = {}
        for name, (key, setting) in self.keys.items():
            if key is None:
                continue
            value = found[name] = line.value(key, setting)
            wanted = (str, int) if name == "balance" else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                kinds = " or ".join(kind.__name__ for kind in wanted)
                raise InputError(
                    f"{line.place}: {key!r} is {value!r}, expected {kinds} ({setting})"
                )
            if name != "balance":
                check_column(name, key, np.array([value]), lambda row: line.place)
        return found


RESERVED = (
    "input_ids",
    "token_types",
    "prompt_ids",
    LOSS_WEIGHTS,
    "example_weights",
    "balance",
)
"""Columns of rows that are not an objective's."""


def column_setting(name: str) -> str:
    """Returns the setting that names the key of an objective's column."""
    if name == ADVANTAGES:
        return "DataSource.advantages_key"
    return f"DataSource.columns[{name!r}]"


def check_column(
    role: str,
    name: str,
    values: np.ndarray,
    place: Callable[[int], str],
    token_types: Integer[np.ndarray, "c n"] | None = None,
) -> None:
    """Refuses numbers that cannot be weights, or are not finite.

    Args:
      role: a field of `TokenColumns`, or the name of an objective's column.
      name: of the column, for the message.
      values: `[c]` or `[c, n]`.
      place: where each row stands.
      token_types: `[c, n]`, where the values are of tokens and these have types.

    Raises:
      InputError: at the first number that cannot be used, with its row.
    """
    wanted = {
        "loss_weights": "a finite number of 0 or more",
        "example_weights": "a finite number above 0; leave the row out in place of 0",
    }.get(role, "a finite number")
    bad = ~np.isfinite(values)
    if role == "loss_weights":
        bad |= values < 0
    elif role == "example_weights":
        bad |= values <= 0
    if not bad.any() and role == "loss_weights" and token_types is not None:
        bad = (values != 0) & (token_types == PADDING)
        wanted = "0: the token is padding (type 2), which is never learned"
    if bad.any():
        row, *token = np.argwhere(bad)[0].tolist()
        where = place(row) + (f", token {token[0]}" if token else "")
        raise InputError(f"{where}: {name} is {values[bad][0]}, expected {wanted}")


class Balance:
    """What the tokens of each class weigh, so that all classes weigh the same.

    A class that has `n` of `N` rows, or whose tokens weigh `n` of `N`, among `C`
    classes, weighs `N / (C * n)`: the mean over all is 1.
    """

    def __init__(self, counts: Mapping[Any, int | float]):
        """Takes what each class comes to; negative numbers stand for no class."""
        real = {k: n for k, n in counts.items() if isinstance(k, str) or k >= 0}
        total = sum(real.values())
        self._weights = {k: total / (len(real) * n) for k, n in real.items()}

    def __getitem__(self, name: Any) -> float:
        """The weight of a class; 1 for none."""
        return self._weights.get(name, 1.0)

    def of(self, classes: Integer[np.ndarray, "..."]) -> np.ndarray:
        """The weight of each of some classes, which are numbers."""
        kinds, places = np.unique(classes, return_inverse=True)
        weights = np.array([self[int(kind)] for kind in kinds])
        return weights[places].reshape(classes.shape)


def class_weights(
    classes: Integer[np.ndarray, "*shape"],
    weights: Float32[np.ndarray, "*shape"] | None = None,
) -> dict[int, float]:
    """What each class comes to, among rows `[c]` or tokens `[c, n]`.

    A class whose tokens all weigh nothing is left out.

    Args:
      classes: of rows, or of tokens.
      weights: of each; None to count them.
    """
    kinds, places = np.unique(classes, return_inverse=True)
    each = np.ones(classes.size) if weights is None else weights.ravel()
    sums = np.bincount(places.ravel(), each, minlength=len(kinds))
    found = zip(kinds.tolist(), sums.tolist(), strict=True)
    return {kind: total for kind, total in found if total}


def token_values(
    shape: tuple[int, int],
    factors: Mapping[str, np.ndarray | None],
    columns: Mapping[str, np.ndarray],
) -> TokenValues:
    """Columns of rows or of tokens as numbers of each token.

    Args:
      shape: rows and tokens, `(c, n)`.
      factors: what is multiplied, each `[c]` or `[c, n]`, or None.
      columns: numbers that an objective reads, each `[c]` or `[c, n]`.
    """

    def spread(column: np.ndarray) -> np.ndarray:
        whole = column if column.ndim == 2 else column[:, None]
        return np.broadcast_to(whole, shape).astype(np.float32)

    given = [spread(column) for column in factors.values() if column is not None]
    return TokenValues(
        np.prod(given, axis=0, dtype=np.float32) if given else None,
        {name: spread(column) for name, column in columns.items()},
    )
