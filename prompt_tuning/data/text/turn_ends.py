"""The tokens with which a chat template ends an answer."""

from typing import Any

from prompt_tuning.data.text.chat_templates import ChatTemplate
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import Tokenizer, hidden_tokens

ANSWER, CALLS = "answer", ("first_call", "second_call")
"""Content of an answer, and names of tools that another one calls."""


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the special tokens that a template writes after an answer.

    There may be one after a text and another after calls of tools, and none if the
    template rejects the conversations that are tried.
    """
    ends = _end_of_text(template, tokenizer) + _end_of_calls(template, tokenizer)
    return list(dict.fromkeys(ends))


def _end_of_text(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the token after the text of an answer, if it is special."""
    text = _render(template, {"content": ANSWER})
    before, _, after = text.rpartition(ANSWER)
    ids = tokenizer.encode(after.strip()) if before else []
    return [id for id in ids[:1] if _is_special(tokenizer, id)]


def _end_of_calls(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the last token after calls of tools, if it only follows the last one."""
    for names in (CALLS, CALLS[:1]):
        calls = [_call(name) for name in names]
        text = _render(template, {"content": None, "tool_calls": calls})
        if CALLS[0] in text:
            break
    else:
        return []
    after = text.rpartition(names[-1])[2] if names[-1] in text else text
    ids = tokenizer.encode(after.strip())
    between = text.partition(CALLS[0])[2].partition(CALLS[1])
    if not ids or not _is_special(tokenizer, ids[-1]):
        return []
    if between[1] and tokenizer.token(ids[-1]) in between[0]:
        return []
    return ids[-1:]


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1}}
    return {"id": "abcdefghi", "type": "function", "function": function}


def _render(template: ChatTemplate, answer: dict[str, Any]) -> str:
    """Returns a conversation with an answer; nothing if the template rejects it."""
    messages = {"role": "user", "content": "question"}, {"role": "assistant", **answer}
    tools = None
    if "tool_calls" in answer:
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
        tools = [
            {
                "type": "function",
                "function": {"name": n, "description": n, "parameters": parameters},
            }
            for n in CALLS
        ]
    record = ChatRecord(messages, (False, True), tools)
    (text,) = template.render_many("text", [record])
    return text[0] if isinstance(text, tuple) else ""


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Tests whether a token is special, and so never a part of an answer's text."""
    return token in hidden_tokens(tokenizer).values()
