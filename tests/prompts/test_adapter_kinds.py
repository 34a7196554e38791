"""Kinds of adapters, listed through their factories."""

import itertools

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.adapter import PEFT_KINDS, TOKENS
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import split
from prompt_tuning.prompts.adapter_kinds import (
    adapter_specs,
    check_kinds,
    find_kind,
    find_prompt_class,
    prompt_classes,
    prompt_shapes,
)
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.stack_shape import StackShape, StateShape

STATES = StateShape(layers=2, others=0, window=(1, 2), memory=None)
VOCABULARY = Vocabulary(np.ones((7, 4), np.float32), stack=StackShape(3, 2, 5, STATES))
SIZES = {"P": 6, "L": 3, "D": 4, "K": 5}


def axis_size(axis: str) -> int:
    """Returns the number in an axis's name, or a small size."""
    return int(axis) if axis.isdigit() else SIZES.get(axis, 2)


def arrays_of(kind: str) -> dict[str, np.ndarray]:
    """Returns arrays of a kind's axes by path."""
    form = prompt_classes()[kind].form
    assert form is not None
    return {
        f"decoder/prompt/{leaf}": np.ones([*map(axis_size, axes.split())], "f4")
        for leaf, axes in form.axes.items()
    }


@pytest.mark.parametrize("kind", prompt_classes())
def test_a_kind_is_identified_by_its_arrays_and_rebuilt_with_their_shapes(kind):
    arrays = arrays_of(kind)
    assert find_kind(arrays, "here") == kind
    (shapes,) = prompt_shapes(arrays).values()
    prompt_class = find_prompt_class(shapes)
    assert prompt_class is prompt_classes()[kind]
    prompt = prompt_class.factory_for(shapes)(jax.random.key(0), VOCABULARY)
    assert {leaf: x.shape for leaf, x in split(prompt)[1].items()} == shapes
    assert prompt.length == SIZES["P"]
    # Some prompts are folded into another kind.
    assert prompt.export().kind in prompt_classes()


def test_kinds_differ_in_leaves_or_number_of_axes():
    for one, other in itertools.permutations(prompt_classes(), 2):
        (shapes,) = prompt_shapes(arrays_of(one)).values()
        form = prompt_classes()[other].form
        assert form is not None and not form.matches(shapes)


def test_every_kind_of_peft_has_a_class():
    known = {*prompt_classes(), *adapter_specs(), TOKENS}
    assert known >= set(PEFT_KINDS)


def test_an_incomplete_or_unknown_prompt_has_no_kind():
    arrays = arrays_of("MULTITASK_PROMPT_TUNING")
    del arrays["decoder/prompt/rows"]
    with pytest.raises(InputError, match=r"here contains .*shared.*not one adapter"):
        find_kind(arrays, "here")
    with pytest.raises(InputError, match="'LORAS' is not a kind of adapter"):
        check_kinds(["LORA", "LORAS"])
