"""Compares rules for token types with types assigned by hand."""

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.tools.type_rules import (
    AllCompletion,
    EndTokens,
    GivenTypes,
    PromptLengths,
    TypeRule,
    UntilSeparator,
)

# In all rows, 2 ends an example, 5 ends a prompt, and 0 is padding.
ENDS = EndTokens(end_id=2, padding_id=0)


def types(rule: TypeRule, *rows: list[int], start: int = 0) -> list[list[int]]:
    return rule(np.array(rows, np.int32), start).tolist()


def test_the_documents_example_up_to_its_separator_token():
    # GAA GGC GCC ATG ATC GAC SEP, of which the first three tokens are the prompt, with
    # padding 69 as in its second example.
    ids = [9, 5, 6, 10, 7, 8, 2, 69, 69, 69, 69]
    expected = [0, 0, 0, 1, 1, 1, 3, 2, 2, 2, 2]
    ends = EndTokens(end_id=2, padding_id=69)
    assert types(UntilSeparator((6,), "last", ends), ids) == [expected]
    assert types(PromptLengths(3, ends), ids) == [expected]


def test_the_first_and_the_last_separator_of_each_example():
    rows = [7, 5, 7, 5, 7, 2, 5, 7, 2], [5, 5, 7, 7, 2, 0, 0, 0, 0]
    assert types(UntilSeparator((5,), "last", ENDS), *rows) == [
        [0, 0, 0, 0, 1, 3, 0, 1, 3],
        [0, 0, 1, 1, 3, 2, 2, 2, 2],
    ]
    assert types(UntilSeparator((5,), "first", ENDS), *rows) == [
        [0, 0, 1, 1, 1, 3, 0, 1, 3],
        [0, 1, 1, 1, 3, 2, 2, 2, 2],
    ]


def test_any_of_several_separators_counts():
    rule = UntilSeparator((5, 6), "last", ENDS)
    assert types(rule, [7, 6, 7, 2, 7, 5, 7]) == [[0, 0, 1, 3, 0, 0, 1]]


def test_an_example_truncated_by_the_rows_end_is_an_example():
    assert types(UntilSeparator((5,), "last"), [7, 5, 7, 7]) == [[0, 0, 1, 1]]


def test_an_example_without_a_separator_is_refused_or_learned():
    row = [7, 5, 7, 2, 7, 7, 2]
    with pytest.raises(InputError, match="row 12: the example at token 4 has no sepa"):
        types(UntilSeparator((5,), "last", ENDS), row, start=12)
    learned = UntilSeparator((5,), "last", ENDS, learn_others=True)
    assert types(learned, row) == [[0, 0, 1, 3, 1, 1, 3]]


def test_the_first_trailing_token_ends_a_row_if_padding_equals_eos():
    ends = EndTokens(end_id=2, padding_id=2)
    rows = [7, 2, 7, 2, 2, 2], [7, 7, 7, 7, 7, 2], [7, 7, 7, 7, 7, 7], [2] * 6
    assert types(AllCompletion(ends), *rows) == [
        [1, 3, 1, 3, 2, 2],
        [1, 1, 1, 1, 1, 3],
        [1] * 6,
        [2] * 6,
    ]


def test_an_end_token_at_the_start_of_a_row_is_its_bos():
    """GPT-2's `<|endoftext|>` is both, and may be the padding as well."""
    row = [2, 7, 5, 8, 2, 2, 2]
    for padding, last in ((2, [2, 2]), (None, [3, 3])):
        ends = EndTokens(end_id=2, padding_id=padding)
        assert types(AllCompletion(ends), row) == [[1, 1, 1, 1, 3, *last]]
        assert types(PromptLengths(3, ends), row) == [[0, 0, 0, 1, 3, *last]]
    ends = EndTokens(end_id=2, padding_id=2)
    assert types(UntilSeparator((5,), "last", ends), row) == [[0, 0, 0, 1, 3, 2, 2]]
    learned = UntilSeparator((5,), "last", ends, learn_others=True)
    assert types(learned, [2, 7, 8, 2, 2]) == [[1, 1, 1, 3, 2]]


def test_padding_stands_at_either_end_of_a_row_or_after_an_end():
    """Elsewhere its id is part of the text, as `<unk>` of Llama 2 is."""
    assert types(AllCompletion(EndTokens(padding_id=0)), [0, 7, 0, 7, 0, 0]) == [
        [2, 1, 1, 1, 2, 2]
    ]
    rule = UntilSeparator((5,), "last", ENDS)
    assert types(rule, [0, 0, 0, 7, 8, 5, 9, 2]) == [[2, 2, 2, 0, 0, 0, 1, 3]]
    assert types(rule, [0, 7, 5, 0, 9, 2, 0, 0, 7, 5, 2, 0]) == [
        [2, 0, 0, 1, 1, 3, 2, 2, 0, 0, 3, 2]
    ]
    # The end token after padding is BOS, as it is at the start of a row.
    assert types(rule, [0, 0, 2, 7, 5, 2, 0]) == [[2, 2, 0, 0, 0, 3, 2]]
    assert types(PromptLengths(2, ENDS), [0, 0, 7, 7, 8, 2]) == [[2, 2, 0, 0, 1, 3]]


def test_padding_before_a_row_that_may_begin_with_bos_is_refused():
    rule = AllCompletion(EndTokens(end_id=2, padding_id=2))
    with pytest.raises(InputError, match=r"row 4 begins with 2 tokens 2, .* --array"):
        types(rule, [2, 7, 2, 2], [2, 2, 7, 2], start=3)


def test_each_row_has_its_own_prompt_length():
    rule = PromptLengths(np.array([9, 0, 2, 3]), ENDS)
    assert rule.rows == 4
    assert types(rule, [7, 7, 2, 0], [7, 7, 7, 2], start=1) == [
        [1, 1, 3, 2],
        [0, 0, 1, 3],
    ]
    with pytest.raises(InputError, match="row 0: its prompt length is 9 tokens"):
        types(rule, [7, 7, 7, 2])


def test_given_types_are_checked():
    rule = GivenTypes(np.array([[0, 1, 3], [0, 4, 2]]))
    assert types(rule, [7, 7, 2]) == [[0, 1, 3]]
    with pytest.raises(InputError, match="row 1, token 1: the array has type 4"):
        types(rule, [7, 7, 2], start=1)
    with pytest.raises(InputError, match="types for 3 tokens, expected 4"):
        types(rule, [7, 7, 2, 0])


def test_a_separator_is_neither_the_end_nor_the_padding():
    with pytest.raises(InputError, match="token 2 is the end token and a separator"):
        UntilSeparator((2,), "last", ENDS)
    with pytest.raises(InputError, match="there is no separator"):
        UntilSeparator((), "last")
