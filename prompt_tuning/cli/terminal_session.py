"""A session at a terminal, where a model answers each line that is typed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from prompt_tuning.core.errors import InputError

PROMPT_SIGN = "> "
RESET = "/reset"


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
        if text.strip() == RESET:
            session.reset()
        elif text.strip():
            try:
                show(session, text)
            except InputError as problem:
                print(problem, file=sys.stderr)


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
