"""A session at a terminal, where a model answers each line that is typed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from prompt_tuning.core.errors import InputError

PROMPT_SIGN = "> "
RESET = "/reset"
ADAPTER = "/adapter"


@runtime_checkable
class Session(Protocol):
    """A model that answers texts; see `generation.text_session`."""

    hint: str

    def opening(self, text: str) -> str:
        """Returns what is shown of a text before its continuation."""
        ...

    def answer(self, text: str) -> Iterator[str]:
        """Yields what the model generates for a text, piece by piece."""
        ...

    def reset(self) -> None:
        """Forgets the texts before."""
        ...


@runtime_checkable
class AdapterSession(Protocol):
    """A session whose answers come from one of several adapters."""

    def choose_adapter(self, name: str) -> str:
        """Answers with another adapter; returns what to report."""
        ...


def run_session(session: Session) -> None:
    """Answers each line that is typed, until the end of the input.

    Ctrl-C ends an answer. A text that cannot be answered is reported, and the next one
    is read.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit and repeat lines
    print(session.hint)
    while True:
        try:
            text = input(PROMPT_SIGN)
        except EOFError:
            print()
            return
        try:
            _follow(session, text)
        except InputError as problem:
            print(problem, file=sys.stderr)


def _follow(session: Session, text: str) -> None:
    """Carries out a command, or answers a text."""
    word, _, name = text.strip().partition(" ")
    if text.strip() == RESET:
        session.reset()
    elif word == ADAPTER and isinstance(session, AdapterSession):
        print(session.choose_adapter(name.strip()))
    elif word:
        show(session, text)


def show(session: Session, text: str) -> None:
    """Prints the pieces that a model generates for a text as they come.

    Raises:
      InputError: if the text cannot be answered.
    """
    pieces = session.answer(text)
    first = next(pieces, "")
    print(session.opening(text), first, sep="", end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
