"""Division of a batch's rows among devices."""

from typing import NamedTuple

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set


class RowDivision(NamedTuple):
    """Devices that share the rows of a batch.

    Attributes:
      parts: number of equal parts.
      axes: mesh axes that divide the rows.
    """

    parts: int = 1
    axes: tuple[str, ...] = ()

    def check(self, rows: int) -> None:
        """Checks that a batch of `rows` rows divides evenly.

        Raises:
          InputError: if it does not; the message gives both numbers.
        """
        if rows % self.parts:
            raise InputError(
                f"a batch of {rows} rows cannot be divided among {self.parts} "
                f"devices along {' and '.join(self.axes)}; choose "
                f"a multiple: {how_to_set('DataSource.batch_size', self.parts)}"
            )


ONE_PART = RowDivision()
"""The division on a single device."""
