"""Makes tiny GGUF files by llama.cpp's own conversion, with the logits of transformers.

    python scripts/make_gguf_fixtures.py LLAMA_CPP [NAME...] [--folder FOLDER]

LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp, whose
`convert_hf_to_gguf.py` writes the files; the source distribution of llama-cpp-python
contains one. For each architecture it writes

    NAME.gguf     a model with random weights, without a tokenizer
    NAME.npz      three rows of unlike length, and their logits before the conversion

and for each tokenizer NAME.gguf, with one more file, `tokenizers.json`: the ids that
transformers gives to some texts. `blocks.npz` has random blocks of each quantized type,
and their numbers by the package `gguf`. Needs the `bench` extra, and nothing of this
package.
"""

# The imports are only in the `bench` extra and in LLAMA_CPP.
# pyright: reportMissingImports=false

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1]))  # if it is run as a file

import numpy as np
import torch
import transformers

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
    "qwen3_moe": DECODER | EXPERTS | {"num_hidden_layers": 2, "norm_topk_prob": True},
}
"""Settings of the models; only such as a file can have."""
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
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
    makers = {name: make_model for name in MODELS} | {"blocks": make_blocks}
    for name in arguments.names or makers:
        makers[name](arguments.folder, name)
        print(arguments.folder / name)


def make_model(folder: Path, name: str) -> None:
    """Writes the file of one model and its logits."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**({"model_type": name} | MODELS[name]))
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    randomize(model)
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
    base: Path, file: Path, more: dict[str, Any], *, with_tokenizer: bool = False
) -> None:
    """Converts a folder by llama.cpp's own code, without rounding.

    Args:
      base: the Hugging Face folder.
      file: the file to write.
      more: settings that the conversion reads, and newer transformers leave out.
      with_tokenizer: whether the file gets the folder's tokenizer.
    """
    import gguf
    from conversion import ModelBase, ModelType, get_model_class
    from conversion.base import get_model_architecture

    settings = more | ModelBase.load_hparams(base, False)
    kind = get_model_class(get_model_architecture(settings, ModelType.TEXT))

    class Converted(kind):
        model_arch = kind.model_arch

        def set_vocab(self) -> None:
            if with_tokenizer:
                super().set_vocab()
            else:
                self._set_vocab_none()
                vocabulary = gguf.SpecialVocab(base)
                vocabulary.add_to_gguf(self.gguf_writer)

    with torch.inference_mode():
        kinds = {"hparams": settings, "model_name": "tiny"}
        Converted(base, gguf.LlamaFileType.ALL_F32, file, **kinds).write()


if __name__ == "__main__":
    main()
