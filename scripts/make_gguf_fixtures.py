"""Makes tiny GGUF files by llama.cpp's own conversion, with the logits of transformers.

    python scripts/make_gguf_fixtures.py LLAMA_CPP [NAME...] [--folder FOLDER]

LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp, whose
`convert_hf_to_gguf.py` writes the files; the source distribution of llama-cpp-python
contains one. For each architecture it writes

    NAME.gguf     a model with random weights, without a tokenizer
    NAME.npz      three rows of unlike length, and their logits before the conversion

Two more have a tokenizer and a chat template: `bytes` a byte-level one, and `pieces`
one of sentencepiece, whose weights are quantized, so that its logits are those of the
file in transformers. `tokenizers.json` has the ids that transformers gives to some
texts before the conversion. `blocks.npz` has random blocks of each quantized type, and
their numbers by the package `gguf`. Needs the `bench` extra with `gguf` installed, and
nothing of this package.
"""

# The imports are only in the `bench` extra and in LLAMA_CPP.
# pyright: reportMissingImports=false

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1]))  # if it is run as a file

import numpy as np
import torch
import transformers
from sentencepiece import sentencepiece_model_pb2

from scripts.make_fixtures import (
    DECODER,
    DEFAULT,
    GEMMA3,
    GPT2,
    LENGTHS,
    LLAMA3,
    NO_HEAD_DIM,
    VOCABULARY,
    randomize,
    rows,
)

