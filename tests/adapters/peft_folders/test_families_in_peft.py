"""PEFT loads our adapters of every family, and computes the logits that we do.

So does transformers with the adapters merged into the weights.
"""

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    random_adapter,
    restored,
)
from tests.support.exhaustive import sample

FOLDER = Path(
    os.environ.get("FAMILY_FIXTURES", Path(__file__).parents[2] / "fixtures/families")
)
# Fused projections, a norm of the keys that IA3 scales before it, grouped queries,
# experts, kinds of attention, encoder-decoders with learned positions and with two
# widths: adapters of other families are at the same layers as those of one of these.
FAMILIES = [
    *("phi3", "bart", "bloom", "falcon_new", "gemma2", "gemma4", "gpt_oss", "t5gemma"),
]
KINDS = {
    "prompt_tuning": "PROMPT_TUNING",
    "prefix_tuning": "PREFIX_TUNING",
    "lora": "LORA",
    "ia3": "IA3",
}
MERGED = ("LORA", "IA3")
# PEFT reads our prefixes, and makes its own with different keys for each query head.
GROUPED = ("falcon_new",)
INPUTS = ("input_ids", "attention_mask", "labels")


@functools.cache
def tokens_of(family):
    given = np.load(FOLDER / family / "ref.npz")
    return {name: given[name] for name in INPUTS if name in given}


def test_prompts_behind_which_peft_scales_no_tokens_are_refused():
    config = read_config(FOLDER / "pegasus/base")
    folder = FOLDER / "marian/prompt_tuning"
    with pytest.raises(InputError, match="does not scale the tokens"):
        from_peft(read_folder(folder), config, str(folder))


@pytest.mark.torch
@pytest.mark.parametrize("family", sample(1, FAMILIES))
def test_our_adapters_change_pefts_model_as_ours(family, tmp_path):
    base = FOLDER / family / "base"
    config, tokens = read_config(base), tokens_of(family)
    np.savez(tmp_path / "tokens.npz", **tokens)
    adapters, jobs = {}, {}
    for folder, kind in KINDS.items():
        if not (FOLDER / family / folder).is_dir() and family not in GROUPED:
            continue  # PEFT has no such adapter of this family
        adapter = adapters[kind] = random_adapter(config, kind)
        write_folder(tmp_path / kind, to_peft(adapter, config, base_model=str(base)))
        jobs[kind] = {
            "base": base,
            "adapter": tmp_path / kind,
            "tokens": tmp_path / "tokens.npz",
        }
        if kind in MERGED:
            folder = tmp_path / f"merged {kind}"
            write_merged(folder, base, [adapter])
            jobs[f"merged {kind}"] = {"base": folder, "tokens": tmp_path / "tokens.npz"}
    theirs = peft_logits(jobs)
    without = np.load(FOLDER / family / "ref.npz")["base.logits"]
    batch = batch_of(tokens)
    for kind, adapter in adapters.items():
        graph, parameters = restored(base, adapter)
        ours = our_logits(parameters, batch, graph=graph)
        for job in {kind, f"merged {kind}"} & theirs.keys():
            assert_same_logits(ours, theirs[job], tokens)
        assert np.abs(theirs[kind][:, -without.shape[1] :] - without).max() > 0.01
