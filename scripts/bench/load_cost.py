"""Measures the time and the memory that loading a checkpoint takes.

    python -m scripts.bench.load_cost

Writes a random Llama checkpoint of 1 GB in float32 and loads it with each type of
frozen weights, each in its own process. Linux only: peaks are read from `/proc`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from scripts.random_model import write_random_model

DTYPES = ("float32", "bfloat16", "int8")
MODEL = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=32_000,
    width=1024,
    feed_forward_width=2816,
    layers=16,
    heads=16,
    key_value_heads=16,
    head_width=64,
    norm="rms",
    positions="rotary",
    activation="silu",
    gated=True,
    tied_head=False,
    maximum_positions=2048,
    eos_id=2,
)


def main() -> None:
    """Measures each type in its own process, or one type in this process."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--checkpoint", help="existing checkpoint to load")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="measure only this type, and print JSON"
    )
    arguments = parser.parse_args()
    if arguments.dtype is not None:
        print(json.dumps(load(arguments.checkpoint, arguments.dtype)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            write_random_model(Path(folder), MODEL)
        checkpoint = arguments.checkpoint or folder
        show([in_a_process(checkpoint, dtype) for dtype in DTYPES])


def in_a_process(checkpoint: str, dtype: str) -> dict:
    """Loads in a new process, so that its peak includes nothing else."""
    command = [
        sys.executable,
        "-m",
        "scripts.bench.load_cost",
        "--checkpoint",
        checkpoint,
    ]
    done = subprocess.run(
        [*command, "--dtype", dtype], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def load(checkpoint: str, dtype: str) -> dict:
    """Loads in this process; returns bytes, and the growth of the process's memory."""
    source = Pretrained(checkpoint=checkpoint, parameter_dtype=dtype)
    model = open_pretrained(source, key=jax.random.key(0))
    largest = max(tensor.bytes for tensor in model.plan.stored.values())
    jax.block_until_ready(jax.numpy.zeros(1))
    before, started = memory("VmRSS"), time.monotonic()
    parameters = jax.block_until_ready(model.read_parameters())
    return {
        "dtype": dtype,
        "seconds": time.monotonic() - started,
        "weights": sum(leaf.nbytes for leaf in parameters.values()),
        "largest": largest,
        "peak": memory("VmHWM") - before,
        "after": memory("VmRSS") - before,
    }


def memory(name: str) -> int:
    """Returns a value of `/proc/self/status` in bytes, mapped file pages included."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def show(rows: list[dict]) -> None:
    """Prints a row for each type."""
    headings = ("weights as", "seconds", "weights", "peak memory", "peak / weights")
    table = Table(*headings, title="MB")
    for row in rows:
        sizes = [f"{row[name] / 1e6:,.0f}" for name in ("weights", "peak")]
        ratio = f"{row['peak'] / row['weights']:.2f}"
        table.add_row(row["dtype"], f"{row['seconds']:.1f}", *sizes, ratio)
    console = Console()
    console.print(table)
    console.print(f"largest stored array: {rows[0]['largest'] / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