FOLDER = Path(__file__).parents[1] / "tests/fixtures/gguf"
TOKENIZERS = FOLDER.parent / "tokenizers"
WIDE = NO_HEAD_DIM | {"hidden_size": 16, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": DECODER | {"rope_parameters": LLAMA3, "eos_token_id": [2, 19]},
    "mixtral": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": WIDE,
    "qwen3": DECODER | {"head_dim": 6, "tie_word_embeddings": True},
    "gemma": DECODER | {"head_dim": 6, "tie_word_embeddings": True},
    "gemma2": DECODER
    | {
        "head_dim": 6,
        "tie_word_embeddings": True,
        "sliding_window": 4,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": GEMMA3
    | {"query_pre_attn_scalar": 6, "num_hidden_layers": 6}
    # Six layers, since the file does not tell which have a window.
    | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "phi3": WIDE
    | {
        "sliding_window": 4,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.5, 3.0],
            "long_factor": [4.0, 9.0],
            "original_max_position_embeddings": 32,
        },
    },
    "gpt2": GPT2 | {"n_ctx": GPT2["n_positions"]},
    "gpt_neox": WIDE
    | {
        "num_attention_heads": 2,
        "rotary_pct": 0.5,
        # The file has no base, which is llama.cpp's default.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "starcoder2": WIDE
    | {
        "sliding_window": None,
        "tie_word_embeddings": True,
        "rope_parameters": DEFAULT,
    },
    "phi": WIDE | {"intermediate_size": 64, "num_key_value_heads": 4},
    "stablelm": WIDE
    | {
        "use_qkv_bias": True,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "olmo2": WIDE,
    "granite": WIDE
    | {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.8,
    },
    "cohere": WIDE
    | {
        "use_qk_norm": False,
        "tie_word_embeddings": True,
        "logit_scale": 0.5,
        "rope_parameters": DEFAULT,
    },
    "smollm3": WIDE | {"num_hidden_layers": 4, "attention_bias": True},
    "qwen2_moe": WIDE | EXPERTS | {"shared_expert_intermediate_size": 12},
    "olmoe": WIDE | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": DECODER | EXPERTS | {"num_hidden_layers": 2, "norm_topk_prob": True},
}
"""Settings of the models; only such as a file can have."""
WITH_TOKENIZER = {
    "bytes": WIDE
    | {"model_type": "qwen2", "vocab_size": 520}
    | {"bos_token_id": None, "eos_token_id": 512, "pad_token_id": 511},
    "pieces": WIDE
    | {
        # Its tokenizers encode as sentencepiece and llama.cpp do.
        "model_type": "mistral",
        "sliding_window": None,
        "vocab_size": 410,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    },
}
"""Settings of the models with a tokenizer."""
TYPES = {
    "token_embd": "F16",
    "output": "Q8_0",
    "attn_q": "Q8_0",
    "attn_k": "Q5_0",
    "attn_v": "Q4_0",
    "attn_output": "Q4_1",
    "ffn_gate": "Q8_0",
    "ffn_up": "Q5_1",
    "ffn_down": "Q4_0",
}
"""Types of the tensors of `pieces`, by their modules."""
MIXED = {"blk.1.ffn_down.weight": "Q8_0"}
"""Other types of single tensors."""
TURN = "<|im_start|>"
TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}<|im_start|>{{ message.role }}"
    "\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "Once  upon\n a time ",
    "The dog's 3 333 33333 apples, \u00e9t\u00e9!",
    "<|im_start|>user\nhi<|im_end|>\n",
    " \t\n\n  \u65e5\u672c\u8a9e\u0301 \U0001f999",
    "e\u0301 don't WE'LL x=y+1;//\r\n",
    "\u2581a  b</s><s>",
    "a",
    " ",
]
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""Types of blocks."""


def main() -> None:
    """Makes the files of the models on the command line."""
    parser = argparse.ArgumentParser(description="Make tiny GGUF files.")
    parser.add_argument("llama_cpp", type=Path, help="a checkout of llama.cpp")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    makers: dict[str, Any] = dict.fromkeys(MODELS, make_model)
    makers |= {"bytes": make_bytes, "pieces": make_pieces, "blocks": make_blocks}
    for name in arguments.names or makers:
        makers[name](arguments.folder, name)
        print(arguments.folder / name)


def make_model(folder: Path, name: str) -> None:
    """Writes the file of one model and its logits."""
    model = random_model({"model_type": name} | MODELS[name])
    given = rows(np.random.default_rng(0), VOCABULARY, LENGTHS)
    with torch.no_grad():
        logits = model(**given).logits * given["attention_mask"][..., None]
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        model.save_pretrained(base)
        vocabulary = {str(i): i for i in range(VOCABULARY)}
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (base / "tokenizer.json").write_text(json.dumps(tokenizer))
        convert(base, folder / f"{name}.gguf", MODELS[name])
    np.savez_compressed(
        folder / f"{name}.npz", logits=logits, **{k: v for k, v in given.items()}
    )


def random_model(settings: dict[str, Any]) -> Any:
    """Returns a model with random weights."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings), attn_implementation="eager"
    ).eval()
    randomize(model)
    return model


