"""LoRA that starts from activations has PEFT's components, and trains and exports."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.activation_probes import (
    Components,
    add_vectors,
    distribute_ranks,
)
from prompt_tuning.prompts.low_rank import LowRank
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.activation_starts import read_components
from tests.support.shared_data import FIXTURES

# torch is only in the `bench` extra.
# pyright: reportMissingImports=false

PEFT = FIXTURES / "peft"
ROWS = [{"prompt": f"upper: {x}=", "completion": x.upper()} for x in ("ab", "cd", "e")]
NAMES = ["q_proj", "v_proj", "up_proj"]


def random_vectors(count, width=6):
    random = np.random.default_rng(count)
    return random.standard_normal((count, width)).astype("f4") * np.arange(1, width + 1)


def read_all(parts, count):
    width = parts[0].shape[1]
    zeros = jnp.zeros((count, width)), jnp.zeros(width), jnp.zeros(()), jnp.zeros(())
    known = Components(*zeros)
    for part in parts:
        padded = np.concatenate([part, np.full((3, width), 9, "f4")])
        used = jnp.arange(len(padded)) < len(part)
        known = jax.jit(add_vectors)(known, jnp.asarray(padded, jnp.float32), used)
    return known


def test_batches_add_up_to_the_components_of_all_vectors():
    parts = [random_vectors(count) for count in (9, 4, 12)]
    known = read_all(parts, 6)
    whole = np.concatenate(parts)
    _, values, vectors = np.linalg.svd(whole - whole.mean(0))
    np.testing.assert_allclose(known.lengths, values, rtol=1e-4)
    np.testing.assert_allclose(
        np.abs((known.directions * vectors).sum(1)), np.ones(6), atol=1e-4
    )
    np.testing.assert_allclose(known.shares.sum(), 1, rtol=1e-4)
    np.testing.assert_allclose(known.mean, whole.mean(0), atol=1e-5)


@pytest.mark.torch
def test_batches_add_up_as_in_pefts_incremental_components():
    import torch
    from peft.utils.incremental_pca import IncrementalPCA

    theirs = IncrementalPCA(n_components=3, lowrank=True, lowrank_seed=42)
    parts = [random_vectors(count) for count in (9, 7, 12)]
    for part in parts:
        theirs.partial_fit(torch.tensor(part.astype("f4")))
    known = read_all(parts, 3)
    np.testing.assert_allclose(known.directions, theirs.components_, atol=1e-4)
    np.testing.assert_allclose(known.shares, theirs.explained_variance_ratio_, 1e-4)


def test_ranks_go_to_the_largest_shares_of_variance():
    loras = {
        "a": mock.Mock(spec=LowRank, ranks=(2, 2), most_ranks=(4, 4)),
        "b": mock.Mock(spec=LowRank, ranks=(1, 0), most_ranks=(2, 0)),
    }
    shares = {
        "a": np.array([[0.5, 0.2, 0.1, 0.05], [0.3, 0.02, 0.01, 0.005]]),
        "b": np.array([[0.9, 0.15, 0, 0], [0.9, 0.9, 0.9, 0.9]]),
    }
    assert distribute_ranks(shares, loras) == {"a": [2, 1], "b": [2, 0]}


def language_batch(tokens, lengths):
    """A batch that learns every token but the first of each row."""
    count, length = tokens.shape
    positions = np.tile(np.arange(length), (count, 1))
    weights = (positions > 0) & (positions < lengths[:, None])
    return Batch(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        targets=jnp.asarray(tokens),
        loss_positions=jnp.asarray(positions),
        loss_weights=jnp.asarray(weights, jnp.float32),
        prefix_lengths=jnp.zeros(count, jnp.int32),
    )


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "model, names, rho",
    [("llama_gqa_untied", NAMES, 2.0), ("gpt2_tied", ["c_attn", "c_fc"], 1.0)],
)
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
def test_components_are_pefts(model, names, rho, monkeypatch):
    import peft
    import torch
    import transformers
    from peft.tuners.lora import eva

    hooks = {}

    class Recorded(eva.SVDHook):
        def __init__(self, **settings):
            super().__init__(**settings)
            hooks[self.name] = self

    monkeypatch.setattr(eva, "SVDHook", Recorded)
    base, random = PEFT / model / "base", np.random.default_rng(0)
    lengths = np.array([12, 9, 11, 12, 8, 12], np.int32)
    tokens = random.integers(3, 40, (len(lengths), 12)).astype(np.int32)
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    width = network.config.hidden_size
    rank = int(width / 2 / rho)  # PEFT's iteration is exact then
    config = peft.LoraConfig(
        r=rank,
        target_modules=names,
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=rho),
        fan_in_fan_out=model.startswith("gpt2"),
    )
    network = peft.get_peft_model(network, config, low_cpu_mem_usage=True).eval()
    real = np.arange(12) < lengths[:, None]
    inputs = {
        "input_ids": torch.tensor(tokens.astype("i8")),
        "attention_mask": torch.tensor(real.astype("i8")),
    }
    peft.initialize_lora_eva_weights(network, [inputs], show_progress_bar=False)

    tuning = Tuning(adapters=[LoRA(at=names, rank=rank, initial="eva", eva_rho=rho)])
    opened = open_pretrained(
        Pretrained(checkpoint=str(base)), tuning, key=jax.random.key(0)
    )
    batch = language_batch(tokens, lengths)
    components, ranks = read_components(
        tuning, opened, opened.read_parameters(), lambda index: batch
    )
    weights = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight"): x
        for name, x in network.state_dict().items()
        if "lora_A" in name
    }
    modules = {"query": names[0], "value": names[0], "up": names[-1]}
    modules |= {"value": "v_proj"} if "v_proj" in names else {"key": names[0]}
    compared = 0
    for path, own in components.items():
        module = modules[path.rpartition("/")[2]]
        for layer in range(len(own.scaled)):
            (name,) = [x for x in weights if f".{layer}." in x and x.endswith(module)]
            theirs = weights[name].detach().numpy()
            # Inputs that several modules share give equal shares, in any order.
            assert abs(ranks[path][layer] - len(theirs)) <= 1
            count = min(ranks[path][layer], len(theirs))
            a = np.asarray(own.directions[layer, :count])
            np.testing.assert_allclose(
                a.T @ a, theirs[:count].T @ theirs[:count], atol=1e-4
            )
            hook = hooks.get(f"base_model.model.{name}")
            if hook is not None:
                shares = hook.svd.explained_variance_ratio_
                np.testing.assert_allclose(own.shares[layer], shares, atol=1e-4)
                compared += 1
    assert compared >= 4
    total = sum(map(sum, ranks.values()))
    assert total == rank * sum(len(x.scaled) for x in components.values())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    spec = pt.LoRA(at=["q_proj", "down_proj"], rank=3, initial="eva")
    return pt.tune(
        "bundled:skills-decoder",
        spec,
        ROWS,
        steps=1,
        batch_size=3,
        directory=str(tmp_path_factory.mktemp("runs") / "run"),
        progress=False,
    )


@pytest.mark.slow
def test_a_run_is_exported_as_a_lora_of_unequal_ranks(tuned, tmp_path):
    trained, _ = tuned.partition()
    used = {p: (x != 0).any(1).sum(-1) for p, x in trained.items() if p.endswith("/a")}
    assert sum(np.asarray(x).sum() for x in used.values()) == 2 * 4 * 3
    tuned.save(tmp_path / "peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["init_lora_weights"] is True
    ranks = {settings["r"], *settings["rank_pattern"].values()}
    assert ranks == {int(x) for own in used.values() for x in own} - {0}
    loaded = pt.load_tuned(tmp_path / "peft", base="bundled:skills-decoder")
    loss = tuned.evaluate(ROWS)["loss"]
    assert loaded.evaluate(ROWS)["loss"] == pytest.approx(loss)


@pytest.mark.slow
@pytest.mark.parametrize("continued", [True, False])
def test_a_run_that_goes_on_reads_no_activations_again(
    continued, tuned, tmp_path, monkeypatch
):
    given = {"directory": tuned.run.directory}
    if not continued:
        given = {"start_from": tuned.run.directory, "learning_rate": 1e-9}
        given["directory"] = str(tmp_path / "next")
    monkeypatch.setattr("prompt_tuning.training.activation_starts.BATCHES", 0)
    resumed = pt.tune(
        "bundled:skills-decoder",
        pt.LoRA(at=["q_proj", "down_proj"], rank=3, initial="eva"),
        ROWS,
        steps=1,
        batch_size=3,
        progress=False,
        **given,
    )
    before, after = tuned.partition()[0], resumed.partition()[0]
    for path, array in before.items():
        np.testing.assert_allclose(after[path], array, atol=1e-8 * (not continued))


def test_a_model_without_data_has_no_activations():
    model = pt.load("bundled:skills-decoder")
    with pytest.raises(InputError, match="starts from the data of a run"):
        model.attach(pt.LoRA(initial="eva"))


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"mesh": pt.MeshShape(data=-1)}, "Run.mesh divides"),
        ({"weights": "streamed"}, "streams the layers"),
    ],
)
def test_activations_are_read_on_one_device(settings, found, tmp_path):
    weights = {"weights": settings.pop("weights")} if "weights" in settings else {}
    model = pt.load("bundled:skills-decoder", **weights)
    with pytest.raises(InputError, match=found):
        pt.tune(
            model,
            pt.LoRA(initial="eva"),
            ROWS,
            steps=1,
            batch_size=8,
            directory=str(tmp_path / "run"),
            progress=False,
            **settings,
        )
