"""Limits and errors of the libraries that read and run tokenizers."""

import contextlib
from collections.abc import Callable, Iterator

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError

MAXIMUM_FILE = 2**27
"""Maximum size in bytes of each file of a tokenizer."""

DECODING = "the tokenizer cannot decode its own ids"

MAXIMUM_TEXT = 2**22
"""Maximum number of characters that are encoded as one text. A tokenizer needs many
seconds for millions of characters without a space.
"""


def check_text(text: str) -> None:
    """Checks the length of a text before it is encoded.

    Raises:
      InputError: if it is longer than `MAXIMUM_TEXT`.
    """
    if len(text) > MAXIMUM_TEXT:
        raise InputError(
            f"a text has {len(text):,} characters, expected at most {MAXIMUM_TEXT:,}: "
            "divide it into several"
        )


@contextlib.contextmanager
def reporting_errors(problem: Callable[[], str]) -> Iterator[None]:
    """Reports errors of a tokenizer's library within the block.

    Args:
      problem: returns what cannot be done, for the message.

    Raises:
      InputError: for any error within the block.
    """
    try:
        yield
    except InputError:
        raise
    # The libraries raise nothing narrower, and a panic of Rust code is a
    # `PanicException`, whose class derives from BaseException and cannot be imported.
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        reason = str(error)[:MAXIMUM_SHOWN] or type(error).__name__
        raise InputError(f"{problem()}: {reason}") from error
