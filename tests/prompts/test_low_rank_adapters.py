"""LoRA's options: what is adapted, the ranks, the initial values and dropout."""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.adapters.peft.peft_settings import scaling_of
from prompt_tuning.core.adapted_rows import branch_draws, branch_dropout
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge, split
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.models.build import adaptable, build_model
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank import LowRank, initial_factors
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.projection_adapters import IA3
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.tuned.export_adapters import export_adapters
from tests.support import meshes
from tests.support.dummies import (
    GPT2,
    LLAMA,
    T5_GATED,
    abstract,
    make_batch,
    random_rows,
    with_numbers,
)
from tests.support.methods import Method
from tests.support.shared_data import FIXTURES

KEY = jax.random.key(0)
BLOCK = "decoder/layers"
ATTENTION = [f"{BLOCK}/self_attention/{x}" for x in ("key", "out", "query", "value")]


def adapted(config, spec):
    """Returns the LoRA of each adapted projection, without arrays, by its path."""
    graph, shapes = abstract(lambda key: build_model(key, config, adapters=[spec]))
    found = adaptable(merge(graph, shapes))
    return {path: x.adapters["lora"] for path, x in found if x.adapters}


def exported(config, spec):
    """Returns PEFT's folder with a new LoRA."""
    (adapter,) = export_adapters(build_model(KEY, config, adapters=[spec]))
    return to_peft(adapter, config)


@pytest.mark.parametrize(
    ("config", "at", "expected"),
    [
        (LLAMA, ["q_proj", "v_proj"], [ATTENTION[2], ATTENTION[3]]),
        (LLAMA, ["mlp.up_proj"], [f"{BLOCK}/mlp/up"]),
        (LLAMA, ".*self_attn.*", ATTENTION),
        (GPT2, ["c_attn"], [*ATTENTION[:1], *ATTENTION[2:]]),
        (GPT2, ["c_proj"], [f"{BLOCK}/mlp/down", ATTENTION[1]]),
    ],
)
def test_modules_are_named_as_in_transformers(config, at, expected):
    assert sorted(adapted(config, LoRA(at=at))) == sorted(expected)


@pytest.mark.parametrize(("config", "count"), [(LLAMA, 7), (GPT2, 6), (T5_GATED, 18)])
@pytest.mark.parametrize("at", ["all-linear", ["All-Linear"]])
def test_all_linear_is_every_projection_of_the_blocks(config, count, at):
    assert len(adapted(config, LoRA(at=at))) == count


def test_all_linear_leaves_out_experts_and_their_router():
    config = read_config(FIXTURES / "families" / "qwen2_moe" / "base")
    shared = [f"{BLOCK}/mlp/shared/{x}" for x in ("down", "gate", "up")]
    expected = [*ATTENTION, *shared, f"{BLOCK}/mlp/shared_gate"]
    assert sorted(adapted(config, LoRA(at="all-linear"))) == sorted(expected)


