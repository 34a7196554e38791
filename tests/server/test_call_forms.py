"""Calls of tools, as the chat templates of published models write them."""

import json
from pathlib import Path

import pytest

from prompt_tuning.server.answer_parts import TaggedReader
from prompt_tuning.server.call_syntax import GEMMA, GLM, LFM, QWEN_CODER, syntax_of
from tests.server.test_call_grammars import matches

TEMPLATES = {
    "qwen3_5_think": QWEN_CODER,
    "qwen3_6": QWEN_CODER,
    "qwen3_8": QWEN_CODER,
    "nemotron_3_nano": QWEN_CODER,
    "glm4moe": GLM,
    "lfm2_2_5": LFM,
    "gemma4": GEMMA,
    "gemma4_v5": GEMMA,
}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "zones": {"type": "array"},
}
ARGUMENTS = {
    "city": "São Paulo, 5: {north}",
    "days": 3,
    "exact": True,
    "where": {"lat": -1.5, "near": ["a", "b"]},
    "zones": [1, 2],
}
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": PROPERTIES},
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_a_template_writes_can_be_enforced_and_is_read_back(name):
    import trl  # pyright: ignore[reportMissingImports]
    from transformers.utils import (  # pyright: ignore[reportMissingImports]
        chat_template_utils,
    )

    folder = Path(str(trl.__file__)).parent / "chat_templates"
    template = (folder / f"{name}.jinja").read_text()
    syntax = syntax_of(template)
    assert syntax is not None and syntax is TEMPLATES[name]
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    (text,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages],
        chat_template=template,
        tools=[{"type": "function", "function": WEATHER}],
        bos_token="",
        eos_token="",
    )
    tags = syntax.tags
    assert tags is not None
    opening, closing = tags
    answer = text[text.rindex(opening) : text.rindex(closing) + len(closing)]
    schemas = {"get_weather": WEATHER["parameters"]}
    assert matches(answer, syntax, schemas)
    reader = TaggedReader(syntax=syntax, schemas=schemas)
    (part,) = [*reader.feed(answer), *reader.finish()]
    assert (part.kind, part.name) == ("call", "get_weather")
    assert json.loads(part.text) == ARGUMENTS
