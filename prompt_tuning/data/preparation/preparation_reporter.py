"""Interface through which a preparation reports its progress."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class PreparationReporter(Protocol):
    """Receives the progress of a preparation."""

    def begin(self, stage: str, total: int) -> None:
        """Starts a stage of `total` input bytes or output files."""
        ...

    def advance(self, amount: int) -> None:
        """Adds to the amount that is done in the current stage."""
        ...

    def log(self, text: str) -> None:
        """Reports a line of text."""
        ...


class SilentReporter:
    """A reporter that discards everything."""

    def begin(self, stage: str, total: int) -> None:
        """Does nothing."""

    def advance(self, amount: int) -> None:
        """Does nothing."""

    def log(self, text: str) -> None:
        """Does nothing."""
