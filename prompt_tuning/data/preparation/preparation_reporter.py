"""Who is told how far a preparation is."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class PreparationReporter(Protocol):
    """Is told how far a preparation is."""

    def begin(self, stage: str, total: int) -> None:
        """A stage begins that takes so many bytes of input or files of output."""
        ...

    def advance(self, amount: int) -> None:
        """Some of them are done."""
        ...

    def say(self, text: str) -> None:
        """Something worth a line."""
        ...


class Silent:
    """A reporter that says nothing."""

    def begin(self, stage: str, total: int) -> None:
        """See `Reporter`."""

    def advance(self, amount: int) -> None:
        """See `Reporter`."""

    def say(self, text: str) -> None:
        """See `Reporter`."""
