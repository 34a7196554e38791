"""Answers as models write them, split into content, reasoning and calls of tools."""

import json

import pytest

from prompt_tuning.server.answer_parts import HarmonyReader, Part, TaggedReader
from prompt_tuning.server.call_syntax import (
    GEMMA,
    GLM,
    HARMONY_CALLS,
    HERMES,
    LFM,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN_CODER,
    syntax_of,
)

THINK = ("<think>", "</think>")
SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["string", "null"]},
            "c": {"type": "boolean"},
        }
    }
}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def call(name="f", **arguments):
    return Part("call", json.dumps(arguments), name)


def content(text):
    return Part("content", text)


def reasoning(text):
    return Part("reasoning", text)


def joined(parts):
    """Joins neighboring parts of one kind; each call stays apart."""
    whole: list[Part] = []
    for part in parts:
        if whole and part.kind == whole[-1].kind != "call":
            whole[-1] = part._replace(text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


CASES = [
    (lambda: TaggedReader(THINK), "<think>\nso\n</think>\n\nyes \n", ["so", "yes"]),
    (lambda: TaggedReader(THINK, opened=True), "\nso </think> yes", ["so", "yes"]),
    (lambda: TaggedReader(THINK, opened=True), "it never ends ", ["it never ends"]),
    (lambda: TaggedReader(THINK), " a < b <thin ", [content(" a < b <thin ")]),
    (
        lambda: TaggedReader(THINK, syntax=HERMES),
        f"<think>\nuse <tool_call>?</think>\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
        '\n<tool_call>{"name": "g"}</tool_call>\n',
        [
            reasoning("use <tool_call>?"),
            content("I look."),
            call(a=1),
            Part("call", "{}", "g"),
        ],
    ),
    (
        lambda: TaggedReader(syntax=HERMES),
        "<tool_call>{'a'}</tool_call>",
        [content("<tool_call>{'a'}</tool_call>")],
    ),
    (lambda: TaggedReader(syntax=HERMES), f"<tool_call>{CALL}", [call(a=1)]),
    (
        lambda: TaggedReader(syntax=LLAMA),
        '{"name": "f", "parameters": {"a": "b; c"}}; {"name": "g", "parameters": {}}',
        [call(a="b; c"), call("g")],
    ),
    (
        lambda: TaggedReader(syntax=LLAMA),
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        [call(a=1)],
    ),
    (lambda: TaggedReader(syntax=LLAMA), '{"x": 1}', [content('{"x": 1}')]),
    (lambda: TaggedReader(syntax=LLAMA), f"so: {CALL}", [content(f"so: {CALL}")]),
    (
        lambda: TaggedReader(syntax=MISTRAL),
        f"[TOOL_CALLS][{CALL}, {CALL}]",
        [call(a=1), call(a=1)],
    ),
    (
        lambda: TaggedReader(syntax=MISTRAL),
        'Yes[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [2]}',
        [content("Yes"), call(a=1), call("g", b=[2])],
    ),
    (lambda: TaggedReader(syntax=PLAIN), f" [{CALL}]\n", [call(a=1)]),
    (lambda: TaggedReader(syntax=PLAIN), "[" * 5000, [content("[" * 5000)]),
    (
        lambda: HarmonyReader(calls=True),
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.f json<|message|>{"a": 1}<|call|>',
        [reasoning("so"), call(a=1)],
    ),
    (
        lambda: HarmonyReader(calls=True),
        " to=functions.f<|channel|>commentary json<|message|>{",
        [content("{")],
    ),
    (
        lambda: HarmonyReader(calls=False),
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final"
        "<|message|>yes, 1 < 2",
        [reasoning("so"), content("yes, 1 < 2")],
    ),
    (lambda: HarmonyReader(calls=True), "no header", [content("no header")]),
    (
        lambda: TaggedReader(syntax=QWEN_CODER, schemas=SCHEMAS),
        "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n5\n"
        "</parameter>\n<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>",
        [call(a=5, b="5", c=True)],
    ),
    (
        lambda: TaggedReader(syntax=GLM, schemas=SCHEMAS),
        "Yes\n<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>1 < 2</arg_value>\n"
        "<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        [content("Yes"), call(b="1 < 2", a=[1])],
    ),
    (
        lambda: TaggedReader(syntax=LFM),
        "<|tool_call_start|>[f(a='x, y', b=[1, True]), g()]<|tool_call_end|>",
        [call(a="x, y", b=[1, True]), Part("call", "{}", "g")],
    ),
    (
        lambda: TaggedReader(syntax=LFM),
        "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>",
        [content("<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>")],
    ),
    (
        lambda: TaggedReader(syntax=GEMMA),
        '<|tool_call>call:f{a:<|"|>x, y:{z<|"|>,b:{c:[1,true]}}<tool_call|>',
        [call(a="x, y:{z", b={"c": [1, True]})],
    ),
]


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize(
    ("reader", "text", "parts"), CASES, ids=[str(x) for x in range(len(CASES))]
)
def test_an_answer_has_its_parts_however_it_comes(reader, text, parts, size):
    reads, found = reader(), []
    for start in range(0, len(text), size):
        found += reads.feed(text[start : start + size])
    found += reads.finish()
    if isinstance(parts[0], str):
        parts = [reasoning(parts[0]), *map(content, parts[1:])]
    assert joined(found) == parts


def test_content_is_not_held_back_until_the_end():
    reader = TaggedReader(THINK, syntax=HERMES)
    assert reader.feed("I think <") == [content("I think")]
    assert reader.feed("3") == [content(" <3")]
    assert reader.feed("<think>a b") == [reasoning("a b")]


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ('<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>', HERMES),
        ("[TOOL_CALLS]", MISTRAL),
        ('ipython {"name": x, "parameters": y} tools', LLAMA),
        ("<|channel|> functions", HARMONY_CALLS),
        ('{% if tools %}{"name": x, "arguments": y}{% endif %}', PLAIN),
        ("{{ message.content }}", None),
        ("tools <tool_call><function=f>", QWEN_CODER),
        ("tools <tool_call>f<arg_key>", GLM),
        ("tools <|tool_call>call:f{}", GEMMA),
        ("tools <|tool_call_start|>[", LFM),
        ('tools "parameters" <function_call>', None),
    ],
)
def test_the_template_tells_the_syntax(template, syntax):
    assert syntax_of(template) is syntax
