"""Records with two answers to one prompt: a chosen one and a rejected one."""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.utf8_text import common_beginning
from prompt_tuning.data.text.conversations import has_messages

CHOSEN, REJECTED = "chosen", "rejected"
ANSWERS = (CHOSEN, REJECTED)
"""Keys of the two answers, the better one first, as published data name them."""


def with_prompt(content: Mapping[str, Any], prompt_key: str | None) -> dict[str, Any]:
    """Returns a record with a prompt of the same kind as its two answers.

    Published data often repeat the prompt at the start of both answers: two whole
    conversations, with or without a prompt as text, or two texts without a prompt.
    Their common beginning is then the prompt. Other records, also those without two
    answers, are returned as they are.
    """
    record = dict(content)
    if prompt_key is None or not all(key in content for key in ANSWERS):
        return record
    answers = [content[key] for key in ANSWERS]
    talk = all(has_messages(answer) for answer in answers)
    if not talk and not all(isinstance(answer, str) for answer in answers):
        return record
    prompt = content.get(prompt_key)
    if prompt and (has_messages(prompt) or not talk):
        return record
    count = _common_messages(*answers) if talk else _common_letters(*answers)
    record |= {key: x[count:] for key, x in zip(ANSWERS, answers, strict=True)}
    return record | {prompt_key: answers[0][:count]}


def _common_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Counts equal messages at the start; each conversation keeps its last one."""
    most = min(len(chosen), len(rejected)) - 1
    count = 0
    while count < most and chosen[count] == rejected[count]:
        count += 1
    return count


def _common_letters(chosen: str, rejected: str) -> int:
    """Counts the letters that two texts begin with.

    A space at their end belongs to the answers, as tokenizers join it to the next word.
    """
    common = common_beginning(chosen, rejected)
    return len(common) - common.endswith(" ")
