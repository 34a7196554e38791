"""GGUF files are read as the Hugging Face models that they were made from.

llama.cpp's own conversion wrote the files, and transformers computed the logits before
(`scripts/make_gguf_fixtures.py`).
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.families.gguf.architectures import ARCHITECTURES, MIXTRAL
from prompt_tuning.families.hf_folder import open_stored, read_config
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.adapters import assert_same_logits, batch_of, our_logits, restored
from tests.support.exhaustive import sample
from tests.support.gguf_files import float_tensors, write_gguf

FOLDER = Path(__file__).parents[1] / "fixtures/gguf"
# Each of these rearranges tensors, or has settings, in a way of its own.
FIRST = (
    *("llama", "mixtral", "qwen2_moe", "gemma2", "gemma3_text", "phi3", "gpt2"),
    *("gpt_neox", "granite", "stablelm"),
)
MODELS = sorted(
    {architecture.model_type for architecture in (*ARCHITECTURES.values(), MIXTRAL)},
    key=lambda name: (name not in FIRST, name),
)
FIELDS = {
    "general.architecture": "llama",
    "llama.context_length": 16,
    "llama.embedding_length": 4,
    "llama.block_count": 1,
    "llama.feed_forward_length": 6,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd.weight": (5, 4),
    "output_norm.weight": (4,),
    **{f"blk.0.attn_{name}.weight": (4, 4) for name in ("q", "k", "v", "output")},
    **{f"blk.0.ffn_{name}.weight": (6, 4) for name in ("gate", "up")},
    "blk.0.ffn_down.weight": (4, 6),
    **{f"blk.0.{name}_norm.weight": (4,) for name in ("attn", "ffn")},
}


def written(folder, fields, shapes):
    arrays = {name: np.ones(shape) for name, shape in shapes.items()}
    kept = {name: value for name, value in fields.items() if value is not None}
    return write_gguf(folder / "x.gguf", kept, float_tensors(arrays))


@pytest.mark.slow
@pytest.mark.parametrize("model", sample(len(FIRST), MODELS))
def test_logits_are_those_of_transformers_before_the_conversion(model):
    graph, parameters = restored(FOLDER / f"{model}.gguf", None)
    given = dict(np.load(FOLDER / f"{model}.npz"))
    ours = our_logits(parameters, batch_of(given), graph=graph)
    assert_same_logits(ours, given["logits"], given)


def logits_of_pieces(**choices):
    source = Pretrained(checkpoint=str(FOLDER / "pieces.gguf"), **choices)
    model = open_pretrained(source, None, key=jax.random.key(0))
    given = dict(np.load(FOLDER / "pieces.npz"))
    parameters = model.read_parameters()
    return our_logits(parameters, batch_of(given), graph=model.graph), given


def test_quantized_weights_give_the_logits_that_transformers_reads_from_the_file():
    ours, given = logits_of_pieces(parameter_dtype="float32")
    assert_same_logits(ours, given["logits"], given)
    held, _ = logits_of_pieces()
    # Weights with offsets are rounded to bfloat16.
    masked = np.asarray(held) * given["attention_mask"][..., None]
    np.testing.assert_allclose(masked, given["logits"], atol=0.05)


def test_quantized_weights_stay_in_their_integers_where_they_have_no_offsets():
    config, _, _ = open_checkpoint(Pretrained(checkpoint=str(FOLDER / "pieces.gguf")))
    stores = {
        path.removeprefix("decoder/layers/").removesuffix("/kernel"): str(store)
        for path, store in config.stores
    }
    assert stores == {
        "token_embedder/embedding": "float16",
        "self_attention/query": "int8",
        "self_attention/key": "int8",
        "self_attention/value": "int4 in groups of 32",
        "self_attention/out": "bfloat16",
        "mlp/gate": "int8",
        "mlp/up": "bfloat16",
        # One layer is in four bits, and the other in eight.
        "mlp/down": "bfloat16",
        "head": "int8",
        **dict.fromkeys(("self_attention_norm/scale", "mlp_norm/scale"), "float32"),
        "decoder/final_norm/scale": "float32",
    }


def test_end_tokens_are_those_of_the_metadata(tmp_path):
    ids = {
        f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot"))
    }
    config = read_config(written(tmp_path, FIELDS | ids, SHAPES))
    assert (config.eos_id, config.stop_ids, config.bos_id) == (0, (1,), None)


def test_a_config_beside_the_file_is_followed(tmp_path):
    file = written(tmp_path, FIELDS, SHAPES)
    settings = '{"model_type": "%s", "vocab_size": 5, "hidden_size": 4,' + (
        '"intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,'
        '"num_key_value_heads": 2, "max_position_embeddings": 99, "rope_theta": 7.0,'
        '"sliding_window": 3}'
    )
    (tmp_path / "config.json").write_text(settings % "mistral")
    config = read_config(file)
    assert (config.family, config.window, config.rotary_base) == ("mistral", 3, 7.0)
    assert config.tied_head
    (tmp_path / "config.json").write_text(settings % "qwen2")
    with pytest.raises(InputError, match="expected 'llama' or 'mistral' or"):
        read_config(file)


WRONG = {
    "an unknown architecture": (
        {"general.architecture": "rwkv7"},
        {},
        "general.architecture = 'rwkv7', expected one of llama",
    ),
    "no architecture": ({"general.architecture": None}, {}, "no 'general.arch"),
    "a part of a model": ({"split.count": 2}, {}, "llama-gguf-split --merge"),
    "a missing size": ({"llama.context_length": None}, {}, "max_position_embeddings"),
    "a size that is a text": ({"llama.block_count": "1"}, {}, "num_hidden_layers"),
    "a size of each layer": ({"llama.feed_forward_length": [6, 6]}, {}, "interm"),
    "a setting that is not implemented": (
        {"llama.attention.clamp_kqv": 8.0},
        {},
        "clamp_kqv = 8.0, expected none",
    ),
    "an unknown scaling": ({"llama.rope.scaling.type": "x"}, {}, "linear, yarn or"),
    "no embedding table": ({}, {"token_embd.weight": None}, "no tensor token_embd"),
    "an unknown tensor": (
        {},
        {"blk.0.attn_sinks.weight": (2,)},
        "has the tensor 'blk.0.attn_sinks.weight', expected others",
    ),
    "more layers than it says": (
        {},
        {"blk.1.attn_norm.weight": (4,)},
        "'blk.1.attn_norm.weight', expected 1 layers",
    ),
    "rows that are no heads": (
        {},
        {"blk.0.attn_q.weight": (5, 4)},
        "'blk.0.attn_q.weight' has 5 rows, expected a multiple of 4",
    ),
    "divisors of another number": ({}, {"rope_freqs.weight": (3,)}, "expected 1, half"),
    "divisors in a matrix": ({}, {"rope_freqs.weight": (1, 1)}, "a divisor for each"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_followed_is_refused(tmp_path, case):
    fields, shapes, message = WRONG[case]
    shapes = {k: v for k, v in (SHAPES | shapes).items() if v is not None}
    file = written(tmp_path, FIELDS | fields, shapes)
    with pytest.raises(InputError, match=message) as caught:
        read_config(file)
        open_stored(file)
    assert str(file) in str(caught.value)
