"""Messages about completions that are none of the labels."""

import pytest

from prompt_tuning.evaluation.ranking import space_hint


@pytest.mark.parametrize(
    ("text", "labels", "hint"),
    [
        (" desc", ["desc", "num"], "--labels ' desc' ' num'"),
        ("desc", [" desc", " num"], "--labels desc num"),
        ("loc", ["desc", "num"], ""),
    ],
)
def test_labels_that_differ_in_their_space_are_named(text, labels, hint):
    assert hint in space_hint(text, labels)
    assert bool(space_hint(text, labels)) == bool(hint)
