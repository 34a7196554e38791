"""Converting prompts and prefixes from PEFT and back."""

import dataclasses

import numpy as np
import pytest

from prompt_tuning.adapters.adapter import Adapter, factorized_adapter
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.errors import InputError
from tests.support.dummies import DEEPSEEK, GPT2, LLAMA, T5_GATED

P, N, R = 3, 2, 2
D = LLAMA.width
random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


def folder(kind, tensors, **settings):
    fields = {"peft_type": kind, "num_virtual_tokens": P} | settings
    return AdapterFolder(fields, tensors)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == np.float32
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def test_a_decoder_keeps_its_prompt():
    rows = normal(P, D)
    adapter = from_peft(
        folder("PROMPT_TUNING", {"prompt_embeddings": rows}), LLAMA, "here"
    )
    assert adapter.kind == "PROMPT_TUNING" and adapter.unused is None
    assert_same(adapter.parameters, {"decoder/prompt/prompt": rows})


def test_both_halves_of_an_encoder_decoders_prompt_are_kept_and_the_first_is_used():
    rows = normal(2 * P, D)
    theirs = folder(
        "PROMPT_TUNING", {"prompt_embeddings": rows}, num_transformer_submodules=2
    )
    adapter = from_peft(theirs, T5_GATED, "here")
    assert_same(adapter.parameters, {"encoder/prompt/prompt": rows[:P]})
    assert_same(to_peft(adapter, T5_GATED).tensors, theirs.tensors)


def test_an_encoders_prompt_is_written_with_the_decoder_half_that_peft_expects():
    rows, other = normal(P, D), normal(P, D)
    ours = {"encoder/prompt/prompt": rows}
    exported = to_peft(Adapter(kind="PROMPT_TUNING", parameters=ours), T5_GATED)
    both = np.concatenate([rows, np.zeros((P, D))])
    assert_same(exported.tensors, {"prompt_embeddings": both})
    assert exported.settings["num_transformer_submodules"] == 2
    ours = {"decoder/prompt/prompt": other} | ours
    exported = to_peft(Adapter(kind="PROMPT_TUNING", parameters=ours), T5_GATED)
    assert_same(exported.tensors, {"prompt_embeddings": np.concatenate([rows, other])})


def test_settings_describe_the_model_and_the_task():
    ours = {"decoder/prompt/prompt": normal(P, D)}
    adapter = Adapter(kind="PROMPT_TUNING", parameters=ours)
    settings = to_peft(adapter, LLAMA, base_model="some/model").settings
    # The 17 keys that PEFT 0.21.2 writes.
    assert len(settings) == 17
    expected = {
        "base_model_name_or_path": "some/model",
        "inference_mode": True,
        "num_attention_heads": 4,
        "num_layers": 2,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": P,
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "token_dim": D,
    }
    assert expected.items() <= settings.items()
    alone = to_peft(adapter, None).settings
    assert alone["task_type"] == "CAUSAL_LM" and alone["num_layers"] is None
    assert to_peft(adapter, LLAMA, task_type="SEQ_CLS").settings["task_type"] == (
        "SEQ_CLS"
    )


def test_settings_that_were_read_are_kept_if_still_right():
    rows = normal(P, D)
    theirs = folder(
        "PROMPT_TUNING",
        {"prompt_embeddings": rows},
        prompt_tuning_init="TEXT",
        of_tomorrow=7,
        revision="main",
        token_dim=D,
    )
    adapter = from_peft(theirs, LLAMA, "here")
    longer = {"decoder/prompt/prompt": normal(P + 1, D)}
    settings = to_peft(dataclasses.replace(adapter, parameters=longer), LLAMA).settings
    assert settings["num_virtual_tokens"] == P + 1
    extra = {"prompt_tuning_init": "TEXT", "of_tomorrow": 7, "revision": "main"}
    assert extra.items() <= settings.items()


