"""LoRA that starts from the frozen weights, from training to a plain LoRA."""

import jax
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.adapter_files import read_adapter
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.weight_starts import START_A, START_B
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained

AT = "decoder/layers/self_attention/query/adapters/lora"
KEY = jax.random.key(0)
ROWS = [{"prompt": "upper: ab=", "completion": "AB"}] * 4


@pytest.mark.slow
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


@pytest.mark.slow
def test_first_factors_on_a_mesh_are_those_of_whole_weights():
    spec = LoRA(at=["q_proj", "o_proj", "down_proj"], rank=3, initial="pissa")
    source = Pretrained(checkpoint="bundled:skills-decoder")
    mesh = MeshShape(data=2, fsdp=2, tensor=2)
    products = []
    for shards in (None, mesh):
        model = open_pretrained(source, Tuning(adapters=[spec]), key=KEY, mesh=shards)
        parameters = model.read_parameters()
        starts = [path for path in parameters if path.endswith(START_A)]
        ends = [(x, x.removesuffix(START_A) + START_B) for x in starts]
        factors = [[np.asarray(parameters[x]) for x in pair] for pair in ends]
        products.append([a @ b for a, b in factors])
    assert len(products[0]) == 3
    for one, other in zip(*products, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


def test_weights_that_are_streamed_have_no_singular_values():
    model = pt.load("bundled:skills-decoder", weights="streamed")
    with pytest.raises(InputError, match=r"LoRA\.initial computes the first factors"):
        model.attach(pt.LoRA(initial="olora"))
