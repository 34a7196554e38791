"""Measures the memory and the time of a step on frozen weights in few bits.

    python -m scripts.bench.quantized_memory 1b
    python -m scripts.bench.quantized_memory 8b --dtypes nf4+tables --folder /scratch

A random model of a Llama shape is written in bfloat16, in one file per layer, and two
steps of a soft prompt of 20 vectors are run on one row of 128 tokens by the command
`train`, once with each type of weights. The memory is the peak of the whole process,
with Python, JAX and the pages of the model's files that the system counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from scripts.bench.machine import processor

VOCABULARY, TOKENS, PROMPT = 32_000, 128, 20


DTYPES = ["bfloat16", "int8", "nf4", "nf4+tables"]
"""Types of weights; after `+` is what else has them."""


class Shape(NamedTuple):
    """Sizes of a Llama model."""

    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 512),
    "1b": Shape(2048, 5632, 22, 32, 4, VOCABULARY),
    "8b": Shape(4096, 14336, 32, 32, 8, 128_256),
}


def write_model(folder: Path, shape: Shape) -> None:
    """Writes a random model, unless the folder has one."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    head_width = shape.width // shape.heads
    inner = {
        "self_attn.q_proj": (shape.width, shape.width),
        "self_attn.k_proj": (shape.key_value_heads * head_width, shape.width),
        "self_attn.v_proj": (shape.key_value_heads * head_width, shape.width),
        "self_attn.o_proj": (shape.width, shape.width),
        "mlp.gate_proj": (shape.inner, shape.width),
        "mlp.up_proj": (shape.inner, shape.width),
        "mlp.down_proj": (shape.width, shape.inner),
    }
    files = {
        "model-embedding": {
            "model.embed_tokens.weight": (shape.vocabulary, shape.width),
            "lm_head.weight": (shape.vocabulary, shape.width),
            "model.norm.weight": (shape.width,),
        }
    }
    for layer in range(shape.layers):
        before = f"model.layers.{layer}"
        norms = ("input_layernorm", "post_attention_layernorm")
        files[f"model-{layer}"] = {
            **{f"{before}.{name}.weight": size for name, size in inner.items()},
            **{f"{before}.{name}.weight": (shape.width,) for name in norms},
        }
    random = np.random.default_rng(0)
    drawn = random.standard_normal(2**20, np.float32) / shape.width**0.5
    for file, tensors in files.items():
        arrays = {}
        for name, size in tensors.items():
            if len(size) == 1:
                arrays[name] = np.ones(size, ml_dtypes.bfloat16)
            else:
                start = random.integers(len(drawn))
                values = np.resize(np.roll(drawn, start), size)
                arrays[name] = values.astype(ml_dtypes.bfloat16)
        save_file(arrays, folder / f"{file}.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run(folder: Path, dtype: str, work: Path) -> tuple[float, float, float]:
    """Returns GB of the peak, seconds of all, and seconds of the last step."""
    data = work / "row.jsonl"
    # The bundled model's tokens are letters.
    row = {"prompt": "a" * (TOKENS - 10), "completion": "b" * 8}
    data.write_text(f"{json.dumps(row)}\n")
    out = work / dtype
    dtype, *tables = dtype.split("+")
    command = [sys.executable, "-m", "prompt_tuning", "train", "--model", str(folder)]
    command += ["--tokenizer", "bundled:skills-decoder", "--train", str(data)]
    command += ["--parameter_dtype", dtype, "--compute_dtype", "bfloat16"]
    command += ["--prompt_length", str(PROMPT), "--batch_size", "1", "--steps", "3"]
    command += ["--gin.Run.log_every=1", "--out", str(out)]
    command += [f"--quantized_{part}" for part in tables]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"train ended with {os.waitstatus_to_exitcode(status)}")
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    step = TOKENS / last["tokens_per_second"]
    return usage.ru_maxrss / 1e6, time.perf_counter() - started, step


def main() -> None:
    """Writes the model and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--folder", type=Path, help="parent of the random model")
    options = parser.parse_args()
    table = Table("weights", "peak GB", "seconds in all", "seconds of a step")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / options.shape
        write_model(folder, SHAPES[options.shape])
        for dtype in options.dtypes:
            peak, total, step = run(folder, dtype, Path(scratch))
            table.add_row(dtype, f"{peak:.2f}", f"{total:.0f}", f"{step:.1f}")
    Console().print(processor(), table, sep="\n")


if __name__ == "__main__":
    main()
