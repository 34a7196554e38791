"""`prompt-tuning convert --merge` writes folders of every family for transformers."""

import os
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from tests.support.adapters import assert_same_logits, peft_logits

FOLDER = Path(
    os.environ.get("FAMILY_FIXTURES", Path(__file__).parents[1] / "fixtures/families")
)
CASES = sorted(
    (path.name, kind)
    for path in FOLDER.iterdir()
    for kind in ("lora", "ia3")
    if (path / kind).is_dir()
)
INPUTS = ("input_ids", "attention_mask", "labels")


@pytest.mark.exhaustive
@pytest.mark.torch
def test_transformers_computes_with_merged_weights_what_peft_computes(tmp_path):
    jobs = {}
    for family, kind in CASES:
        given = np.load(FOLDER / family / "ref.npz")
        tokens, target = tmp_path / f"{family}.npz", tmp_path / f"{family} {kind}"
        np.savez(tokens, **{name: given[name] for name in INPUTS if name in given})
        base, adapter = str(FOLDER / family / "base"), str(FOLDER / family / kind)
        command = ["convert", adapter, str(target), "--merge", "--base_model", base]
        assert main(command) == 0
        jobs[f"{family} {kind}"] = {"base": target, "tokens": tokens}
    theirs = peft_logits(jobs)
    for family, kind in CASES:
        given = dict(np.load(FOLDER / family / "ref.npz"))
        expected = given[f"{kind}.logits"]
        actual = theirs[f"{family} {kind}"][:, : expected.shape[1]]
        assert_same_logits(actual, expected, given)
        assert np.abs(expected - given["base.logits"]).max() > 0.01
