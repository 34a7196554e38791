"""LoRA that starts from the frozen weights, from training to a plain LoRA."""

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.adapter_files import read_adapter

AT = "decoder/layers/self_attention/query/adapters/lora"
ROWS = [{"prompt": "upper: ab=", "completion": "AB"}] * 4


def test_a_run_keeps_its_start_and_is_exported_as_a_plain_lora(tmp_path):
    spec = pt.LoRA(at=["q_proj"], rank=3, alpha=4, initial="pissa")
    model = pt.load("bundled:skills-decoder")
    start, _ = model.attach(spec).partition()
    tuned = pt.tune(
        model,
        spec,
        ROWS,
        steps=2,
        batch_size=2,
        optimizer=pt.adamw(1e-2, weight_decay=0.5),
        directory=str(tmp_path / "run"),
        progress=False,
    )
    trained, _ = tuned.partition()
    assert np.abs(trained[f"{AT}/a"] - start[f"{AT}/a"]).max() > 1e-3
    for leaf in ("start_a", "start_b"):
        np.testing.assert_array_equal(trained[f"{AT}/{leaf}"], start[f"{AT}/{leaf}"])
    change = (
        trained[f"{AT}/a"] @ trained[f"{AT}/b"] - start[f"{AT}/a"] @ start[f"{AT}/b"]
    )
    tuned.save(tmp_path / "peft")
    checkpoint = next((tmp_path / "run").glob("*checkpoints/checkpoint_2"))
    for source in (tmp_path / "peft", checkpoint):
        plain = read_adapter(source, model.config).parameters
        assert plain.keys() == {f"{AT}/a", f"{AT}/b"}
        assert plain[f"{AT}/a"].shape[2] == 6
        np.testing.assert_allclose(
            plain[f"{AT}/a"] @ plain[f"{AT}/b"], change, atol=1e-6
        )
    loss = tuned.evaluate(ROWS)["loss"]
    for loaded in (
        pt.load_tuned(tmp_path / "run"),
        pt.load_tuned(tmp_path / "peft", base="bundled:skills-decoder"),
    ):
        assert loaded.evaluate(ROWS)["loss"] == pytest.approx(loss)


def test_weights_that_are_streamed_have_no_singular_values():
    model = pt.load("bundled:skills-decoder", weights="streamed")
    with pytest.raises(InputError, match=r"LoRA\.initial computes the first factors"):
        model.attach(pt.LoRA(initial="olora"))
