"""LoRA, DoRA and biases train as in PEFT, with the same options."""

import functools

import jax
import numpy as np
import optax
import pytest

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.checkpoint_path import find_checkpoint
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import read_frozen
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.adapters import batch_of, our_logits, restored, train_by_peft
from tests.support.shared_data import FIXTURES

PEFT, STEPS, RATE = FIXTURES / "peft", 24, 0.01
KEY = jax.random.key(0)
# The same options by PEFT's names and by ours.
CASES = {
    "llama_gqa_untied": (
        {
            "target_modules": "all-linear",
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "use_dora": True,
        },
        LoRA(at="all-linear", rank=4, alpha=6, rank_stabilized=True, dora=True),
    ),
    "gpt2_tied": (
        {
            # PEFT trains one A for the queries, keys and values of c_attn.
            "target_modules": ["c_fc", "c_proj"],
            "fan_in_fan_out": True,
            "use_dora": True,
            "bias": "all",
        },
        LoRA(at=["c_fc", "c_proj"], alpha=8, dora=True, bias="all"),
    ),
    "qwen2_bias_tied": (
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"(k|v)_proj": 2},
            "alpha_pattern": {"1.mlp.down_proj": 3},
            "bias": "lora_only",
        },
        LoRA(
            at=["q_proj", "v_proj", "down_proj"],
            layers=[1],
            alpha=8,
            rank_pattern={"(k|v)_proj": 2},
            alpha_pattern={"1.mlp.down_proj": 3},
            bias="lora_only",
        ),
    ),
    "t5v11_untied_gated": (
        {"target_modules": r".*\.1\..*\.(q|k|wo)", "use_dora": True},
        LoRA(at=r".*\.1\..*\.(q|k|wo)", alpha=8, dora=True),
    ),
}

INVOKED = (
    "llama_tied",
    {"target_modules": "all-linear", "r": 2, "alora_invocation_tokens": [41]},
    LoRA(at="all-linear", rank=2, alpha=8, invocation=[41]),
)
"""An aLoRA, which two of three rows invoke; with its model."""

MOVED = {
    "pissa": (
        "llama_gqa_untied",
        {"target_modules": ["q_proj", "down_proj"], "r": 3},
        LoRA(at=["q_proj", "down_proj"], rank=3, alpha=8, initial="pissa"),
    ),
    "olora": (
        "qwen2_bias_tied",
        {"target_modules": ["k_proj"], "rank_pattern": {"0.self_attn.k_proj": 4}}
        | {"alpha_pattern": {"0.self_attn.k_proj": 4}},
        LoRA(
            at=["k_proj"],
            alpha=8,
            rank_pattern={"0.self_attn.k_proj": 4},
            alpha_pattern={"0.self_attn.k_proj": 4},
            initial="olora",
        ),
    ),
}
"""Those whose first product is taken out of the weights, with their models."""


@functools.cache
def tokens_of(model):
    names = ["input_ids", "attention_mask", *["labels"] * model.startswith("t5")]
    given = np.load(PEFT / model / "ref.npz")
    tokens = {name: given[name] for name in names}
    # Every position counts, also of padding.
    tokens["attention_mask"] = np.ones_like(tokens["attention_mask"])
    shape = tokens[names[-1]].shape if "labels" in names else tokens["input_ids"].shape
    targets = np.random.default_rng(0).integers(3, 20, shape)
    return tokens, targets


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder of each case, as `peft_training` writes it."""
    folder = tmp_path_factory.mktemp("peft")
    jobs = {}
    cases = {model: (model, settings) for model, (settings, _) in CASES.items()}
    cases["alora"] = INVOKED[:2]
    for name, (model, settings, _) in MOVED.items():
        cases[name] = model, settings | {"init_lora_weights": name}
    for name, (model, settings) in cases.items():
        tokens, targets = tokens_of(model)
        np.savez(folder / f"{name}.npz", targets=targets, **tokens)
        task = "SEQ_2_SEQ_LM" if "labels" in tokens else "CAUSAL_LM"
        jobs[name] = {
            "base": str(PEFT / model / "base"),
            "folder": str(folder / name),
            "tokens": str(folder / f"{name}.npz"),
            "steps": STEPS,
            "learning_rate": RATE,
            "task_type": task,
            **settings,
        }
    train_by_peft(jobs)
    return {name: folder / name for name in cases}


def read(folder, model):
    source = Pretrained(checkpoint=str(PEFT / model / "base"))
    frozen = functools.partial(read_frozen, source)
    config = read_config(PEFT / model / "base")
    return from_peft(read_folder(folder), config, model, frozen)


def curve(model, graph, parameters, paths):
    """Trains parameters on the case's batch; returns losses and last logits."""
    tokens, targets = tokens_of(model)
    batch = batch_of(tokens)
    trained = {path: parameters[path] for path in paths}

    def loss(trained):
        logits = our_logits(parameters | trained, batch, graph=graph)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    # Adam's bias correction is less exact in optax than in torch.
    optimizer = optax.sgd(RATE, momentum=0.9)

    @jax.jit
    def step(trained, state):
        value, gradient = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trained, updates), state, value

    state, losses = optimizer.init(trained), []
    for _ in range(STEPS):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    return losses, trained, our_logits(parameters | trained, batch, graph=graph)