def make_bytes(folder: Path, name: str) -> None:
    """Writes a model with a byte-level tokenizer."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        random_model(WITH_TOKENIZER[name]).save_pretrained(base)
        for file in (TOKENIZERS / "byte_level").iterdir():
            shutil.copy(file, base)
        settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
        write_tokenizer(folder, name, base, settings)
        convert(base, folder / f"{name}.gguf", {}, split="qwen2")


def make_pieces(folder: Path, name: str) -> None:
    """Writes a quantized model with sentencepiece, and its logits."""
    settings = WITH_TOKENIZER[name]
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        random_model(settings).save_pretrained(base)
        pieces: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore
        pieces.ParseFromString((TOKENIZERS / "bpe/tokenizer.model").read_bytes())
        # As in the tokenizers of all Llamas; files do not have the setting.
        pieces.normalizer_spec.remove_extra_whitespaces = False
        (base / "tokenizer.model").write_bytes(pieces.SerializeToString())
        more = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
        more |= {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
        added = {TURN: 400, "<|im_end|>": 401}
        (base / "added_tokens.json").write_text(json.dumps(added))
        write_tokenizer(folder, name, base, more)
        convert(base, base / "wide.gguf", {}, split="default")
        quantize(base / "wide.gguf", folder / f"{name}.gguf")
    given = rows(np.random.default_rng(0), settings["vocab_size"], LENGTHS)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=f"{name}.gguf",
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.no_grad():
        logits = model(**given).logits * given["attention_mask"][..., None]
    np.savez_compressed(folder / f"{name}.npz", logits=logits, **dict(given))


def write_tokenizer(
    folder: Path, name: str, base: Path, settings: dict[str, Any]
) -> None:
    """Adds tokens and a template to a tokenizer, and writes the ids of some texts."""
    settings |= {
        "chat_template": TEMPLATE,
        "extra_special_tokens": [TURN, "<|im_end|>"],
    }
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(base)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    messages = [{"role": "user", "content": "Once upon a time"}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    file = folder / "tokenizers.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content[name] = {
        "texts": dict(zip(TEXTS, ids, strict=True)),
        "begin": tokenizer("a").input_ids[: -len(ids[TEXTS.index("a")])],
        "eos": tokenizer.eos_token_id,
        "chat": rendered,
        "chat_ids": tokenizer(rendered, add_special_tokens=False).input_ids,
    }
    file.write_text(json.dumps(content) + "\n")


def quantize(wide: Path, file: Path) -> None:
    """Writes a file with its tensors in other types."""
    import gguf

    reader = gguf.GGUFReader(wide)
    writer = gguf.GGUFWriter(file, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        further = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, further)
    for tensor in reader.tensors:
        module = tensor.name.split(".")[-2]
        name = MIXED.get(tensor.name, TYPES.get(module, "F32"))
        kind = gguf.GGMLQuantizationType[name]
        array = gguf.quants.quantize(np.asarray(tensor.data), kind)
        writer.add_tensor(tensor.name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_blocks(folder: Path, name: str) -> None:
    """Writes random blocks of each type, and their numbers by the package `gguf`."""
    import gguf
    from gguf.quants import dequantize

    random = np.random.default_rng(0)
    results = {}
    for kind in QUANTIZED:
        number = gguf.GGMLQuantizationType[kind]
        _, size = gguf.GGML_QUANT_SIZES[number]
        blocks = random.integers(0, 256, (64, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            numbers = dequantize(blocks, number)
        finite = np.flatnonzero(np.isfinite(numbers).all(1))[:4]
        results |= {
            f"{kind}.blocks": blocks[finite],
            f"{kind}.numbers": numbers[finite],
        }
    np.savez_compressed(folder / f"{name}.npz", **results)


def convert(
    base: Path, file: Path, more: dict[str, Any], *, split: str | None = None
) -> None:
    """Converts a folder by llama.cpp's own code, without rounding.

    Args:
      base: the Hugging Face folder.
      file: the file to write.
      more: settings that the conversion reads, and newer transformers leave out.
      split: name of the way in which the folder's tokenizer divides texts, which
        llama.cpp finds by the ids of a text; None to leave the tokenizer out.
    """
    import gguf
    from conversion import ModelBase, ModelType, get_model_class
    from conversion.base import get_model_architecture

    settings = more | ModelBase.load_hparams(base, False)
    kind = get_model_class(get_model_architecture(settings, ModelType.TEXT))

    class Converted(kind):
        model_arch = kind.model_arch

        def set_vocab(self) -> None:
            if split is not None:
                super().set_vocab()
            else:
                self._set_vocab_none()
                vocabulary = gguf.SpecialVocab(base)
                vocabulary.add_to_gguf(self.gguf_writer)

        def get_vocab_base_pre(self, tokenizer: Any) -> str:
            return str(split)

    with torch.inference_mode():
        kinds = {"hparams": settings, "model_name": "tiny"}
        Converted(base, gguf.LlamaFileType.ALL_F32, file, **kinds).write()


if __name__ == "__main__":
    main()