def test_p_tuning_is_read_as_its_resulting_plain_prompt():
    rows = normal(P, D)
    theirs = folder(
        "P_TUNING",
        {"prompt_embeddings": rows},
        encoder_reparameterization_type="LSTM",
        base_model_name_or_path="some/model",
    )
    adapter = from_peft(theirs, LLAMA, "here")
    assert_same(adapter.parameters, {"decoder/prompt/prompt": rows})
    again = to_peft(adapter, LLAMA)
    assert again.kind == "PROMPT_TUNING"
    assert again.settings["base_model_name_or_path"] == "some/model"
    assert "encoder_reparameterization_type" not in again.settings


def mpt(rows, **settings):
    tensors = {
        "prompt_embeddings": normal(rows, D),
        "prefix_task_cols": normal(N, rows, R),
        "prefix_task_rows": normal(N, R, D),
    }
    settings = {"num_tasks": N, "num_ranks": R} | settings
    return folder("MULTITASK_PROMPT_TUNING", tensors, **settings)


def prompts(tensors):
    """Returns the prompts of all tasks, by the definition of Wang et al."""
    factor = tensors["prefix_task_cols"] @ tensors["prefix_task_rows"]
    return tensors["prompt_embeddings"] * factor


def test_factorized_task_prompts_survive_a_round_trip():
    theirs = mpt(P)
    adapter = from_peft(theirs, LLAMA, "here")
    names = ("shared", "columns", "rows")
    stored = ("prompt_embeddings", "prefix_task_cols", "prefix_task_rows")
    expected = {
        f"decoder/prompt/{ours}": theirs.tensors[name]
        for ours, name in zip(names, stored, strict=True)
    }
    assert_same(adapter.parameters, expected)
    assert_same(to_peft(adapter, LLAMA).tensors, theirs.tensors)


def test_the_second_half_of_an_encoder_decoders_tasks_is_the_decoders():
    theirs = mpt(2 * P, num_transformer_submodules=2)
    adapter = from_peft(theirs, T5_GATED, "here")
    for stack, part in (("encoder", slice(P)), ("decoder", slice(P, None))):
        arrays = {
            n.split("/")[2]: x for n, x in adapter.parameters.items() if stack in n
        }
        actual = arrays["shared"] * (arrays["columns"] @ arrays["rows"])
        np.testing.assert_array_equal(actual, prompts(theirs.tensors)[:, part])
    exported = to_peft(adapter, T5_GATED)
    assert_same(exported.tensors, theirs.tensors)
    assert exported.settings["num_transformer_submodules"] == 2
    with pytest.raises(InputError, match="only has a decoder"):
        from_peft(theirs, LLAMA, "here")


def test_stacks_with_different_rows_share_the_rank():
    theirs = mpt(2 * P, num_transformer_submodules=2)
    adapter = from_peft(theirs, T5_GATED, "here")
    other = normal(N, 1, D)
    ours = adapter.parameters | {
        "decoder/prompt/rows": other,
        "decoder/prompt/columns": adapter.parameters["decoder/prompt/columns"][..., :1],
    }
    exported = to_peft(dataclasses.replace(adapter, parameters=ours), T5_GATED)
    assert exported.settings["num_ranks"] == R + 1
    expected = np.concatenate(
        [
            ours[f"{s}/prompt/shared"]
            * (ours[f"{s}/prompt/columns"] @ ours[f"{s}/prompt/rows"])
            for s in ("encoder", "decoder")
        ],
        axis=1,
    )
    np.testing.assert_allclose(prompts(exported.tensors), expected, rtol=1e-6)


def test_tasks_of_the_encoder_do_not_change_the_decoder():
    adapter = factorized_adapter({"encoder": normal(N, P, D)})
    exported = to_peft(adapter, T5_GATED)
    # With 2, PEFT would put P vectors before the decoder's input.
    assert exported.settings["num_transformer_submodules"] == 1


