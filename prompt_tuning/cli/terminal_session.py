"""A session in a terminal: you type a line, the model answers."""

import contextlib
import sys

from prompt_tuning.core.errors import InputError
from prompt_tuning.texts.session import Session

PROMPT_SIGN = "> "
RESET = "/reset"
ADAPTER = "/adapter"


def run_session(session: Session) -> None:
    """Answers each typed line until the end of the input.

    Ctrl-C ends an answer. If a text cannot be answered, the problem is printed, and the
    next one is read.
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
    word, _, name = text.strip().partition(" ")
    if text.strip() == RESET:
        session.reset()
    elif word == ADAPTER and len(session.names) > 1:
        print(session.choose_adapter(name.strip()))
    elif word:
        show(session, text)


def show(session: Session, text: str) -> None:
    """Prints the continuation of a text piece by piece."""
    pieces = session.answer(text)
    first = next(pieces, "")
    print(session.opening(text), first, sep="", end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
