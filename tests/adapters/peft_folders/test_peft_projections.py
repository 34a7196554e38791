"""Converting LoRA and IA3 from PEFT and back."""

import dataclasses
import math

import numpy as np
import pytest

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.peft.folder import AdapterFolder, check_shapes
from prompt_tuning.adapters.peft.modules import by_module, projections
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.adapters.peft.tensor_names import without_adapter_name
from prompt_tuning.core.errors import InputError
from tests.support.dummies import GPT2, LLAMA, T5_GATED, T5_ORIGINAL

D, F, R = 16, 24, 2
random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


def name_of(module, ending):
    return f"base_model.model.{module}.{ending}"


def lora(sizes, ranks=None, **settings):
    """Returns PEFT's folder with a LoRA of each module: {name: (in, out)}."""
    tensors = {}
    for module, (size_in, size_out) in sizes.items():
        rank = ranks[module] if ranks else R
        tensors[name_of(module, "lora_A.weight")] = normal(rank, size_in)
        tensors[name_of(module, "lora_B.weight")] = normal(size_out, rank)
    fields = {"peft_type": "LORA", "r": R, "lora_alpha": 6} | settings
    check_shapes(fields, tensors, "the test's own adapter")
    return AdapterFolder(fields, tensors)


def q_proj(layer):
    return f"model.layers.{layer}.self_attn.q_proj"


QUERIES = {q_proj(layer): (D, D) for layer in range(2)}


def change(adapter, path, layer):
    """Returns the change of a kernel `[in, out]` by a LoRA."""
    leaves = (adapter.parameters[f"{path}/adapters/lora/{x}"] for x in "ab")
    a, b = (leaf[layer].astype(float) for leaf in leaves)
    return adapter.scalings[path] * (a @ b)


def their_change(folder, module, scaling):
    """Returns PEFT's change of a weight `[out, in]`, transposed."""
    a, b = (
        folder.tensors[name_of(module, f"lora_{x}.weight")].astype(float) for x in "AB"
    )
    return scaling * (b @ a).T


def assert_same_folder(actual, expected):
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, array in expected.tensors.items():
        np.testing.assert_array_equal(actual.tensors[name], array)
    assert expected.settings.items() <= actual.settings.items()


@pytest.mark.parametrize(
    ("config", "count", "per_layer"),
    [(LLAMA, 7, 7), (GPT2, 6, 4), (T5_GATED, 18, 18), (T5_ORIGINAL, 16, 16)],
    ids=["llama", "gpt2", "gated t5", "t5"],
)
def test_every_projection_has_a_module(config, count, per_layer):
    known = projections(config)
    assert len(known) == count
    assert len(by_module(known)) == per_layer * config.layers
    down = "encoder/layers/mlp/down" if config.encoder_layers else None
    for path, projection in known.items():
        assert projection.scales_input == path.endswith("down")
        assert projection.in_first == (config is GPT2)
    if down:
        assert known[down].modules[1] == "encoder.block.1.layer.1.DenseReluDense.wo"


def test_lora_survives_a_round_trip():
    theirs = lora(QUERIES, target_modules=["q_proj"], of_tomorrow=1)
    with pytest.warns(UserWarning, match="unknown setting 'of_tomorrow' = 1, which"):
        adapter = from_peft(theirs, LLAMA, "here")
    path = "decoder/layers/self_attention/query"
    assert set(adapter.parameters) == {f"{path}/adapters/lora/{x}" for x in "ab"}
    assert adapter.parameters[f"{path}/adapters/lora/a"].shape == (2, D, R)
    assert adapter.scalings == {path: 3.0}
    for layer in range(2):
        expected = their_change(theirs, q_proj(layer), 6 / R)
        np.testing.assert_allclose(change(adapter, path, layer), expected, rtol=1e-5)
    assert_same_folder(to_peft(adapter, LLAMA), theirs)


