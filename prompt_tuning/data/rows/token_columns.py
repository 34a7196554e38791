"""What data says of its tokens besides ids and types: weights and advantages.

Whatever it is said of, a token or a whole row, it becomes a number for each token: a
factor of the weight that the token's type gives, or an advantage.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING
from prompt_tuning.data.rows.jsonl import Line

LOSS_WEIGHTS = "loss_weights"
"""The HDF5 data set `[rows, length]` of a factor for each token."""

Numbers = Float32[np.ndarray, "..."] | None


class TokenValues(NamedTuple):
    """Numbers of some tokens, float32; of one row `[n]`, or of several `[c, n]`.

    Attributes:
      loss_weights: what the weight of each token's type is multiplied with; None for 1.
      advantages: of each token; None where nothing asks for them.
    """

    loss_weights: Numbers = None
    advantages: Numbers = None

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "TokenValues":
        """What a function makes of each array that is there."""
        return TokenValues(*(None if x is None else function(x) for x in self))

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
      advantages: of each row, `[rows]`, or in HDF5 of each token; None for none.
    """

    loss_weights: bool = True
    example_weights: str | None = None
    balance: str | None = None
    advantages: str | None = None

    def of_line(self, line: Line) -> dict[str, Any]:
        """What a line says under the keys that are asked for, by the field's name.

        Raises:
          InputError: if a key is missing, a number is none or out of range, or a class
            is neither a text nor an integer.
        """
        found = {}
        for name, setting in ROW_SETTINGS.items():
            key = getattr(self, name)
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


ROW_SETTINGS = {
    "example_weights": "DataSource.example_weight_key",
    "balance": "DataSource.balance_key",
    "advantages": "DataSource.advantages_key",
}
"""What names a column that a row has one value of."""


def check_column(
    role: str,
    name: str,
    values: np.ndarray,
    place: Callable[[int], str],
    token_types: Integer[np.ndarray, "c n"] | None = None,
) -> None:
    """Refuses numbers that are no weights, or no advantages.

    Args:
      role: a field of `TokenColumns`.
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
        "advantages": "a finite number",
    }[role]
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
    advantages: np.ndarray | None,
) -> TokenValues:
    """Columns of rows or of tokens as numbers of each token.

    Args:
      shape: rows and tokens, `(c, n)`.
      factors: what is multiplied, each `[c]` or `[c, n]`, or None.
      advantages: `[c]` or `[c, n]`, or None.
    """

    def spread(column: np.ndarray) -> np.ndarray:
        whole = column if column.ndim == 2 else column[:, None]
        return np.broadcast_to(whole, shape).astype(np.float32)

    given = [spread(column) for column in factors.values() if column is not None]
    return TokenValues(
        np.prod(given, axis=0, dtype=np.float32) if given else None,
        None if advantages is None else spread(advantages),
    )
