"""Regular expressions that anybody may have written."""

import time

import pytest

from prompt_tuning.checkpoints.restore_plan import _check_patterns
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.patterns import compile_pattern


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|aa){9,}b", "(?:.*.*)*x", "a*" * 5, ".{9999999999999}"]
)
def test_expressions_that_take_exponential_time_are_refused(pattern):
    start = time.process_time()
    with pytest.raises(InputError, match=r"^targets has '"):
        compile_pattern(pattern, "targets")
    with pytest.raises(InputError, match=r"^the assignment map has '"):
        _check_patterns(((pattern, None),), ["a" * 60])
    with pytest.raises(InputError, match=r"^regexes has '"):
        match_any([pattern])
    assert time.process_time() - start < 1


def test_a_pattern_is_inserted_into_another():
    pattern = compile_pattern("q|v{2}", "name", r"(.*\.)?({})$")
    matched = [name for name in ("q", "a.vv", "v", "q.k") if pattern.match(name)]
    assert matched == ["q", "a.vv"]