@pytest.mark.parametrize("ending", ["", ".weight", ".default", ".default.weight"])
def test_magnitudes_of_dora_are_read_by_every_name(ending):
    theirs = lora(QUERIES, target_modules=["q_proj"])
    theirs.settings["use_dora"] = True
    magnitudes = {q: normal(D) for q in QUERIES}
    for module, magnitude in magnitudes.items():
        theirs.tensors[name_of(module, f"lora_magnitude_vector{ending}")] = magnitude
    tensors = without_adapter_name(theirs.tensors, "here")
    check_shapes(theirs.settings, tensors, "here")
    adapter = from_peft(AdapterFolder(theirs.settings, tensors), LLAMA, "here")
    path = "decoder/layers/self_attention/query/adapters/lora/magnitude"
    expected = np.stack(list(magnitudes.values()))
    np.testing.assert_array_equal(adapter.parameters[path], expected)
    assert_same_folder(to_peft(adapter, LLAMA), AdapterFolder(theirs.settings, tensors))


def test_magnitudes_without_the_setting_of_dora_are_refused():
    theirs = lora(QUERIES)
    with pytest.raises(InputError, match=r"has no base_model.*those of DoRA"):
        check_shapes(theirs.settings | {"use_dora": True}, theirs.tensors, "here")
    theirs.tensors[name_of(q_proj(0), "lora_magnitude_vector")] = normal(D)
    with pytest.raises(InputError, match="not those of DoRA"):
        check_shapes(theirs.settings, theirs.tensors, "here")


def test_names_of_a_model_without_its_head_are_read():
    theirs = lora(QUERIES)
    bare = {n.replace("model.model", "model"): x for n, x in theirs.tensors.items()}
    adapter = from_peft(AdapterFolder(theirs.settings, bare), LLAMA, "here")
    expected = from_peft(theirs, LLAMA, "here")
    assert adapter.scalings == expected.scalings
    for path, array in expected.parameters.items():
        np.testing.assert_array_equal(adapter.parameters[path], array)


@pytest.mark.parametrize(
    ("settings", "scalings"),
    [
        ({"lora_alpha": 3}, [1.5, 1.5]),
        ({"lora_alpha": 3, "use_rslora": True}, [3 / math.sqrt(2)] * 2),
        ({"alpha_pattern": {"0.self_attn.q_proj": 1}}, [0.5, 3.0]),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 1}}, [0.5, 0.5]),
        ({"alpha_pattern": {"k_proj": 1, "proj": 2}}, [3.0, 3.0]),
    ],
)
def test_scalings_of_lora(settings, scalings):
    theirs = lora(QUERIES, **settings)
    adapter = from_peft(theirs, LLAMA, "here")
    (path,) = adapter.scalings
    for layer, scaling in enumerate(scalings):
        expected = their_change(theirs, q_proj(layer), scaling)
        np.testing.assert_allclose(change(adapter, path, layer), expected, rtol=1e-5)


def test_lower_ranks_are_padded_with_zeros():
    ranks = {q_proj(0): 1, q_proj(1): 3}
    theirs = lora(
        QUERIES, ranks, r=1, rank_pattern={"layers.1.self_attn.q_proj": 3}, lora_alpha=6
    )
    adapter = from_peft(theirs, LLAMA, "here")
    (path,) = adapter.scalings
    assert adapter.parameters[f"{path}/adapters/lora/a"].shape == (2, D, 3)
    for layer, scaling in enumerate((6.0, 2.0)):
        expected = their_change(theirs, q_proj(layer), scaling)
        np.testing.assert_allclose(change(adapter, path, layer), expected, atol=1e-5)


def test_layers_without_a_lora_are_not_changed():
    theirs = lora(
        {q_proj(1): (D, D)}, layers_to_transform=[1], target_modules=["q_proj"]
    )
    adapter = from_peft(theirs, LLAMA, "here")
    (path,) = adapter.scalings
    assert not change(adapter, path, 0).any() and change(adapter, path, 1).any()
    assert_same_folder(to_peft(adapter, LLAMA), theirs)


C_ATTN = {f"transformer.h.{layer}.attn.c_attn": (D, 3 * D) for layer in range(2)}


