"""Regular expressions that anybody may have written."""

import re
import time

import pytest

from prompt_tuning.checkpoints.restore_plan import _check_patterns
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.patterns import compile_pattern

UNSLOTH = (
    "(?:.*?(?:vision|image|visual).*?(?:self_attn|attention|attn|mlp|ffn).*?"
    "(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2).*?)|(?:\\bmodel\\.layers\\.[\\d]{1,}"
    "\\.(?:self_attn|mlp)\\.(?:(?:gate_proj|q_proj|k_proj|v_proj|o_proj)))"
)
"""A pattern that Unsloth writes to `adapter_config.json`, with fewer names."""
SWIFT = "^(model)(?!.*(lm_head|output|emb|wte|shared)).*"
LLAMA_FACTORY = "^(?!.*(?:visual|patch_embed)).*(?:q_proj|k_proj|gate_proj).*"
"""Patterns that ms-swift and LLaMA-Factory write there."""


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|aa){9,}b",
        "(?:.*.*)*x",
        "a*" * 5 + "b",
        "(a|a)" * 99,
        "(?!(a+)+b)(a+)+c",
    ],
)
def test_no_expression_takes_exponential_time(pattern):
    start = time.process_time()
    assert not compile_pattern(pattern, "targets").matches("a" * 60)
    assert not match_any([pattern])("a" * 60)
    with pytest.raises(InputError, match="matches no complete path"):
        _check_patterns(((pattern, None),), ["a" * 60])
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "pattern",
    [
        "(a",
        "(" * 1999,
        "a{1001}",
        "\ud800",
        r"(a)\1",
        "a++b",
        "(?<!a)b",
        "(a(?!b))c",
        "(?!a)b|c",
        "(?=.*a).*(?=b).*",
    ],
)
def test_what_re2_does_not_match_is_refused(pattern):
    with pytest.raises(
        InputError, match=r"^targets has '.*lookaheads may stand in one"
    ):
        compile_pattern(pattern, "targets")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (UNSLOTH, "model.layers.11.self_attn.q_proj", True),
        (UNSLOTH, "model.visual.blocks.3.attn.q_proj", True),
        (UNSLOTH, "model.layers.11.self_attn.rotary", False),
        (SWIFT, "model.layers.11.self_attn.q_proj", True),
        (SWIFT, "model.embed_tokens", False),
        (SWIFT, "lm_head", False),
        (LLAMA_FACTORY, "model.layers.0.self_attn.q_proj", True),
        (LLAMA_FACTORY, "model.visual.blocks.3.attn.q_proj", False),
        (LLAMA_FACTORY, "model.layers.0.self_attn.o_proj", False),
        ("(?i)^(?!.*VISUAL).*(?:Q_proj|k_proj)", "model.visual.q_proj", False),
        ("(?i)^(?!.*VISUAL).*(?:Q_proj|k_proj)", "MODEL.q_proj", True),
        (r"a\b(?=\.)(?!\.v)[^)(|]+", "a.w.v", True),
        (r"a\b(?=\.)(?!\.v)[^)(|]+", "a.v.w", False),
        (r"[(]?\(?(?!\))a\)?", "(a)", True),
        ("x.*(?=z$)z", "xzz", True),
        (
            ".*/layers/.*attention/.*query/.*/lora.*/a",
            "d/layers/0/attention/query",
            False,
        ),
        ("(a|b)(a|b)(a|b)(c|d)(?i:E|F)([gh])+(?!x)", "abacehgh", True),
        ("(a+)+b", "a" * 8 + "b", True),
        (".*" * 5, "decoder/layers/query/kernel", True),
    ],
)
def test_ordinary_expressions_match_as_in_python(pattern, name, matches):
    assert bool(re.fullmatch(pattern, name)) is matches
    assert compile_pattern(pattern, "targets").matches(name) is matches


def test_a_pattern_is_inserted_into_another():
    pattern = compile_pattern("q|v{2}", "name", r"(.*\.)?({})")
    matched = [name for name in ("q", "a.vv", "v", "q.k") if pattern.matches(name)]
    assert matched == ["q", "a.vv"]


@pytest.mark.parametrize("template", [r"\2/\1", r"\g<2>\\\g<first>é", r"\g<0>", "é"])
def test_groups_fill_a_template_as_in_python(template):
    pattern, name = r"(?P<first>\w+)/(ü.*)(x)?", "layers/ü/0"
    match = re.fullmatch(pattern, name)
    assert match is not None
    filled = compile_pattern(pattern, "map").fill(name, template)
    assert filled == match.expand(template)


@pytest.mark.parametrize("template", [r"\4", r"\g<second>", "\\"])
def test_a_template_with_other_groups_is_refused(template):
    with pytest.raises((IndexError, ValueError)):
        compile_pattern("(a)", "map").fill("a", template)
    with pytest.raises(ValueError, match="groups beside lookaheads"):
        compile_pattern("(a)(?!b)", "map").fill("a", template)