@pytest.mark.parametrize("length", [3, 20])
def test_any_task_prompts_have_an_exact_factorized_form(length):
    vectors = normal(N, length, D)
    exported = to_peft(factorized_adapter({"decoder": vectors}), LLAMA)
    np.testing.assert_array_equal(prompts(exported.tensors), vectors)
    assert exported.settings["num_tasks"] == N
    assert exported.settings["num_ranks"] == min(length, D)
    adapter = from_peft(exported, LLAMA, "here")
    assert adapter.parameters["decoder/prompt/shared"].shape == (length, D)


def prefix(config, stored_layers, **settings):
    heads, width = config.key_value_heads, config.head_width
    count = 1 if config.architecture == "decoder_only" else 2
    fields = {
        "num_layers": stored_layers,
        "num_attention_heads": heads,
        "token_dim": heads * width,
        "num_transformer_submodules": count,
    }
    flat = normal(P, stored_layers * 2 * heads * width)
    return folder("PREFIX_TUNING", {"prompt_embeddings": flat}, **(fields | settings))


def cache(theirs):
    """Keys and values of each layer `[P, G, K]`, computed as PEFT 0.21.2 does.

    `PeftModel.get_prompt`: the flat rows are split into 2 L tables of `[P, G, K]`; for
    two submodules the tables are doubled; each layer gets the next 2 or 4, of which the
    last two, for cross-attention, are discarded.
    """
    settings, flat = theirs.settings, theirs.tensors["prompt_embeddings"]
    heads, count = settings["num_attention_heads"], settings["num_layers"]
    tables = flat.reshape(P, 2 * count, heads, settings["token_dim"] // heads)
    tables = list(np.moveaxis(tables, 1, 0))
    each = 2 * settings["num_transformer_submodules"]
    tables *= settings["num_transformer_submodules"]
    layers = [tables[i : i + each] for i in range(0, len(tables), each)]
    return [np.stack(layer[:2]) for layer in layers]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["grouped heads", "all heads"])
def test_a_decoders_prefix_equals_pefts_cache(config):
    theirs = prefix(config, config.layers, prefix_projection=True)
    adapter = from_peft(theirs, config, "here")
    expected = np.stack(cache(theirs))
    assert expected.shape == (
        *(config.layers, 2, P),
        *(config.key_value_heads, config.head_width),
    )
    assert_same(adapter.parameters, {"decoder/prompt/prompt": expected})
    again = to_peft(adapter, config)
    assert_same(again.tensors, theirs.tensors)
    assert again.settings["prefix_projection"] is True
    fresh = to_peft(
        Adapter(kind="PREFIX_TUNING", parameters=adapter.parameters), config
    )
    assert fresh.settings["prefix_projection"] is False
    assert fresh.settings["token_dim"] == config.key_value_heads * config.head_width
    assert fresh.settings["num_attention_heads"] == config.key_value_heads


def test_a_prefix_has_the_heads_of_falcons_cache():
    """transformers caches the keys of a group for each of its two query heads."""
    config = dataclasses.replace(LLAMA, family="falcon", heads=4, key_value_heads=2)
    ours = normal(config.layers, 2, P, 2, config.head_width)
    parameters = {"decoder/prompt/prompt": ours}
    exported = to_peft(Adapter(kind="PREFIX_TUNING", parameters=parameters), config)
    assert exported.settings["num_attention_heads"] == 4
    cached = np.stack(cache(exported))
    np.testing.assert_array_equal(cached, ours[..., [0, 0, 1, 1], :])
    assert_same(from_peft(exported, config, "here").parameters, parameters)
    exported.tensors["prompt_embeddings"][0, 0] += 1
    with pytest.raises(InputError, match="differs between query heads"):
        from_peft(exported, config, "here")


