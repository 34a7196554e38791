import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.core.errors import InputError
from prompt_tuning.families import hf_folder
from tests.support.expected_shapes import abstract
from tests.support.shared_data import FIXTURES, SHARED

PEFT = FIXTURES / "peft"
FOLDERS = {
    case: PEFT / case / "base"
    for case in (
        "llama_tied",
        "llama_gqa_untied",
        "qwen2_bias_tied",
        "gpt2_tied",
        "t5v11_untied_gated",
        "t5_orig_tied_relu",
    )
}
LLAMA_TIED = FOLDERS["llama_tied"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 32,
    "vocab_size": 16,
}
T5 = {
    "model_type": "t5",
    "d_model": 8,
    "d_ff": 12,
    "d_kv": 3,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 4,
    "vocab_size": 16,
}


def write(folder: Path, config: dict, **files: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, arrays in files.items():
        save_file(arrays, folder / f"{name}.safetensors")
    return folder


def restore(folder: Path, **overrides):
    config = hf_folder.read_config(folder, **overrides)
    stored = open_safetensors(folder)
    plan = plan_restore(
        abstract(config), hf_folder.find_recipes(config, stored), stored
    )
    return plan, plan.restore()


@pytest.mark.parametrize("case", FOLDERS)
def test_every_array_is_restored_and_every_tensor_used(case):
    plan, restored = restore(FOLDERS[case])
    raw = load_file(FOLDERS[case] / "model.safetensors")
    assert not plan.fresh
    assert plan.ignored == ()
    assert sum(map(np.size, restored.values())) == sum(map(np.size, raw.values()))


@pytest.mark.released
def test_stories260k_has_the_published_number_of_parameters():
    _, restored = restore(SHARED / "data/models/stories260k")
    assert sum(map(np.size, restored.values())) == 260_032


@pytest.mark.parametrize("case", ["llama_tied", "llama_gqa_untied", "qwen2_bias_tied"])
def test_llama_layers_are_stacked_and_transposed_bit_for_bit(case):
    _, restored = restore(FOLDERS[case])
    raw = load_file(FOLDERS[case] / "model.safetensors")
    for layer in range(restored["decoder/layers/mlp/up/kernel"].shape[0]):
        stored = f"model.layers.{layer}."
        for ours, theirs in {
            "self_attention/query/kernel": "self_attn.q_proj.weight",
            "self_attention/key/kernel": "self_attn.k_proj.weight",
            "self_attention/value/kernel": "self_attn.v_proj.weight",
            "self_attention/out/kernel": "self_attn.o_proj.weight",
            "mlp/gate/kernel": "mlp.gate_proj.weight",
            "mlp/up/kernel": "mlp.up_proj.weight",
            "mlp/down/kernel": "mlp.down_proj.weight",
            "self_attention_norm/scale": "input_layernorm.weight",
            "mlp_norm/scale": "post_attention_layernorm.weight",
        }.items():
            np.testing.assert_array_equal(
                restored[f"decoder/layers/{ours}"][layer], raw[stored + theirs].T
            )
    embedding = raw["model.embed_tokens.weight"]
    np.testing.assert_array_equal(restored["token_embedder/embedding"], embedding)
    if case == "llama_gqa_untied":
        np.testing.assert_array_equal(restored["head/kernel"], raw["lm_head.weight"])
    if case == "qwen2_bias_tied":
        np.testing.assert_array_equal(
            restored["decoder/layers/self_attention/value/bias"][1],
            raw["model.layers.1.self_attn.v_proj.bias"],
        )


def test_gpt2_has_the_same_projections_split_and_fused():
    _, restored = restore(FOLDERS["gpt2_tied"])
    raw = load_file(FOLDERS["gpt2_tied"] / "model.safetensors")
    parts = ("query", "key", "value")
    for kind, theirs in (("kernel", "weight"), ("bias", "bias")):
        ours = [restored[f"decoder/layers/self_attention/{p}/{kind}"] for p in parts]
        assert ours[0].shape[-1] == 16
        for layer in range(2):
            np.testing.assert_array_equal(
                np.concatenate([part[layer] for part in ours], axis=-1),
                raw[f"transformer.h.{layer}.attn.c_attn.{theirs}"],
            )
    np.testing.assert_array_equal(
        restored["decoder/layers/mlp/down/kernel"][1],
        raw["transformer.h.1.mlp.c_proj.weight"],
    )


@pytest.mark.parametrize("case", ["t5v11_untied_gated", "t5_orig_tied_relu"])
def test_t5_values_come_from_the_right_names(case):
    _, restored = restore(FOLDERS[case])
    raw = load_file(FOLDERS[case] / "model.safetensors")
    plain = "wi_1" if case == "t5v11_untied_gated" else "wi"
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for path, name in {
        "encoder/relative_position_bias/embedding": f"encoder.{bias}",
        "decoder/relative_position_bias/embedding": f"decoder.{bias}",
        "encoder/layers/mlp/up/kernel": (
            f"encoder.block.1.layer.1.DenseReluDense.{plain}.weight"
        ),
        "decoder/layers/mlp/up/kernel": (
            f"decoder.block.1.layer.2.DenseReluDense.{plain}.weight"
        ),
        "decoder/layers/cross_attention/key/kernel": (
            "decoder.block.1.layer.1.EncDecAttention.k.weight"
        ),
        "decoder/layers/cross_attention_norm/scale": (
            "decoder.block.1.layer.1.layer_norm.weight"
        ),
    }.items():
        ours = restored[path] if "bias" in path else restored[path][1]
        np.testing.assert_array_equal(ours, raw[name].T)


def test_configs_describe_the_fixtures():
    configs = {case: hf_folder.read_config(path) for case, path in FOLDERS.items()}
    llama = configs["llama_tied"]
    assert (llama.heads, llama.key_value_heads, llama.head_width) == (4, 2, 4)
    assert (llama.bos_id, llama.eos_id, llama.pad_id) == (1, 2, 0)
    assert llama.tied_head and llama.maximum_positions == 64
    assert configs["qwen2_bias_tied"].biases == "qkv"
    assert configs["gpt2_tied"].activation == "gelu_tanh"
    assert configs["gpt2_tied"].feed_forward_width == 4 * 16
    original, gated = configs["t5_orig_tied_relu"], configs["t5v11_untied_gated"]
    assert (original.tied_head, original.scale_tied_hidden) == (True, True)
    assert (gated.tied_head, gated.scale_tied_hidden) == (False, False)
    assert (gated.activation, gated.gated) == ("gelu_tanh", True)
    assert (original.activation, original.gated) == ("relu", False)
    assert original.eos_id == 1


@pytest.mark.parametrize("case", ["gpt2_tied", "llama_tied", "qwen2_bias_tied"])
def test_a_tied_model_may_store_its_head_alone(case, tmp_path):
    """As in transformers; safetensors writes one of two tensors that share memory."""
    source = FOLDERS[case]
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    (table,) = (name for name in tensors if "wte" in name or "embed_tokens" in name)
    tensors["lm_head.weight"] = tensors.pop(table)
    save_file(tensors, tmp_path / "model.safetensors")
    restored = restore(tmp_path)[1]
    for path, array in restore(source)[1].items():
        np.testing.assert_array_equal(restored[path], array)


@pytest.mark.parametrize("case", ["gpt2_tied", "llama_tied"])
def test_names_may_lack_the_base_models_prefix(case, tmp_path):
    raw = load_file(FOLDERS[case] / "model.safetensors")
    bare = {name.partition(".")[2]: array for name, array in raw.items()}
    save_file(bare, tmp_path / "model.safetensors")
    shutil.copy(FOLDERS[case] / "config.json", tmp_path)
    plan, restored = restore(tmp_path)
    assert plan.ignored == ()
    for path, array in restore(FOLDERS[case])[1].items():
        np.testing.assert_array_equal(restored[path], array)


def test_several_files_are_read_as_one_with_and_without_an_index(tmp_path):
    raw = load_file(LLAMA_TIED / "model.safetensors")
    names = sorted(raw)
    halves = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in halves.items():
        save_file({name: raw[name] for name in part}, tmp_path / file)
    shutil.copy(LLAMA_TIED / "config.json", tmp_path)
    without = restore(tmp_path)[1]
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({names[0]: np.zeros(1)}, tmp_path / "other.safetensors")
    with_index = restore(tmp_path)[1]
    for path, array in restore(LLAMA_TIED)[1].items():
        np.testing.assert_array_equal(without[path], array)
        np.testing.assert_array_equal(with_index[path], array)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"'model-00002-of-00002.safetensors', which"):
        open_safetensors(tmp_path)


