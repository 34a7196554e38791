"""The messages of a chat request reach the chat template with all their fields."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.server.openai_requests import read_chat

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes, "}


def read(*messages, **fields):
    body = JsonObject("the body", {"messages": list(messages), **fields})
    return read_chat(body, 64).conversation


def test_no_field_of_a_message_is_dropped():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "s", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "user", "content": parts},
    ]
    assert list(read(*messages).messages) == messages


def test_a_refusal_is_a_text():
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    message, _ = read(refused, USER).messages
    assert message["content"] == [{"type": "text", "text": "no"}]


def test_the_tools_that_are_allowed_are_given_to_the_template():
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    allowed = {"mode": "required", "tools": tools[1:]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [USER], "tools": tools, "tool_choice": choice}
    read = read_chat(JsonObject("the body", body), 64).tools
    assert read is not None and read.required and read.parallel
    assert read.tools == tools[1:] and list(read.functions) == ["g", "h"]


def test_the_type_of_an_argument_is_what_its_reference_leads_to():
    color = {"type": "string"}
    parameters = {
        "properties": {"color": {"$ref": "#/$defs/Paint/properties/color"}},
        "$defs": {"Paint": {"type": "object", "properties": {"color": color}}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    read = read_chat(JsonObject("", {"messages": [USER], "tools": [tool]}), 64).tools
    assert read is not None and read.functions["f"]["properties"]["color"] == color


def test_variables_of_the_template_are_read():
    variables = {"enable_thinking": False}
    record = read(USER, chat_template_kwargs=variables, reasoning_effort="low")
    assert record.variables == variables | {"reasoning_effort": "low"}
    assert read(USER, chat_template_kwargs=None).variables is None


@pytest.mark.parametrize(
    "fields",
    [{}, {"continue_final_message": True, "add_generation_prompt": False}],
    ids=["open-webui", "vllm"],
)
def test_a_last_answer_is_continued(fields):
    assert read(USER, ANSWER, **fields).messages == (USER, ANSWER)


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([USER, ANSWER], {"add_generation_prompt": True}, "asks to answer the last"),
        ([USER], {"continue_final_message": True}, "asks to continue the last"),
        (
            [USER, ANSWER],
            {"continue_final_message": True, "add_generation_prompt": True},
            "are both true",
        ),
        (
            [USER],
            {"chat_template_kwargs": {"messages": []}},
            "'messages', which is a field",
        ),
        (
            [USER],
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "high"},
            },
            "has another",
        ),
        ([{"role": "user", "content": None}], {}, "expected a text or a list of parts"),
        ([], {}, "messages is empty"),
    ],
)
def test_what_contradicts_is_refused(messages, fields, message):
    with pytest.raises(InputError, match=message):
        read(*messages, **fields)
