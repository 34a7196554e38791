"""Every family computes what transformers and PEFT compute.

`scripts/make_fixtures.py` makes the folders; FAMILY_FIXTURES names another one.
"""

import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.generation.engine import continue_rows
from tests.support.adapters import assert_same_logits, batch_of, our_logits, restored

FOLDER = Path(
    os.environ.get("FAMILY_FIXTURES", Path(__file__).parents[1] / "fixtures/families")
)
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
KINDS = ("base", "prompt_tuning", "prefix_tuning", "lora", "ia3")
CASES = [
    (family, kind)
    for family in FAMILIES
    for kind in KINDS
    if (FOLDER / family / kind).is_dir()
]


@functools.cache
def reference(family):
    return dict(np.load(FOLDER / family / "ref.npz"))


def adapted(family, kind):
    """Returns the config, and the model with an adapter."""
    base = FOLDER / family / "base"
    config, adapter = read_config(base), None
    if kind != "base":
        folder = FOLDER / family / kind
        adapter = from_peft(read_folder(folder), config, str(folder))
    return config, *restored(base, adapter)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family, kind):
    config, graph, parameters = adapted(family, kind)
    given = reference(family)
    batch = batch_of(given)
    ours = our_logits(parameters, batch, graph=graph)
    assert_same_logits(ours, given[f"{kind}.logits"], given)
    expected = given[f"{kind}.greedy_single"]
    generated = continue_rows(
        parameters,
        batch.tokens,
        batch.lengths,
        jax.random.split(jax.random.key(0), len(batch.lengths)),
        None,
        graph=graph,
        new_tokens=expected.shape[1],
        stop_ids=(config.eos_id, *config.stop_ids),
        pad_id=config.pad_id,
    )
    np.testing.assert_array_equal(generated, expected)
