"""Inputs that Python passes: texts, conversations, token ids, keys of a template."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.text.conversations import MESSAGES_KEY, read_chat_messages
from prompt_tuning.texts.texts import Given

_FORMS = "a text, a list of chat messages, or token ids"


def read_inputs(given: Any, system: str | None = None) -> list[Given]:
    """Returns the inputs that an argument has: one text or conversation, or several.

    Args:
      given: the argument.
      system: system message before texts, which conversations have themselves.

    Raises:
      InputError: for anything else.
    """
    if isinstance(given, str) or _is_conversation(given):
        return [_read(given, "the input", system)]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise InputError(
            f"the texts are {shown(given)}, expected {_FORMS}, or a list of these"
        )
    return [_read(x, f"input {n}", system) for n, x in enumerate(given, start=1)]


def _read(given: Any, location: str, system: str | None) -> Given:
    if isinstance(given, str | Mapping):
        return given
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if _is_conversation(given):
        if system is not None:
            raise InputError(
                f"{location} is a conversation, and system is for texts: put the "
                "system message among the others"
            )
        content = {MESSAGES_KEY: list(given)}
        return read_chat_messages(content, MESSAGES_KEY, location)
    if isinstance(given, list | tuple) and all(
        isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in given
    ):
        return [int(x) for x in given]
    raise InputError(f"{location} is {shown(given)}, expected {_FORMS}")


def _is_conversation(given: Any) -> bool:
    """Tests whether a value is a list of chat messages, in either form."""
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(isinstance(x, Mapping) and ("role" in x or "from" in x) for x in given)
    )
