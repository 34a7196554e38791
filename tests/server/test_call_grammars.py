"""Calls that grammars let an answer have, in the syntaxes of chat templates."""

import json
import re

import pytest

from prompt_tuning.server.answer_parts import HarmonyReader, TaggedReader
from prompt_tuning.server.call_grammars import UnwritableError
from prompt_tuning.server.call_syntax import (
    GEMMA,
    GLM,
    HARMONY_CALLS,
    HERMES,
    LFM,
    LLAMA,
    MISTRAL,
    QWEN_CODER,
)
from prompt_tuning.server.tool_choice import ToolChoice, calls_grammar

llguidance = pytest.importorskip("llguidance", reason="needs the extra guided")

SCHEMAS = {
    "paint": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "color": {"type": "string", "enum": ["red", "blue"]},
            "size": {"type": "integer", "maximum": 9},
            "at": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["name", "color"],
    },
    "stop": {"type": "object"},
}
ALL = {"name": "a '<b>\n", "color": "red", "size": 5, "at": [1, -2.5]}
LEAST = {"name": "a", "color": "blue"}
CALLS = {
    QWEN_CODER: (
        "<tool_call>\n<function=paint>\n<parameter=name>\na '<b>\n\n</parameter>\n"
        "<parameter=color>\nred\n</parameter>\n<parameter=size>\n5\n</parameter>\n"
        "<parameter=at>\n[1, -2.5]\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=paint>\n<parameter=name>\na\n</parameter>\n"
        "<parameter=color>\nblue\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    ),
    GLM: (
        "<tool_call>paint\n<arg_key>name</arg_key>\n<arg_value>a '<b>\n</arg_value>\n"
        "<arg_key>color</arg_key>\n<arg_value>red</arg_value>\n<arg_key>size</arg_key>"
        "\n<arg_value>5</arg_value>\n<arg_key>at</arg_key>\n<arg_value>[1, -2.5]"
        "</arg_value>\n</tool_call>",
        "<tool_call>paint\n<arg_key>name</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>color</arg_key>\n<arg_value>blue</arg_value>\n</tool_call>",
        "<tool_call>stop\n</tool_call>",
    ),
    GEMMA: (
        '<|tool_call>call:paint{at:[1,-2.5],color:<|"|>red<|"|>,'
        'name:<|"|>a \'<b>\n<|"|>,size:5}<tool_call|>',
        '<|tool_call>call:paint{color:<|"|>blue<|"|>,name:<|"|>a<|"|>}<tool_call|>',
        "<|tool_call>call:stop{}<tool_call|>",
    ),
    LFM: (
        "<|tool_call_start|>[paint(name='a \\'<b>\\n', color='red', size=5, "
        "at=[1, -2.5])]<|tool_call_end|>",
        "<|tool_call_start|>[paint(name='a', color='blue')]<|tool_call_end|>",
        "<|tool_call_start|>[stop()]<|tool_call_end|>",
    ),
    MISTRAL: (
        f"[TOOL_CALLS]paint[ARGS]{json.dumps(ALL)}",
        f"[TOOL_CALLS][{json.dumps({'name': 'paint', 'arguments': LEAST})}]",
        "[TOOL_CALLS]stop{}",
    ),
    HERMES: tuple(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': x})}\n</tool_call>"
        for name, x in (("paint", ALL), ("paint", LEAST), ("stop", {}))
    ),
    LLAMA: tuple(
        json.dumps({"name": name, "parameters": x})
        for name, x in (("paint", ALL), ("paint", LEAST), ("stop", {}))
    ),
    HARMONY_CALLS: (
        f"<|channel|>commentary to=functions.paint json<|message|>{json.dumps(ALL)}",
        f" to=functions.paint<|channel|>commentary json<|message|>{json.dumps(LEAST)}",
        "<|channel|>commentary to=functions.stop json<|message|>{}",
    ),
}
SYNTAXES = pytest.mark.parametrize("syntax", CALLS, ids=lambda each: each.name)


def matches(text, syntax, schemas=SCHEMAS, *, parallel=False):
    """Whether a text, all of it, is of the grammar of calls."""
    choice = ToolChoice([], schemas, True, parallel)
    grammar = calls_grammar(choice, syntax, None, opened=False)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"),
        f'%llguidance {{"no_forcing": true}}\n{grammar}',
        log_level=0,
    )
    assert not matcher.is_error(), matcher.get_error()
    content = list(text.encode())
    accepted = matcher.try_consume_tokens(content)
    return accepted == len(content) and matcher.is_accepting()


@SYNTAXES
def test_a_call_matches_and_is_read_back(syntax):
    harmony = syntax is HARMONY_CALLS
    for text, expected in zip(CALLS[syntax], (ALL, LEAST, {}), strict=True):
        assert matches(text, syntax), text
        reader = TaggedReader(syntax=syntax, schemas=SCHEMAS)
        if harmony:
            reader = HarmonyReader(calls=True)
        (part,) = [*reader.feed(text), *reader.finish()]
        assert (part.kind, part.name) == ("call", "paint" if expected else "stop")
        assert json.loads(part.text) == expected


@SYNTAXES
def test_other_calls_do_not_match(syntax):
    whole, least, _ = CALLS[syntax]
    for text, pattern, other in (
        (least, "blue", "green"),
        (least, "paint", "paints"),
        (least, "name", "other"),
        (whole, r"(?<!\.)5", "10"),
        (whole, r"(?<!\.)5", '"5"'),
        (whole, r"-2\.5", "x"),
    ):
        changed = re.sub(pattern, other, text)
        assert changed != text and not matches(changed, syntax), changed


@pytest.mark.parametrize("syntax", [QWEN_CODER, GLM, GEMMA], ids=lambda x: x.name)
def test_a_text_has_no_tag_of_a_call(syntax):
    text = CALLS[syntax][1]
    assert syntax.closing is not None
    changed = re.sub(r"(?<=\Wa)(?=\n?<)", syntax.closing, text)
    assert changed != text and not matches(changed, syntax)


@pytest.mark.parametrize("syntax", [QWEN_CODER, GLM, GEMMA, LFM], ids=lambda x: x.name)
def test_several_calls_match_if_they_are_parallel(syntax):
    one = CALLS[syntax][1]
    between = {GEMMA: ""}.get(syntax, "\n")
    both = one + between + one
    if syntax is LFM:
        both = one.replace("[p", "[stop(), p")
    assert matches(both, syntax, parallel=True) and not matches(both, syntax)


@pytest.mark.parametrize(
    ("syntax", "schema"),
    [
        (QWEN_CODER, {"anyOf": [{"required": ["a"]}]}),
        (QWEN_CODER, {"properties": {"<a>": {}}}),
        (LFM, {"properties": {"a-b": {}}}),
        (GEMMA, {"properties": {"a": {"allOf": []}}}),
        (GEMMA, {"properties": {"a": {"enum": 1}}}),
        (GLM, {"properties": []}),
    ],
)
def test_a_syntax_refuses_what_it_cannot_write(syntax, schema):
    with pytest.raises(UnwritableError):
        matches("", syntax, {"f": {"type": "object", **schema}})
