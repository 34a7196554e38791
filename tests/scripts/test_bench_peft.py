"""Both sides of the benchmark compute the same step on small models.

Requires torch, transformers and PEFT.
"""

import dataclasses
import sys

import pytest

from scripts.bench import steps
from scripts.bench.cases import CASES, GPT2_CONFIG, T5_CONFIG, TINY_CONFIG, TINY_HYBRIDS
from scripts.bench.steps import (
    SIDES,
    Settings,
    by_case,
    check_agreement,
    start_worker,
    write_inputs,
)
from scripts.bench.workers import take_turns

pytestmark = pytest.mark.torch
SMALL_GPT2 = GPT2_CONFIG | {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4}
SMALL_T5 = T5_CONFIG | {
    **{"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 128},
    **{"num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
}
PROMPTED = {
    "llama": dataclasses.replace(CASES["tiny"], prompt=5, config=TINY_CONFIG),
    "gpt2": dataclasses.replace(CASES["gpt2"], prompt=5, config=SMALL_GPT2),
    "t5": dataclasses.replace(CASES["t5"], prompt=5, config=SMALL_T5),
    **{
        name: dataclasses.replace(case, prompt=5, length=20)
        for name, case in TINY_HYBRIDS.items()
    },
}
BARE = {
    name: dataclasses.replace(PROMPTED[name], prompt=0, loss_on=loss_on)
    for name, loss_on in (("llama", None), ("gpt2", 4))
}
NAMES = [*PROMPTED, *map("{}_0".format, BARE)]


@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
@pytest.mark.parametrize("case", [*PROMPTED.values(), *BARE.values()], ids=NAMES)
def test_three_steps_have_the_same_losses_on_both_sides(case, tmp_path, monkeypatch):
    from scripts.bench.ours import OurStep
    from scripts.bench.peft_step import PeftStep, make_model

    def write(action, folder, python):
        assert action == "make"
        make_model(folder)

    # The packages of both sides are imported once for all cases.
    monkeypatch.setattr(steps, "_write_with_peft", write)
    write_inputs({"case": case}, tmp_path, sys.executable)
    ours, peft = OurStep(tmp_path / "case"), PeftStep(tmp_path / "case")
    losses = {
        side: [step()["loss"] for _ in range(3)]
        for side, step in zip(SIDES, (ours, peft), strict=True)
    }
    check_agreement("case", losses)
    assert losses["ours"][2] < losses["ours"][0]


def test_processes_of_both_sides_take_turns_with_the_same_losses(tmp_path):
    write_inputs({"case": PROMPTED["llama"]}, tmp_path, sys.executable)
    settings = Settings(peft_python=sys.executable, devices=2)
    ours, peft = (start_worker("case", side, tmp_path, settings) for side in SIDES)
    with ours, peft:
        workers = {
            ("case", side): w for side, w in zip(SIDES, (ours, peft), strict=True)
        }
        losses = by_case(take_turns(workers, 3), "loss")["case"]
    check_agreement("case", losses)
    assert losses["ours"][2] < losses["ours"][0]
