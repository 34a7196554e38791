"""What a run that starts from a PEFT adapter trains, compared with PEFT."""

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.training.transfer import (
    TransferSource,
    plan_transfer,
    read_source,
)
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"


def plan(case, kind):
    """Plans a run that trains on from one of PEFT's adapters."""
    source = read_source(PEFT / case / kind, read_config(PEFT / case / "base"))
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, np.float32)
        for path, leaf in source.leaves.items()
    }
    return plan_transfer(source, shapes, {}, {}, None)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        # PEFT adapts c_attn of both layers, whose output is query, key and value.
        (
            "gpt2_tied",
            "lora",
            r"one lora_A for transformer\.h\.0\..* \(and 1 ",
        ),
        # Its caches read the stored layers 0, 2, ... and begin again after the last.
        ("t5_orig_tied_relu", "prefix_tuning", "one key and value for layers 0 and 1 "),
    ],
)
def test_parameters_that_peft_trains_as_one_are_named(case, kind, message):
    with pytest.warns(UserWarning, match=message):
        plan(case, kind)


@pytest.mark.parametrize("kind", ["lora", "prefix_tuning", "prompt_tuning"])
def test_separate_parameters_need_no_warning(kind):
    plan("llama_gqa_untied", kind)


@pytest.mark.parametrize("has", [False, True])
def test_dora_does_not_start_from_lora_nor_lora_from_dora(has):
    names = ("a", "b", "magnitude")
    leaves = {f"query/adapters/lora/{x}": np.ones((1, 1, 1), "f4") for x in names}
    lora = {path: x for path, x in leaves.items() if not path.endswith("magnitude")}
    source = TransferSource(origin="runs/first", leaves=leaves if has else lora)
    trained = lora if has else leaves
    message = f"trains {'LoRA' if has else 'DoRA'}, .* LoRA.dora = {has}"
    with pytest.raises(InputError, match=message):
        plan_transfer(source, trained, {}, {}, None)
    plan_transfer(source, source.leaves, {}, {}, None)