def test_a_prefix_of_heads_is_no_prefix_of_a_cache_of_compressed_keys():
    ours = normal(DEEPSEEK.layers, 2, P, DEEPSEEK.heads, DEEPSEEK.head_width)
    adapter = Adapter(kind="PREFIX_TUNING", parameters={"decoder/prompt/prompt": ours})
    with pytest.raises(InputError, match="latent attention"):
        to_peft(adapter, DEEPSEEK)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_a_t5s_prefix_equals_pefts_cache(layers):
    config = dataclasses.replace(T5_GATED, layers=layers)
    theirs = prefix(config, layers)
    adapter = from_peft(theirs, config, "here")
    expected = np.stack(cache(theirs))
    assert_same(adapter.parameters, {"decoder/prompt/prompt": expected})
    # Layers that PEFT does not read are kept as they are.
    assert (adapter.unused is None) == (layers % 2 == 1)
    assert_same(to_peft(adapter, config).tensors, theirs.tensors)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_any_prefix_of_a_t5_is_written_so_that_peft_reads_it(layers):
    config = dataclasses.replace(T5_GATED, layers=layers)
    ours = normal(layers, 2, P, config.heads, config.head_width)
    parameters = {"decoder/prompt/prompt": ours}
    exported = to_peft(Adapter(kind="PREFIX_TUNING", parameters=parameters), config)
    np.testing.assert_array_equal(np.stack(cache(exported))[:layers], ours)
    # T5's d_model is not heads * d_kv, so the settings must include it.
    assert exported.settings["token_dim"] == config.heads * config.head_width
    assert_same(from_peft(exported, config, "here").parameters, parameters)


@pytest.mark.parametrize(
    ("theirs", "config", "message"),
    [
        (folder("PROMPT_TUNING", {"prompt_embeddings": normal(P, D + 1)}), LLAMA, "17"),
        (prefix(GPT2, 2), LLAMA, "2 layers of 4 key/value heads"),
        (prefix(LLAMA, 1), LLAMA, "1 layers of 2 key/value heads"),
        (folder("ADALORA", {}), LLAMA, "peft_type 'ADALORA', expected one of"),
        (
            folder("PROMPT_TUNING", {"prompt_embeddings": normal(P, D), "score": D}),
            LLAMA,
            "contains score and 0 other",
        ),
        (
            folder(
                "PROMPT_TUNING",
                {"prompt_embeddings": normal(P, D)},
                modules_to_save=["score"],
            ),
            LLAMA,
            "whole modules were trained",
        ),
    ],
)
def test_arrays_of_another_model_are_refused(theirs, config, message):
    with pytest.raises(InputError, match=message):
        from_peft(theirs, config, "here")


def test_an_adapter_that_peft_cannot_represent_is_refused():
    ours = {"decoder/prompt/prompt": normal(P, D)}
    with pytest.raises(InputError, match="set the model that it is for"):
        to_peft(Adapter(kind="PREFIX_TUNING", parameters=ours), None)
    with pytest.raises(InputError, match=r"prefix has shape \(3, 16\)"):
        to_peft(Adapter(kind="PREFIX_TUNING", parameters=ours), LLAMA)
    ours["encoder/prompt/prompt"] = normal(P + 1, D)
    with pytest.raises(InputError, match="one length for both"):
        to_peft(Adapter(kind="PROMPT_TUNING", parameters=ours), T5_GATED)
    with pytest.raises(InputError, match=r"needs encoder/prompt/shared"):
        to_peft(Adapter(kind="MULTITASK_PROMPT_TUNING", parameters=ours), T5_GATED)


def test_a_prompt_of_another_model_of_the_same_width_is_refused():
    adapter = Adapter(
        kind="PROMPT_TUNING", parameters={"decoder/prompt/prompt": normal(P, D)}
    )
    theirs = to_peft(adapter, LLAMA, base_model="some/llama")
    task = r"task_type CAUSAL_LM.* a decoder-only model, .*encoder-decoder.*some/llama"
    with pytest.raises(InputError, match=f"^here has {task}"):
        from_peft(theirs, T5_GATED, "here")
    deeper = dataclasses.replace(LLAMA, layers=3)
    with pytest.raises(InputError, match="num_layers 2, but the model has 3"):
        from_peft(theirs, deeper, "here")
    assert_same(from_peft(theirs, LLAMA, "here").parameters, adapter.parameters)
