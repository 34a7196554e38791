"""Folders as people have them: dtypes, names of settings, tokenizers, pickles."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.families import FAMILIES as KNOWN
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import find_tokenizer, open_checkpoint
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.pretrained import Pretrained
from tests.data.text.test_tokenizers import words_tokenizer
from tests.support.adapters import random_adapter

FAMILIES = Path(__file__).parents[1] / "fixtures/families"
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}


@pytest.fixture
def folder(tmp_path):
    return copied("llama", tmp_path)


def copied(family, tmp_path):
    return Path(shutil.copytree(FAMILIES / family / "base", tmp_path / family))


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


def change(folder, removed=(), **changes):
    settings = {k: v for k, v in settings_of(folder).items() if k not in removed}
    (folder / "config.json").write_text(json.dumps(settings | changes))


def read(folder):
    source = Pretrained(checkpoint=str(folder))
    return open_pretrained(source, key=jax.random.key(0)).read_parameters()


def test_decay_rates_that_a_minimax_lacks_are_those_of_transformers(tmp_path):
    """The fixture's were computed by transformers, which saves them as buffers."""
    folder = copied("minimax", tmp_path)
    stored = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in stored.items() if "slope_rate" not in name}
    assert len(kept) == len(stored) - 2
    expected = read(folder)["decoder/layers/lightning/decay_rate"]
    save_file(kept, folder / "model.safetensors")
    found = read(folder)["decoder/layers/lightning/decay_rate"]
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-7)