@pytest.mark.parametrize(
    "choice",
    [
        {"at": ["experts.down_proj", "q_proj"]},
        {"regexes": [".*/experts/down", ".*/query"]},
    ],
)
def test_experts_are_adapted_where_a_name_says_so(choice):
    config = read_config(FIXTURES / "families" / "mixtral" / "base")
    loras = adapted(config, LoRA(**choice, rank=2))
    paths = [f"{BLOCK}/mlp/experts/down", f"{BLOCK}/self_attention/query"]
    assert sorted(loras) == paths
    shapes = [loras[path].a.shape for path in paths]
    layers, experts = config.layers, config.experts
    width, inner = config.width, config.feed_forward_width
    assert shapes == [(layers, experts, inner, 2), (layers, width, 2)]
    with pytest.raises(
        InputError, match=r"LoRA\.dora is True, but the LoRA of experts"
    ):
        adapted(config, LoRA(**choice, dora=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "q_proj"}, r"'q_proj', which matches none.*write \['q_proj'\]"),
        ({"at": ["q_proj", "wq"]}, r"LoRA\.at has 'wq', which matches none"),
        ({"at": [], "rank": 1}, r"LoRA\.at is empty"),
        ({"at": ["q_proj"], "regexes": [".*/up"]}, "both choose what to adapt"),
        ({"rank_pattern": {"up_proj": 2}}, "rank_pattern has 'up_proj', which matches"),
        ({"rank_pattern": {"q_proj": 0}}, "LoRA.rank_pattern of 'q_proj' is 0"),
        ({"layers": [2]}, "LoRA.layers has 2, but .* 2 layers, 0 to 1"),
        ({"layers": [0], "at": r".*\.1\..*q_proj"}, "none of these layers"),
        ({"rank_pattern": {"0.self_attn.q_proj": 4}}, "by 4 in layer 0, 2 in layer 1"),
        ({"initial": "orthogonal", "rank": 3}, "even ranks, .* has rank 3"),
        ({"dropout": 1.0}, "LoRA.dropout is 1"),
        ({"initial": "pissa", "dora": True}, "'pissa', which takes a part out of the"),
        ({"initial": "olora", "rank": 17}, "ranks up to the 16 .*the rank is 17"),
        ({"bias": "all"}, "LoRA.bias is 'all', but the model has no biases"),
        ({"invocation": []}, "LoRA.invocation is empty"),
        ({"invocation": [31]}, "LoRA.invocation has the id 31, .* tokens 0 to 30"),
        ({"invocation": [1], "dora": True}, "LoRA.dora acts on whole rows"),
        ({"at": ["experts.down_proj"]}, "'experts.down_proj', which matches none"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        adapted(LLAMA, LoRA(**options))


def test_patterns_set_the_ranks_and_alphas_of_modules():
    spec = LoRA(
        at="all-linear",
        rank_pattern={"down_proj": 2, r"(k|v)_proj": 6, "0.self_attn.q_proj": 4},
        alpha_pattern={"mlp.down_proj": 32, "0.self_attn.q_proj": 8},
    )
    loras = adapted(LLAMA, spec)
    found = {p.split("/")[-1]: (x.rank, x.scaling) for p, x in loras.items()}
    assert found["down"] == (2, 16.0)
    assert found["key"] == found["value"] == (6, 16 / 6)
    # Rank 4 in layer 0, 8 in layer 1; both are scaled by 2.
    assert found["query"] == found["out"] == (8, 2.0)


def test_a_rank_stabilized_pattern_divides_by_the_root():
    spec = LoRA(rank_pattern={"q_proj": 4}, rank_stabilized=True)
    scalings = [x.scaling for x in adapted(LLAMA, spec).values()]
    assert sorted(scalings) == [16 / math.sqrt(8), 8.0]


@pytest.mark.parametrize("initial", ["kaiming", "gaussian", "orthogonal"])
def test_initial_values_have_pefts_distribution(initial):
    size, rank = 400, 6
    a, b = initial_factors(KEY, (size, 300), [rank, rank], initial)
    assert (a.shape, b.shape) == ((2, size, rank), (2, rank, 300))
    np.testing.assert_allclose(a @ b, 0, atol=1e-6)
    # A uniform distribution within 1 / sqrt(in), a normal one with deviation 1 / r, and
    # rows of an orthogonal matrix times normal numbers with deviation 0.1.
    deviation = {"kaiming": (3 * size) ** -0.5, "gaussian": 1 / rank}.get(initial)
    if deviation is None:
        assert float(jnp.square(a).sum((1, 2)).mean()) == pytest.approx(
            size * rank / 2 / 100, rel=0.1
        )
        assert np.linalg.matrix_rank(a[0]) == np.linalg.matrix_rank(b[0]) == rank // 2
    else:
        assert float(a.std()) == pytest.approx(deviation, rel=0.05)
        assert not b.any()
    if initial == "kaiming":
        assert float(abs(a).max()) <= size**-0.5


def test_layers_and_ranks_that_are_left_out_do_not_train():
    spec = LoRA(
        at=["q_proj"],
        layers=[1],
        rank=4,
        alpha=8,
        rank_pattern={"1.self_attn.q_proj": 2},
        alpha_pattern={"1.self_attn.q_proj": 4},
    )
    model = build_model(KEY, LLAMA, adapters=[spec])
    graph, parameters = split(model)
    path = f"{BLOCK}/self_attention/query/adapters/lora"
    a, b = parameters[f"{path}/a"], parameters[f"{path}/b"]
    assert a.shape == (2, 16, 2)
    assert not a[0].any() and a[1].all()
    parameters[f"{path}/b"] = b.at[1].set(1.0)
    batch = jax.tree.map(jnp.asarray, make_batch(LLAMA, random_rows([(4, 3)])))

    def loss(trained):
        return loss_sums(graph, parameters | trained, batch, None).loss

    trained = {f"{path}/{x}": parameters[f"{path}/{x}"] for x in "ab"}
    for gradient in jax.jit(jax.grad(loss))(trained).values():
        assert not gradient[0].any() and gradient[1].any()
    folder = exported(LLAMA, spec)
    assert sorted(folder.tensors) == [
        f"base_model.model.model.layers.1.self_attn.q_proj.lora_{x}.weight"
        for x in "AB"
    ]
    assert folder.settings["target_modules"] == ["1.self_attn.q_proj"]
    assert (folder.settings["r"], folder.settings["lora_alpha"]) == (2, 4)


def test_settings_of_training_are_exported_and_read_back():
    spec = LoRA(rank=4, dropout=0.25, rank_stabilized=True, rank_pattern={"v_proj": 2})
    folder = exported(LLAMA, spec)
    assert folder.settings["lora_dropout"] == 0.25
    assert folder.settings["use_rslora"] is True
    assert (folder.settings["r"], folder.settings["lora_alpha"]) == (4, 16)
    assert folder.settings["rank_pattern"].keys() == {
        f"model.layers.{i}.self_attn.v_proj" for i in range(2)
    }
    for read in LoRA.rebuild(from_peft(folder, LLAMA, "here")):
        assert (read.dropout, read.rank_stabilized, read.alpha) == (0.25, True, 16)


@pytest.mark.slow
def test_dropout_zeroes_the_branch_in_training_alone():
    spec = LoRA(at="all-linear", dropout=0.5, rank=2)
    graph, parameters = with_numbers(
        lambda key: build_model(key, T5_GATED, adapters=[spec])
    )
    plain, _ = with_numbers(
        lambda key: build_model(
            key, T5_GATED, adapters=[dataclasses.replace(spec, dropout=0.0)]
        )
    )
    batch = make_batch(T5_GATED, random_rows([(4, 3), (2, 2)]))

    def loss(graph, key):
        return float(
            jax.jit(loss_sums, static_argnums=0)(graph, parameters, batch, key).loss
        )

    one, other = jax.random.key(1), jax.random.key(2)
    expected = loss(plain, one)
    assert loss(graph, None) == expected == loss(plain, None)
    assert len({expected, loss(graph, one), loss(graph, other)}) == 3


def test_the_effect_of_dropout_has_the_mean_and_variance_of_its_theory():
    """Elements are 0 or `x / (1 - p)`, so a sum `x @ w` keeps its mean, with the
    variance `p / (1 - p) * sum((x w)^2)`; both within 3 standard errors of 1e4 draws.
    """
    draws, size, rate = 10_000, 24, 0.3
    random = np.random.default_rng(0)
    x, w = random.standard_normal((2, size))
    rows = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (draws, size))
    with branch_draws(KEY, jnp.arange(draws)):
        effects = np.asarray(branch_dropout(rows, rate, "lora", 0), np.float64) @ w
    variance = rate / (1 - rate) * np.sum((x * w) ** 2)
    assert abs(effects.mean() - x @ w) < 3 * (variance / draws) ** 0.5
    # The sum is nearly normal, so its variance has the relative error sqrt(2 / n).
    assert abs(effects.var() / variance - 1) < 3 * (2 / draws) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "choice"),
    [(T5_GATED, "LoRA.dora = True"), (LLAMA, "LoRA.initial = 'pissa'")],
    ids=["t5, norms", "llama, starts"],
)
def test_masks_norms_and_starts_are_the_same_on_a_mesh(config, choice):
    config = dataclasses.replace(config, head_width=4)
    attention = "cross" if config.encoder_layers else "self"
    method = Method(
        name="LoRA",
        files=("adapters/lora.gin",),
        choices=(
            f"LoRA.regexes = ['.*/mlp/down', '.*/{attention}_attention/(key|out)']",
            "LoRA.dropout = 0.5",
            choice,
        ),
    )
    model, batch = meshes.tuned(config, method), meshes.batch_of(config)
    mesh = meshes.layout_of(MeshShape(data=1, fsdp=2, tensor=2), config)
    losses = []
    for layout in (None, mesh):
        step, given = meshes.begun(model, batch, layout)
        losses.append(float(jax.jit(step)(*given)[1]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8", "nf4"])
def test_dora_is_a_kernel_with_the_given_norms(dtype):
    config = dataclasses.replace(GPT2, parameter_dtype=dtype, width=64)
    spec = LoRA(at=["c_attn"], rank=2, dora=True)
    model = build_model(KEY, config, adapters=[spec])
    dense = dict(adaptable(model))[ATTENTION[2]]
    graph, layers = split(dense)
    random = np.random.default_rng(0)
    layers |= {
        path: jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype)
        for path, leaf in layers.items()
        if "adapters" in path or "bias" in path
    }
    block = cast(Dense, merge(graph, {path: x[0] for path, x in layers.items()}))
    kernel = np.asarray(block.wide_kernel(), np.float64)
    lora = cast(LowRank, block.adapters["lora"])
    a, b = (np.asarray(x[...], np.float64) for x in (lora.a, lora.b))
    whole = kernel + lora.scaling * a @ b
    whole *= np.asarray(split(lora)[1]["magnitude"]) / np.linalg.norm(whole, axis=0)
    x = random.standard_normal((5, 64)).astype("f4")
    run = jax.jit(lambda layers, x: cast(Dense, merge(graph, layers))(x))
    bias = np.asarray(split(block)[1]["bias"])
    np.testing.assert_allclose(run(split(block)[1], x), x @ whole + bias, atol=1e-4)


def test_dora_excludes_other_adapters_and_weights_in_host_memory():
    for_all = {"regexes": [".*/(key|value)"]}
    with pytest.raises(InputError, match="has DoRA and another adapter"):
        build_model(KEY, LLAMA, adapters=[IA3(**for_all), LoRA(dora=True)])
    source = Pretrained(checkpoint="bundled:skills-decoder", weights="streamed")
    with pytest.raises(InputError, match="weights is 'streamed', but DoRA computes"):
        open_pretrained(source, Tuning(adapters=[LoRA(dora=True)]), key=KEY)


def test_biases_of_a_fused_module_are_trained_together():
    with pytest.raises(InputError, match="key is not adapted, and its module in tr"):
        build_model(KEY, GPT2, adapters=[LoRA(bias="lora_only")])


def test_files_have_what_the_script_of_llama_cpp_reads():
    """`convert_lora_to_gguf.py` takes pairs of factors, and divides `lora_alpha`, which
    is all that it reads of the scalings, by the rank of each pair.
    """
    spec = LoRA(at="all-linear", rank=4, alpha=6, rank_pattern={"down_proj": 2})
    (adapter,) = export_adapters(build_model(KEY, LLAMA, adapters=[spec]))
    folder = to_peft(adapter, LLAMA, base_model="org/model")
    assert folder.settings["base_model_name_or_path"] == "org/model"
    modules = {name.rpartition(".lora_")[0] for name in folder.tensors}
    pairs = {f"{module}.lora_{x}.weight" for module in modules for x in "AB"}
    assert folder.tensors.keys() == pairs
    alpha = float(folder.settings["lora_alpha"])
    for module in modules:
        a, b = (folder.tensors[f"{module}.lora_{x}.weight"] for x in "AB")
        assert a.shape[0] == b.shape[1] and a.dtype == b.dtype == np.float32
        own = scaling_of(folder.settings, module.removeprefix("base_model.model."))
        assert alpha / len(a) == pytest.approx(own)


def test_part_of_a_fused_module_with_dora_is_not_exported():
    with pytest.raises(InputError, match="key has no DoRA, but others in the same"):
        exported(GPT2, LoRA(dora=True))
