"""Errors of the libraries that read and run tokenizers."""

import contextlib
from collections.abc import Callable, Iterator

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError

MAXIMUM_FILE = 2**27
"""Maximum size in bytes of each file of a tokenizer."""

DECODING = "the tokenizer cannot decode its own ids"


@contextlib.contextmanager
def reporting_errors(problem: Callable[[], str]) -> Iterator[None]:
    """Reports errors of a tokenizer's library; `problem` says what cannot be done."""
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