@pytest.mark.parametrize("setting", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
def test_stored_dtypes_are_cast_once_whatever_the_config_calls_them(
    setting, dtype, folder
):
    tensors = load_file(folder / "model.safetensors")
    stored = {name: array.astype(dtype) for name, array in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    change(folder, removed=("dtype",), **{setting: np.dtype(dtype).name})
    parameters = read(folder)
    assert {array.dtype for array in parameters.values()} == {np.dtype("f4")}
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        parameters["decoder/layers/mlp/up/kernel"][1], stored[name].T.astype("f4")
    )


@pytest.mark.parametrize("index", [False, True], ids=["one file", "with an index"])
def test_norms_of_the_first_berts_have_old_names(index, tmp_path):
    folder = copied("bert", tmp_path)
    expected, tensors = read(folder), load_file(folder / "model.safetensors")
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        new, old = f"LayerNorm.{new}", f"LayerNorm.{old}"
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    assert sum("LayerNorm.gamma" in name for name in tensors) > 4
    (folder / "model.safetensors").unlink()
    file = "model-00001-of-00001.safetensors" if index else "model.safetensors"
    save_file(tensors, folder / file)
    if index:
        names = {"weight_map": dict.fromkeys(tensors, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    # Those folders name no padding, and have settings of other programs.
    change(folder, removed=("pad_token_id",), directionality="bidi")
    found = read(folder)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def test_a_new_head_of_a_modernbert_without_one_has_a_norm_of_ones(tmp_path):
    folder = copied("modernbert", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    base = {k[6:]: x for k, x in tensors.items() if k.startswith("model.")}
    save_file(base, folder / "model.safetensors")
    tuning = Tuning(adapters=[ClassHead(labels=["low", "high"])])
    source = Pretrained(checkpoint=str(folder))
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    np.testing.assert_array_equal(
        model.read_parameters()["head/adapters/classes/dense_norm"], np.ones(8)
    )
    trained = {path.rpartition("/")[2] for path in model.plan.fresh}
    assert trained == {"kernel", "bias", "dense", "dense_norm"}


def test_a_bert_without_types_of_tokens_is_refused(tmp_path):
    folder = copied("bert", tmp_path)
    change(folder, type_vocab_size=0)
    with pytest.raises(InputError, match="type_vocab_size = 0"):
        read_config(folder)


def test_the_correction_that_chooses_experts_is_not_rounded():
    base = FAMILIES / "glm4_moe/base"
    stored = load_file(base / "model.safetensors")
    corrections = [x for name, x in stored.items() if "e_score_correction" in name]
    source = Pretrained(checkpoint=str(base), parameter_dtype="bfloat16")
    read = open_pretrained(source, key=jax.random.key(0)).read_parameters()
    np.testing.assert_array_equal(
        read["decoder/layers/mlp/router_correction"], np.stack(corrections)
    )
    assert read["decoder/layers/mlp/router/kernel"].dtype == ml_dtypes.bfloat16


def test_float8_weights_are_read_by_their_setting_alone(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"{name} in .* float8_e4m3fn.*unquantized"):
        read(folder)
    change(folder, quantization_config={"quant_method": "fp8"})
    _, _, stored = open_checkpoint(Pretrained(checkpoint=str(folder)))
    expected = tensors[name].astype(np.float32) / 2
    np.testing.assert_array_equal(stored[name].read(), expected)
    read(folder)


def test_a_folder_of_pickles_is_refused_with_the_command_that_converts_it(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickle.*from_pretrained\(.*save_pretrained"):
        read(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"full_attention": SCALED, "sliding_attention": LOCAL}},
        {
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ],
    ids=["by kind of layer", "before transformers 5"],
)
def test_bases_and_scalings_by_kind_of_layer_have_old_and_new_names(rope, tmp_path):
    folder = copied("gemma3_text", tmp_path)
    change(folder, removed=("rope_parameters",), **rope)
    config = read_config(folder)
    assert config.rotary_scaling is not None
    bases = (config.rotary_base, config.window_rotary_base)
    assert bases == (1000, 100)
    assert config == read_config(FAMILIES / "gemma3_text/base")


def test_the_text_model_of_a_folder_with_images_is_read_alone(tmp_path):
    folder = copied("gemma3", tmp_path)
    config = read_config(folder)
    assert (config.eos_id, config.stop_ids, config.pad_id) == (2, (19,), 0)
    source = Pretrained(checkpoint=str(folder))
    plan = open_pretrained(source, key=jax.random.key(0)).plan
    assert plan.ignored and all(
        name.startswith(("vision_tower.", "multi_modal_projector."))
        for name in plan.ignored
    )
    assert plan.ignored[0] in plan.report()
    # The published folders name only what differs from transformers' defaults.
    text = settings_of(folder)["text_config"]
    del text["query_pre_attn_scalar"], text["num_attention_heads"]
    change(folder, text_config=text)
    config = read_config(folder, tied_head=True)
    assert (config.heads, config.attention_multiplier) == (8, 256**-0.5)
    change(folder, text_config=text | {"hidden_activation": "relu"})
    with pytest.raises(InputError, match=r"text_config in .* has hidden_activation"):
        read_config(folder)


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl", "qwen3_5"])
def test_only_parts_that_read_images_are_ignored(family):
    source = Pretrained(checkpoint=str(FAMILIES / family / "base"))
    ignored = open_pretrained(source, key=jax.random.key(0)).plan.ignored
    unread = KNOWN[family].unread_parts
    assert {name.removeprefix("model.").split(".")[0] for name in ignored} == {*unread}


def test_experts_that_are_stored_together_are_those_stored_apart(tmp_path):
    """The published folders of Qwen 3.5 have a tensor of all experts of a layer."""
    folder = copied("qwen3_5_moe", tmp_path)
    apart, file = read(folder), folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(read_config(folder).layers):
        start = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{start}.{i}.{x}_proj.weight") for i in range(4)])
            for x in ("gate", "up", "down")
        )
        tensors[f"{start}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{start}.down_proj"] = down
    save_file(tensors, file)
    together = read(folder)
    assert together.keys() == apart.keys()
    for path, array in together.items():
        np.testing.assert_array_equal(array, apart[path], err_msg=path)


def test_experts_are_read_with_inputs_or_outputs_first(tmp_path):
    """The published folders of Qwen 3 VL have inputs first; transformers' have not."""
    folder = copied("qwen3_vl_moe", tmp_path)
    outputs_first, file = read(folder), folder / "model.safetensors"
    tensors = {
        name: array.swapaxes(1, 2).copy() if ".experts." in name else array
        for name, array in load_file(file).items()
    }
    save_file(tensors, file)
    inputs_first = read(folder)
    for path, array in inputs_first.items():
        np.testing.assert_array_equal(array, outputs_first[path], err_msg=path)


def test_a_head_of_its_own_needs_no_setting(tmp_path):
    """Published folders of Mistral Small 3.1 have a head and do not declare it."""
    folder = copied("mistral3", tmp_path)
    change(folder, removed=("tie_word_embeddings",))
    assert not read_config(folder).tied_head
    change(folder, tie_word_embeddings=True)
    with pytest.raises(InputError, match="differs"):
        read_config(folder)


def test_a_text_model_of_another_family_is_refused_by_name(tmp_path):
    folder = copied("mistral3", tmp_path)
    text = settings_of(folder)["text_config"]
    change(folder, text_config=text | {"model_type": "llama"})
    with pytest.raises(InputError, match=r"text_config.*'llama'.*'ministral3'"):
        read_config(folder)


def test_adapters_of_a_folder_with_images_name_modules_of_the_text_model():
    config = read_config(FAMILIES / "gemma3/base")
    targets = to_peft(random_adapter(config, "LORA"), config).settings["target_modules"]
    assert {"o_proj", "language_model.layers.0.self_attn.q_proj"} <= set(targets)
    image = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    assert not any(image.endswith(f".{name}") for name in targets)


def test_dynamic_scaling_changes_nothing_within_the_positions_of_the_model(folder):
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    usual = read_config(folder)
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    change(folder, rope_parameters=dynamic)
    assert read_config(folder) == usual
    assert usual.maximum_positions == 64
    del dynamic["factor"]
    change(folder, rope_parameters=dynamic)
    with pytest.raises(InputError, match=r"'dynamic' in rope_parameters.*'factor'"):
        read_config(folder)


def test_a_tokenizer_json_alone_puts_bos_first_as_transformers_does(folder):
    words_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    source = Pretrained(checkpoint=str(folder))
    tokenizer = find_tokenizer(source, read_config(folder))
    assert tokenizer is not None
    # Nothing in tokenizer.json has the role of EOS, which the model's settings name.
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.begin_ids) == (0, 2, (0,))
    assert tokenizer.encode("a b") == [3, 4, 3, 5]


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        (None, False),
        ("GPT2TokenizerFast", False),
        ("CodeGenTokenizer", False),
        ("BlenderbotTokenizer", True),
    ],
)
def test_merges_are_read_only_for_classes_whose_rules_are_known(
    written, refused, folder
):
    """Blenderbot puts a space before a text, which neither file describes."""
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    content = {} if written is None else {"tokenizer_class": written}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    source = Pretrained(checkpoint=str(folder))
    if refused:
        with pytest.raises(InputError, match=rf"{written}.*tokenizer\.json"):
            find_tokenizer(source, read_config(folder))
        return
    tokenizer = find_tokenizer(source, read_config(folder))
    assert tokenizer is not None and tokenizer.encode("aba") == [2, 0]