def test_a_fused_module_is_three_projections():
    theirs = lora(C_ATTN, target_modules=["c_attn"], fan_in_fan_out=True)
    adapter = from_peft(theirs, GPT2, "here")
    names = ("query", "key", "value")
    for layer, module in enumerate(C_ATTN):
        parts = [
            change(adapter, f"decoder/layers/self_attention/{name}", layer)
            for name in names
        ]
        expected = their_change(theirs, module, 3.0)
        np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=1e-5)
    assert_same_folder(to_peft(adapter, GPT2), theirs)


@pytest.mark.parametrize(
    ("names", "scalings", "rank"),
    [
        (("query", "key", "value"), (2.0, 2.0, 2.0), 6),
        (("query", "key", "value"), (2.0, 1.0, 4.0), 6),
        (("query", "value"), (2.0, 2.0), 4),
        (("key",), (2.0,), 2),
    ],
)
def test_independent_projections_get_separate_ranks(names, scalings, rank):
    paths = [f"decoder/layers/self_attention/{name}" for name in names]
    parameters = {}
    for path in paths:
        parameters[f"{path}/adapters/lora/a"] = normal(2, D, R)
        parameters[f"{path}/adapters/lora/b"] = normal(2, R, D)
    scale = dict(zip(paths, scalings, strict=True))
    adapter = Adapter(kind="LORA", parameters=parameters, scalings=scale)
    exported = to_peft(adapter, GPT2)
    assert exported.settings["r"] == rank and exported.settings["rank_pattern"] == {}
    assert exported.settings["fan_in_fan_out"] is True
    assert exported.settings["target_modules"] == ["c_attn"]
    for layer, module in enumerate(C_ATTN):
        alpha = exported.settings["lora_alpha"] / rank
        whole = their_change(exported, module, alpha)
        for index, name in enumerate(("query", "key", "value")):
            path = f"decoder/layers/self_attention/{name}"
            expected = change(adapter, path, layer) if path in scale else 0
            part = whole[:, index * D : (index + 1) * D]
            np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-6)


def ours_of(config, kind, paths, rank=R):
    """Returns our adapter of some projections, with random numbers."""
    known = projections(config)
    parameters = {}
    for path in paths:
        one, layers = known[path], len(known[path].modules)
        if kind == "LORA":
            parameters[f"{path}/adapters/lora/a"] = normal(layers, one.size_in, rank)
            parameters[f"{path}/adapters/lora/b"] = normal(layers, rank, one.size_out)
        else:
            size = one.size_in if one.scales_input else one.size_out
            parameters[f"{path}/adapters/ia3/scale"] = normal(layers, size)
    scalings = dict.fromkeys(paths, 0.5) if kind == "LORA" else {}
    return Adapter(kind=kind, parameters=parameters, scalings=scalings)


TARGETS = {
    "one name": (LLAMA, ["decoder/layers/mlp/up"], ["up_proj"]),
    "two of a name": (GPT2, ["decoder/layers/mlp/down"], ["mlp.c_proj"]),
    "both of a name": (
        GPT2,
        ["decoder/layers/mlp/down", "decoder/layers/self_attention/out"],
        ["c_proj"],
    ),
    "all stacks": (
        T5_GATED,
        [
            "encoder/layers/self_attention/query",
            "decoder/layers/self_attention/query",
            "decoder/layers/cross_attention/query",
        ],
        ["q"],
    ),
    "cross attention": (
        T5_GATED,
        ["decoder/layers/cross_attention/key"],
        ["EncDecAttention.k"],
    ),
    "a stack's place": (
        T5_GATED,
        ["decoder/layers/mlp/gate"],
        ["2.DenseReluDense.wi_0"],
    ),
    "full names": (
        T5_GATED,
        ["decoder/layers/self_attention/query"],
        [f"decoder.block.{i}.layer.0.SelfAttention.q" for i in range(2)],
    ),
}


@pytest.mark.parametrize(("config", "paths", "names"), TARGETS.values(), ids=TARGETS)
def test_peft_adapts_exactly_the_same_modules(config, paths, names):
    adapter = ours_of(config, "LORA", paths)
    exported = to_peft(adapter, config)
    assert exported.settings["target_modules"] == names
    modules = {
        module
        for module in by_module(projections(config))
        for name in names
        if module == name or module.endswith(f".{name}")
    }
    stored = {
        name.removeprefix("base_model.model.").rsplit(".lora", 1)[0]
        for name in exported.tensors
    }
    assert modules == stored
    again = from_peft(exported, config, "here")
    assert again.scalings == adapter.scalings
    for path, array in adapter.parameters.items():
        np.testing.assert_array_equal(again.parameters[path], array)