@pytest.mark.torch
@pytest.mark.parametrize("model", CASES)
def test_training_is_pefts(model, theirs, tmp_path):
    folder, base = theirs[model], PEFT / model / "base"
    start, end = (read(folder / name, model) for name in ("start", "end"))
    expected = np.load(folder / "end.npz")
    losses, trained, logits = curve(model, *restored(base, start), start.parameters)
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(losses, expected["losses"], atol=3e-6)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    for path, array in end.parameters.items():
        np.testing.assert_allclose(trained[path], array, atol=1e-4)
    # The files are written back without a change, and the kernels merged.
    config = read_config(base)
    written, given = to_peft(end, config), read_folder(folder / "end")
    assert written.tensors.keys() == given.tensors.keys()
    for name, array in given.tensors.items():
        np.testing.assert_array_equal(written.tensors[name], array)
    write_merged(tmp_path / "merged", base, [end])
    graph, parameters = restored(tmp_path / "merged", None)
    merged = our_logits(parameters, batch_of(tokens_of(model)[0]), graph=graph)
    np.testing.assert_allclose(merged, expected["logits"], atol=1e-4)


@pytest.mark.torch
def test_an_adapter_that_tokens_invoke_trains_as_in_peft(theirs, tmp_path):
    model, _, spec = INVOKED
    folder, base = theirs["alora"], PEFT / model / "base"
    start, end = (read(folder / name, model) for name in ("start", "end"))
    assert (tokens_of(model)[0]["input_ids"] == 41).any(1).tolist() == [1, 0, 1]
    tuning = Tuning(adapters=[spec])
    opened = open_pretrained(Pretrained(checkpoint=str(base)), tuning, key=KEY)
    given = opened.read_parameters() | start.parameters
    losses, trained, logits = curve(model, opened.graph, given, opened.plan.fresh)
    expected = np.load(folder / "end.npz")
    np.testing.assert_allclose(losses, expected["losses"], atol=3e-6)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    for path, array in end.parameters.items():
        np.testing.assert_allclose(trained[path], array, atol=1e-4)
    graph, parameters = restored(base, end)
    read_logits = our_logits(parameters, batch_of(tokens_of(model)[0]), graph=graph)
    np.testing.assert_allclose(read_logits, expected["logits"], atol=1e-4)
    written = to_peft(end, read_config(base)).settings
    assert written["alora_invocation_tokens"] == [41]
    with pytest.raises(InputError, match="cannot be merged"):
        write_merged(tmp_path / "merged", base, [end])


@pytest.mark.torch
@pytest.mark.parametrize("name", MOVED)
def test_training_from_the_weights_is_pefts(name, theirs):
    model, _, spec = MOVED[name]
    folder, source = theirs[name], Pretrained(checkpoint=str(PEFT / model / "base"))
    opened = open_pretrained(source, Tuning(adapters=[spec]), key=KEY)
    parameters = opened.read_parameters()
    batch = batch_of(tokens_of(model)[0])
    graph, frozen = restored(find_checkpoint(source.checkpoint), None)
    base = our_logits(frozen, batch, graph=graph)
    first = our_logits(parameters, batch, graph=opened.graph)
    np.testing.assert_allclose(first, base, atol=1e-6)
    losses, _, logits = curve(model, opened.graph, parameters, opened.plan.fresh)
    expected = np.load(folder / "end.npz")
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(losses, expected["losses"], atol=3e-6)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    # Their file becomes a plain LoRA.
    graph, parameters = restored(
        find_checkpoint(source.checkpoint), read(folder / "end", model)
    )
    np.testing.assert_allclose(
        our_logits(parameters, batch, graph=graph), expected["logits"], atol=1e-4
    )


@pytest.mark.torch
@pytest.mark.parametrize("model", CASES)
def test_options_choose_pefts_modules(model, theirs):
    spec, base = CASES[model][1], PEFT / model / "base"
    source = Pretrained(checkpoint=str(base))
    opened = open_pretrained(source, Tuning(adapters=[spec]), key=KEY)
    parameters = opened.read_parameters()
    start = read(theirs[model] / "start", model)
    assert opened.plan.fresh.keys() == start.parameters.keys()
    for path, array in start.parameters.items():
        ours = np.asarray(parameters[path])
        assert ours.shape == array.shape
        if path.endswith("bias"):
            # Layers without LoRA keep the frozen bias, which our files have as zeros.
            ours = np.where(array.any(-1, keepdims=True), ours, 0)
            np.testing.assert_array_equal(ours, array)
            continue
        np.testing.assert_array_equal(ours.any(1), array.any(1))
        if path.endswith("magnitude"):
            np.testing.assert_allclose(ours, array, rtol=1e-6)
    scalings = {path: lora.scaling for path, lora in opened.loras.items()}
    assert scalings == pytest.approx(start.scalings)
