"""The conversation of a request, in the form that chat templates read."""

from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject, as_object
from prompt_tuning.data.text.conversations import TEMPLATE_ARGUMENTS, answers_of
from prompt_tuning.data.text.template_renderer import ChatRecord

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTINUES, BEGINS = "continue_final_message", "add_generation_prompt"
VARIABLES, EFFORT = "chat_template_kwargs", "reasoning_effort"
FIELDS = ("messages", VARIABLES, EFFORT, CONTINUES, BEGINS)
"""Request fields that are read here; vLLM's names where OpenAI has none."""


def read_conversation(body: JsonObject) -> ChatRecord:
    """Returns the messages and the template variables of a request.

    Raises:
      InputError: if a field has a wrong type, or fields contradict each other.
    """
    messages = [
        _message(as_object(value, f"message {number}"), number)
        for number, value in enumerate(body.sequence("messages"), 1)
    ]
    if not messages:
        raise InputError("messages is empty, expected at least one message")
    _check_end(body, messages[-1]["role"])
    return answers_of(messages)._replace(variables=_variables(body))


def _message(message: JsonObject, number: int) -> dict[str, Any]:
    """Returns a message with all its fields, which are passed to the template."""
    role, content = message.text("role"), message.values.get("content")
    if role not in ROLES:
        message.refuse("role", f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        source = f"the content of message {number}"
        parts = [_part(as_object(value, source)) for value in content]
        return {**message.values, "content": parts}
    if content is None and role == "assistant":
        for value in message.sequence("tool_calls", None) or []:
            call = as_object(value, f"a call of message {number}")
            call.nested("function").text("name")
    elif not isinstance(content, str):
        message.refuse("content", "a text or a list of parts")
    return dict(message.values)


def _part(part: JsonObject) -> dict[str, Any]:
    """Returns a part of a message's content; templates only support texts."""
    if part.text("type") == "refusal":
        return {"type": "text", "text": part.text("refusal")}
    if part.text("type") != "text":
        part.refuse("type", "text; nothing else is supported")
    part.text("text")
    return dict(part.values)


def _check_end(body: JsonObject, role: str) -> None:
    """Checks that the last message can be answered or continued as requested.

    A last message of the assistant is continued, even if no field says so.
    """
    is_answer = role == "assistant"
    begins = body.flag(BEGINS, None)
    continues = body.flag(CONTINUES, is_answer if begins is None else not begins)
    if begins is None:
        begins = not continues
    if continues == begins:
        raise InputError(
            f"{CONTINUES} and {BEGINS} are both {str(begins).lower()}: a last message "
            "is either continued or answered, so leave one of them out"
        )
    if continues != is_answer:
        asked = "continue" if continues else "answer"
        raise InputError(
            f"the request asks to {asked} the last message, whose role is {role}: a "
            f"message of the assistant is continued and another answered, so leave "
            f"out {CONTINUES} and {BEGINS}"
        )


def _variables(body: JsonObject) -> dict[str, Any] | None:
    """Returns the template variables; OpenAI has a field of its own for one of them."""
    variables = dict(body.nested(VARIABLES, {}).values)
    for name in TEMPLATE_ARGUMENTS:
        if name in variables:
            raise InputError(
                f"{VARIABLES} has {shown(name)}, which is a field of the request"
            )
    effort = body.text(EFFORT, None)
    if effort is not None:
        if variables.get(EFFORT, effort) != effort:
            raise InputError(
                f"{EFFORT} is {shown(effort)}, and {VARIABLES} has another: leave one "
                "of them out"
            )
        variables[EFFORT] = effort
    return variables or None