def test_modules_that_differ_get_patterns():
    query, up = "decoder/layers/self_attention/query", "decoder/layers/mlp/up"
    first, second = ours_of(LLAMA, "LORA", [query]), ours_of(LLAMA, "LORA", [up], 3)
    adapter = Adapter(
        kind="LORA",
        parameters=first.parameters | second.parameters,
        scalings={query: 0.5, up: 2.0},
    )
    exported = to_peft(adapter, LLAMA)
    check_shapes(exported.settings, exported.tensors, "ours")
    assert {exported.settings["r"], *exported.settings["rank_pattern"].values()} == {
        2,
        3,
    }
    assert {
        exported.settings["lora_alpha"],
        *exported.settings["alpha_pattern"].values(),
    } == {
        1,
        6,
    }
    again = from_peft(exported, LLAMA, "here")
    assert again.scalings == adapter.scalings


def test_rank_stabilized_settings_are_kept():
    theirs = lora(QUERIES, use_rslora=True, target_modules=["q_proj"])
    adapter = from_peft(theirs, LLAMA, "here")
    assert_same_folder(to_peft(adapter, LLAMA), theirs)
    (path,) = adapter.scalings
    other = dataclasses.replace(adapter, scalings={path: math.sqrt(2)})
    assert to_peft(other, LLAMA).settings["lora_alpha"] == 2


def ia3(tensors, **settings):
    named = {name_of(module, "ia3_l"): x for module, x in tensors.items()}
    fields = {"peft_type": "IA3", "target_modules": [], "feedforward_modules": []}
    return AdapterFolder(fields | settings, named)


def test_ia3_survives_a_round_trip():
    keys = {f"model.layers.{i}.self_attn.k_proj": normal(8, 1) for i in range(2)}
    downs = {f"model.layers.{i}.mlp.down_proj": normal(1, F) for i in range(2)}
    theirs = ia3(
        keys | downs,
        target_modules=["down_proj", "k_proj"],
        feedforward_modules=["down_proj"],
    )
    adapter = from_peft(theirs, LLAMA, "here")
    expected = {
        "decoder/layers/self_attention/key": np.stack([x[:, 0] for x in keys.values()]),
        "decoder/layers/mlp/down": np.stack([x[0] for x in downs.values()]),
    }
    for path, scale in expected.items():
        actual = adapter.parameters.pop(f"{path}/adapters/ia3/scale")
        np.testing.assert_array_equal(actual, scale)
    assert not adapter.parameters
    assert_same_folder(to_peft(from_peft(theirs, LLAMA, "here"), LLAMA), theirs)


def test_ia3_of_a_fused_module_is_split_and_padded_with_ones():
    module = "transformer.h.1.attn.c_attn"
    stored = normal(3 * D, 1)
    theirs = ia3({module: stored}, target_modules=[module])
    adapter = from_peft(theirs, GPT2, "here")
    for index, name in enumerate(("query", "key", "value")):
        path = f"decoder/layers/self_attention/{name}/adapters/ia3/scale"
        scale = adapter.parameters[path]
        np.testing.assert_array_equal(scale[1], stored[index * D : (index + 1) * D, 0])
        np.testing.assert_array_equal(scale[0], np.ones(D))
    value = {path: adapter.parameters[path]}
    exported = to_peft(Adapter(kind="IA3", parameters=value), GPT2)
    whole = exported.tensors[name_of(module, "ia3_l")]
    np.testing.assert_array_equal(whole[: 2 * D], np.ones((2 * D, 1)))
    np.testing.assert_array_equal(whole[2 * D :], stored[2 * D :])
    assert exported.settings["fan_in_fan_out"] is True


