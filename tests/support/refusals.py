"""Checks that a value is refused, also where the types of every call are checked."""

import contextlib
import re
from collections.abc import Iterator

import pytest
from jaxtyping import TypeCheckError

from prompt_tuning.core.errors import InputError

REFUSALS = InputError, TypeCheckError
"""The second is raised first, for a wrong type, where the tests check every call."""


@contextlib.contextmanager
def refuses(message: str) -> Iterator[None]:
    """Expects an `InputError` with a message, or before it that of a checked call."""
    with pytest.raises(REFUSALS) as caught:
        yield
    if isinstance(caught.value, InputError):
        assert re.search(message, str(caught.value)), caught.value
