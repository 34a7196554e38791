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


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|aa){9,}b",
        "(?:.*.*)*x",
        "a*" * 5,
        "(a|a)" * 99,
        "(a*)\\1(a*)\\2" * 3,
    ],
)
def test_expressions_that_take_exponential_time_are_refused(pattern):
    start = time.process_time()
    with pytest.raises(InputError, match=r"^targets has '.*more than 1,000,000 steps"):
        compile_pattern(pattern, "targets").fullmatch("a" * 60)
    with pytest.raises(InputError, match=r"^the assignment map has '"):
        _check_patterns(((pattern, None),), ["a" * 60])
    with pytest.raises(InputError, match=r"^regexes has '"):
        match_any([pattern])("a" * 60)
    assert time.process_time() - start < 1


def test_what_is_no_expression_is_refused():
    for pattern in (".{9999999999999}", "(a", "(" * 500 + ")" * 500):
        with pytest.raises(InputError, match=r"^targets has '"):
            compile_pattern(pattern, "targets").fullmatch("a")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (UNSLOTH, "model.layers.11.self_attn.q_proj", True),
        (UNSLOTH, "model.visual.blocks.3.attn.q_proj", True),
        (UNSLOTH, "model.layers.11.self_attn.rotary", False),
        (
            ".*/layers/.*attention/.*query/.*/lora.*/a",
            "d/layers/0/attention/query",
            False,
        ),
        ("(a|b)(a|b)(a|b)(c|d)(?i:E|F)([gh])+(?<=h)(?!x)", "abacehgh", True),
        ("(a+)+b", "a" * 8 + "b", True),
        (".*" * 5, "decoder/layers/query/kernel", True),
    ],
)
def test_ordinary_expressions_match_as_in_python(pattern, name, matches):
    assert bool(re.fullmatch(pattern, name)) is matches
    assert bool(compile_pattern(pattern, "targets").fullmatch(name)) is matches


def test_a_pattern_is_inserted_into_another():
    pattern = compile_pattern("q|v{2}", "name", r"(.*\.)?({})")
    matched = [name for name in ("q", "a.vv", "v", "q.k") if pattern.fullmatch(name)]
    assert matched == ["q", "a.vv"]
