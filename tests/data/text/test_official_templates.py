"""Chat templates as their makers ship them, against transformers."""

# transformers and trl are only in the `bench` extra.
# pyright: reportMissingImports=false

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch


def user(content):
    return {"role": "user", "content": content}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def parts(text):
    return [{"type": "text", "text": text}]


FUNCTION = {"name": "f", "arguments": {"a": 1}}
CALL = {"id": "call00001", "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "content": "4", "name": "f", "tool_call_id": "call00001"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "adds", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]

KINDS = {
    "one": [user("2+2?"), answer("4")],
    "two": [user("2+2?"), answer("4"), user("3+3?"), answer("6")],
    "system": [{"role": "system", "content": "be brief"}, user("2+2?"), answer("4")],
    "thoughts": [
        *(user("2+2?"), answer("<think>\neasy\n</think>\n\n4")),
        *(user("3+3?"), answer("<think>\nhm\n</think>\n\n6")),
    ],
    "reasoning": [
        *(user("2+2?"), answer("4", reasoning_content="easy")),
        *(user("3+3?"), answer("6", reasoning_content="hm")),
    ],
    "tools": [user("2+2?"), answer(None, tool_calls=[CALL]), RESULT, answer("four")],
    "parts": [user(parts("2+2?")), answer(parts("4"))],
}
ENDS = {"gptoss": "<|return|>", "muse": "<|eot|>", "glm": "<|endoftext|>"}


def templates():
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return []
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return [x for x in files if not x.stem.endswith("_training")]


FILES = templates()


def eos_of(name, source):
    for begin, end in ENDS.items():
        if name.startswith(begin):
            return end
    known = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>"
    ends = [end for end in known if end in source]
    return ends[0] if ends else "</s>"
