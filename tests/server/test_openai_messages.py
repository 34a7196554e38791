"""The messages of a chat request reach the chat template with all their fields."""

from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.server.openai_requests import read_chat


def test_no_field_of_a_message_is_dropped():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "s", "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": parts},
    ]
    body = read_chat(JsonObject("the body", {"messages": messages}), 64)
    assert body.messages == [messages[0] | {"role": "system"}, *messages[1:]]
