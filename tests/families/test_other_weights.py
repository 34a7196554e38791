"""Families compute what transformers does with other weights than the fixtures'."""

# torch and transformers are only in the `bench` extra.
# pyright: reportMissingImports=false

import numpy as np
import pytest

from tests.families.test_families import FAMILIES, FOLDER
from tests.support.adapters import assert_same_logits, batch_of, our_logits, restored
from tests.support.exhaustive import sample

SEED = 1

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("family", sample(1, FAMILIES))
def test_logits_of_a_second_seed_are_those_of_transformers(family, tmp_path):
    import torch
    import transformers

    from scripts import make_fixtures

    base = FOLDER / family / "base"
    config = transformers.AutoConfig.from_pretrained(base)
    torch.manual_seed(SEED)
    kind = make_fixtures.auto_class(config)
    model = kind.from_config(config, attn_implementation="eager").eval()
    make_fixtures.randomize(model)
    model.save_pretrained(tmp_path / "base")
    given = {
        name: torch.tensor(array)
        for name, array in np.load(FOLDER / family / "ref.npz").items()
        if name in ("input_ids", "attention_mask", "labels")
    }
    theirs = make_fixtures.outputs("base", model, given)["base.logits"]
    tokens = {name: array.numpy() for name, array in given.items()}
    graph, parameters = restored(tmp_path / "base", None)
    ours = our_logits(parameters, batch_of(tokens), graph=graph)
    assert_same_logits(ours, theirs, tokens)