def test_ia3_lists_its_feed_forward_modules_separately():
    paths = ["decoder/layers/mlp/down", "decoder/layers/self_attention/out"]
    exported = to_peft(ours_of(GPT2, "IA3", paths), GPT2)
    settings = exported.settings
    assert settings["target_modules"] == ["attn.c_proj", "mlp.c_proj"]
    assert settings["feedforward_modules"] == ["mlp.c_proj"]
    # PEFT refuses feed-forward modules that are not among the targets.
    assert set(settings["feedforward_modules"]) <= set(settings["target_modules"])
    assert exported.tensors[name_of("transformer.h.0.mlp.c_proj", "ia3_l")].shape == (
        1,
        F,
    )
    assert exported.tensors[name_of("transformer.h.0.attn.c_proj", "ia3_l")].shape == (
        D,
        1,
    )


REFUSED = {
    "bias": (
        AdapterFolder(
            lora(QUERIES, bias="all").settings,
            lora(QUERIES).tensors | {f"base_model.model.{q_proj(0)}.bias": normal(D)},
        ),
        "has a trained bias base_model.*, which this model does not have",
    ),
    "modules": (lora(QUERIES, modules_to_save=["lm_head"]), "whole modules"),
    "PiSSA": (lora(QUERIES, init_lora_weights="pissa_niter_4"), "changes the frozen"),
    "Arrow": (
        lora(QUERIES, arrow_config={"top_k": 3}),
        "other adapters, which is not supported. Train it without",
    ),
    "PiSSA without weights": (
        lora(QUERIES, init_lora_weights="pissa"),
        "'pissa', whose first product is computed from the model's weights: name",
    ),
    "OLoRA without weights": (
        lora(QUERIES, init_lora_weights="OLoRA"),
        "'olora', whose first product is computed",
    ),
    "no such module": (lora({"model.layers.2.self_attn.q_proj": (D, D)}), "layers.2"),
    "head": (
        lora({"lm_head": (D, 31)}),
        r"low-rank adapter of the model's head \(lm_h",
    ),
    "embeddings": (
        AdapterFolder(
            lora(QUERIES).settings,
            {
                f"base_model.model.model.embed_tokens.lora_embedding_{x}": normal(2, 2)
                for x in "AB"
            },
        ),
        r"low-rank adapter of the model's embeddings \(model.embed_tokens\)",
    ),
    "other module": (lora({"score": (D, 2)}), "module score, which is not a proj"),
    "experts": (
        lora({"model.layers.0.mlp.experts.1.up_proj": (F, D)}),
        "up_proj, which is not a projection of this model",
    ),
    "sizes": (lora({q_proj(0): (D, D + 1)}), "maps 16 to 17 numbers"),
    "side": (ia3({q_proj(0): np.ones((1, D), "f4")}), r"expected \(16, 1\)"),
    "output of down": (
        ia3({"model.layers.0.mlp.down_proj": np.ones((D, 1), "f4")}),
        r"expected \(1, 24\).*at its input",
    ),
    "other tensor": (
        AdapterFolder(
            lora(QUERIES).settings,
            lora(QUERIES).tensors | {"base_model.model.score.weight": normal(2, D)},
        ),
        "score.weight and 0 other tensors",
    ),
}


@pytest.mark.parametrize(("theirs", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_variants_and_other_modules_are_refused(theirs, message):
    with pytest.raises(InputError, match=message):
        from_peft(theirs, LLAMA, "here")


def test_native_adapters_for_another_model_are_refused():
    adapter = ours_of(LLAMA, "LORA", ["decoder/layers/mlp/gate"])
    with pytest.raises(InputError, match=r"mlp/gate.* does not belong to LORA"):
        to_peft(adapter, GPT2)
    wider = dataclasses.replace(LLAMA, feed_forward_width=F + 1)
    with pytest.raises(InputError, match="was it trained on another model"):
        to_peft(adapter, wider)
    scales = ours_of(LLAMA, "IA3", ["decoder/layers/mlp/gate"])
    with pytest.raises(InputError, match="was it trained on another model"):
        to_peft(scales, wider)
    with pytest.raises(InputError, match="no scaling"):
        to_peft(dataclasses.replace(adapter, scalings={}), LLAMA)