def test_one_name_in_two_files_is_refused(tmp_path):
    for file in ("a", "b"):
        save_file({"x": np.zeros(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(InputError, match=r"x is in both .*a\.safetensors and .*b\."):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float64, np.int32, np.bool_]
)
def test_stored_dtypes_are_read_as_they_are(dtype, tmp_path):
    # An odd number of preceding bytes leaves the rest unaligned.
    array = np.arange(12).reshape(3, 4).astype(dtype)
    arrays = {"a": np.zeros(3, np.int8), "b": array, "empty": np.zeros((0, 2), dtype)}
    save_file(arrays, tmp_path / "model.safetensors")
    stored = open_safetensors(tmp_path)
    assert stored["b"].dtype == dtype
    np.testing.assert_array_equal(stored["b"].read(), array)
    assert stored["empty"].read().shape == (0, 2)


@pytest.mark.parametrize("kept", [0, 4, 8, 20, 90, -1])
def test_a_truncated_file_is_refused_with_its_sizes(kept, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": np.ones((4, 4), np.float32)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    size = len(whole[:kept])
    with pytest.raises(InputError) as raised:
        open_safetensors(tmp_path)
    message = str(raised.value)
    assert str(file) in message and f"{size:,} bytes" in message
    header_end = 8 + int.from_bytes(whole[:8], "little")
    if size > 8:
        expected = header_end if size < header_end else len(whole)
        assert f"{expected:,}" in message


def test_a_longer_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(4, np.float32)}, file)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(InputError, match="damaged"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "dtype = 'F4'"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "12 bytes"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        (7, "invalid header entry"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(entry, expected, tmp_path):
    header = json.dumps({"x": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InputError, match=expected):
        open_safetensors(tmp_path)


def test_folders_that_are_not_checkpoints_are_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a folder"):
        open_safetensors(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json is missing"):
        hf_folder.read_config(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"only pytorch_model\.bin.*pickle"):
        open_safetensors(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(InputError, match="Git LFS"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "rwkv"}, "'rwkv', expected one of the .*README.md, such as l"),
        (LLAMA | {"hidden_size": None}, "no 'hidden_size'"),
        (LLAMA | {"hidden_act": "mish"}, "'mish'"),
        ({"model_type": "lama"}, "such as llama"),
        (
            LLAMA | {"quantization_config": {}},
            "quantization_config.* has no 'quant_method'",
        ),
        (LLAMA | {"eos_token_id": [2, "3"]}, r"eos_token_id = \[2, '3'\]"),
        (LLAMA | {"eos_token_id": [2] * 65}, "65 end tokens, expected at most 64"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (
            LLAMA
            | {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            "no 'sliding_window'",
        ),
        ({"model_type": "deepseek_v2"}, "'deepseek_v2', expected one of"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (
            T5 | {"final_logit_softcapping": 30.0},
            "expected None: this family has",
        ),
        (GPT2 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "not implemented"),
        (T5 | {"feed_forward_proj": "split-relu"}, "'split-relu'"),
    ],
)
def test_an_invalid_config_is_refused(config, expected, tmp_path):
    write(tmp_path, config)
    with pytest.raises(InputError, match=expected):
        hf_folder.read_config(tmp_path, tied_head=True)


@pytest.mark.parametrize("cap", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_a_cap_of_none_changes_nothing(cap, tmp_path):
    write(tmp_path, LLAMA | {cap: None})
    assert hf_folder.read_config(tmp_path, tied_head=True).layers == 1


def test_invalid_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        hf_folder.read_config(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_the_rotary_base_has_one_of_two_keys(rope, tmp_path):
    write(tmp_path, LLAMA | rope)
    assert hf_folder.read_config(tmp_path, tied_head=True).rotary_base == 500_000


def test_ids_come_from_the_generation_config_if_the_config_has_none(tmp_path):
    write(tmp_path, LLAMA | {"bos_token_id": 5, "eos_token_id": None})
    generation = {"bos_token_id": 6, "eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = hf_folder.read_config(tmp_path, tied_head=True)
    assert (config.bos_id, config.eos_id) == (5, 7)
    assert hf_folder.read_config(tmp_path, tied_head=True, eos_id=9).eos_id == 9


def test_every_end_token_of_a_list_stops_generation(tmp_path):
    """Llama 3's instruct folders list several tokens; transformers stops at any."""
    write(tmp_path, LLAMA | {"eos_token_id": [3, 4]})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    config = hf_folder.read_config(tmp_path, tied_head=True)
    assert (config.eos_id, config.stop_ids) == (3, (4, 5))
    config = hf_folder.read_config(tmp_path, tied_head=True, eos_id=9)
    assert (config.eos_id, config.stop_ids) == (9, (3, 4, 5))


TABLE = np.arange(128, dtype=np.float32).reshape(16, 8)


@pytest.mark.parametrize(
    ("config", "head", "expected"),
    [
        (T5, None, (True, True)),
        (T5, TABLE, (True, True)),
        (T5 | {"tie_word_embeddings": False}, TABLE + 1, (False, False)),
        (T5 | {"tie_word_embeddings": False}, None, (True, False)),
        (T5 | {"scale_decoder_outputs": False}, TABLE + 1, (False, False)),
        (LLAMA, TABLE, (True, False)),
        (LLAMA | {"tie_word_embeddings": False}, TABLE, (False, False)),
    ],
)
def test_the_checkpoint_decides_whether_the_head_is_tied(
    config, head, expected, tmp_path
):
    t5 = config["model_type"] == "t5"
    arrays = {"shared.weight" if t5 else "model.embed_tokens.weight": TABLE}
    if head is not None:
        arrays["lm_head.weight"] = head.copy()
    write(tmp_path, config, model=arrays)
    read = hf_folder.read_config(tmp_path)
    assert (read.tied_head, read.scale_tied_hidden) == expected


@pytest.mark.parametrize("config", [LLAMA, T5])
def test_a_tied_head_that_differs_is_refused(config, tmp_path):
    t5 = config["model_type"] == "t5"
    name = "shared.weight" if t5 else "model.embed_tokens.weight"
    write(tmp_path, config, model={name: TABLE, "lm_head.weight": TABLE + 1})
    with pytest.raises(InputError, match=r"lm_head\.weight in .* differs"):
        hf_folder.read_config(tmp_path)
    assert hf_folder.read_config(tmp_path, tied_head=False).tied_head is False


def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(tmp_path):
    base = FIXTURES / "families/deepseek_v3/base"
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    settings = json.loads((base / "config.json").read_text())
    settings["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert hf_folder.read_config(tmp_path) == hf_folder.read_config(base)
