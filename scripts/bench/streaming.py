"""What training over streamed weights takes: memory, time, and the loss it comes to.

    python -m scripts.bench.streaming

A random Llama of about 1.5 GB is written layer by layer into a temporary folder, and a
soft prompt is tuned on it for some steps by two processes: one streams the weights of
the blocks from the files, one has them in memory. Each counts, at every layer, the
bytes of all arrays on the device and the memory that belongs to the process alone
(mapped pages of files do not), and prints what it found as JSON.
"""

import argparse
import functools
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import return_freed_memory
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.families.hf_folder import find_recipes
from prompt_tuning.families.llama import llama_settings
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.pretrained.weight_storage import DEVICE, LOCATIONS, STREAMED
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.streaming.layered_weights import LayerReader
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import StreamedStep
from prompt_tuning.training.trainer import Step

MEGABYTE = 1e6
PROMPT_LENGTH = 20


def main() -> None:
    """Writes the model, measures in processes, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 8, "width": 1792, "steps": 3}
    sizes |= {"micro_batches": 2, "rows": 2, "length": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[STREAMED, DEVICE],
        choices=LOCATIONS,
        help="where they are kept, of each process",
    )
    parser.add_argument("--checkpoint", help="measure here, on this model, as JSON")
    options = parser.parse_args()
    if options.checkpoint is not None:
        print(json.dumps(measure(options, options.weights[0])))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = llama(options.layers, options.width)
        written = write_model(Path(folder), config)
        asked = [f"--{name}={getattr(options, name)}" for name in sizes]
        found = [in_a_process(folder, kind, asked) for kind in options.weights]
    show(config, written, found)


def llama(layers: int, width: int) -> ModelConfig:
    """A Llama whose blocks hold about `15 * width**2` numbers each."""
    return ModelConfig(
        family="llama",
        architecture="decoder_only",
        vocabulary_size=8_000,
        width=width,
        feed_forward_width=7 * width // 2,
        layers=layers,
        heads=width // 64,
        key_value_heads=width // 64,
        head_width=64,
        norm="rms",
        positions="rotary",
        activation="silu",
        gated=True,
        tied_head=True,
        maximum_positions=1024,
        bos_id=1,
        eos_id=2,
    )


def write_model(folder: Path, config: ModelConfig) -> int:
    """A random model, a file for each layer; gives its bytes."""
    _, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    random, recipes = np.random.default_rng(0), find_recipes(config)
    places, size = {}, 0
    for layer in (None, *range(config.layers)):
        arrays = {}
        for path, leaf in abstract.items():
            recipe = recipes[path]
            if recipe.stacked != (layer is None):
                # Stored per layer, with the axes of a kernel reversed.
                shape = leaf.shape[:0:-1] if recipe.stacked else leaf.shape
                name = recipe.sources[layer or 0]
                arrays[name] = _drawn(random, path, shape)
        file = f"model-{'rest' if layer is None else layer}.safetensors"
        save_file(arrays, folder / file)
        places |= dict.fromkeys(arrays, file)
        size += sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(llama_settings(config)))
    return size


def _drawn(random: np.random.Generator, path: str, shape: tuple[int, ...]):
    if path.endswith("scale"):
        return np.ones(shape, np.float32)
    return random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


def in_a_process(folder: str, weights: str, asked: list[str]) -> dict[str, Any]:
    """Measures in a fresh process, whose memory is its own."""
    command = [sys.executable, "-m", "scripts.bench.streaming", *asked]
    done = subprocess.run(
        [*command, "--checkpoint", folder, "--weights", weights],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Watch(threading.Thread):
    """The most that was there, of the device's bytes and of the process's memory.

    The device is looked at when it is called, memory all the time.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.device = self.memory = 0

    def __call__(self, layer: int = 0) -> None:
        """Looks at the device, once."""
        del layer
        live = sum(array.nbytes for array in jax.live_arrays())
        self.device = max(self.device, live)

    def run(self) -> None:
        """Looks at the memory until the process ends."""
        while True:
            self.memory = max(self.memory, anonymous())
            time.sleep(0.005)


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    """Trains here, and says what it took."""
    source = Pretrained(checkpoint=options.checkpoint, weights=weights)
    prompt = functools.partial(SoftPrompt, length=PROMPT_LENGTH)
    model = open_pretrained(source, Tuning(prompt=prompt), key=jax.random.key(0))
    path = "decoder/prompt/prompt"
    # What compiling anything takes once is not the weights'.
    jax.block_until_ready(jax.jit(lambda x: x @ x)(np.ones((256, 256), np.float32)))
    start = anonymous()
    frozen = model.read_parameters()
    loaded = anonymous()
    trained = {path: frozen.pop(path)}
    optimizer, watch = optax.adam(0.1), Watch()
    watch.start()
    step = make_step(model, optimizer, watch)
    state = TrainState.create(trained, optimizer, jax.random.key(0))
    batch = make_batch(options, model.config.vocabulary_size)
    losses, seconds, growth, between = [], [], [], []
    for _ in range(options.steps):
        watch.memory, before = 0, time.monotonic()
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.monotonic() - before)
        watch()
        growth.append(watch.memory - loaded)
        gc.collect()
        return_freed_memory()
        between.append(anonymous() - loaded)
    return {
        "weights": weights,
        "losses": losses,
        "seconds": seconds,
        "resident": sum(leaf.nbytes for leaf in frozen.values()),
        "device": watch.device,
        "reading": loaded - start,
        "growth": growth,
        "between": between,
    }


def make_step(
    model: PromptedModel, optimizer: optax.GradientTransformation, watch: Watch
) -> Step:
    """The library's step, watched at every layer where it streams them."""
    if not model.weight_storage.streamed:
        return compile_step(model.graph, optimizer, dropout=False)
    return StreamedStep(
        model.graph,
        optimizer,
        model.weight_storage.streamed,
        dropout=False,
        reader=LayerReader(watch),
    )


def make_batch(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Random rows, of which the last quarter is learned."""
    random = np.random.default_rng(1)
    lead = (options.micro_batches, options.rows)
    if options.micro_batches == 1:
        lead = lead[1:]
    tokens = random.integers(3, vocabulary, (*lead, options.length)).astype(np.int32)
    positions = np.arange(3 * options.length // 4, options.length, dtype=np.int32)
    return Batch(
        tokens=tokens,
        lengths=np.full(lead, options.length, np.int32),
        targets=tokens,
        loss_positions=np.broadcast_to(positions, (*lead, len(positions))),
        loss_weights=np.ones((*lead, len(positions)), np.float32),
        prefix_lengths=np.full(lead, positions[0], np.int32),
    )


def show(config: ModelConfig, written: int, found: list[dict[str, Any]]) -> None:
    """A column for each kind; memory in layers too."""
    table_bytes = config.vocabulary_size * config.width * 4
    layer = (written - table_bytes) / config.layers
    console = Console()
    console.print(
        f"{written / MEGABYTE:,.0f} MB: {config.layers} layers of "
        f"{layer / MEGABYTE:,.1f} MB and a table of {table_bytes / MEGABYTE:,.1f} MB"
    )

    def sized(size: float) -> str:
        return f"{size / MEGABYTE:,.0f} MB ({size / layer:.2f} layers)"

    table = Table("", *(one["weights"] for one in found))
    rows = {
        "always on the device": [sized(x["resident"]) for x in found],
        "most on the device": [sized(x["device"]) for x in found],
        "most but for those": [sized(x["device"] - x["resident"]) for x in found],
        "memory: reading": [sized(x["reading"]) for x in found],
        "memory: compiling, first step": [sized(x["growth"][0]) for x in found],
        "memory: kept of that": [sized(x["between"][0]) for x in found],
        "memory: a later step": [sized(_later(x)) for x in found],
        "seconds, first step": [f"{x['seconds'][0]:.1f}" for x in found],
        "seconds, later steps": [f"{min(x['seconds'][1:]):.1f}" for x in found],
        "losses": [" ".join(f"{x:.7f}" for x in one["losses"]) for one in found],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def _later(one: dict[str, Any]) -> int:
    """The most that a later step takes, beyond what there was when it began."""
    pairs = zip(one["growth"][1:], one["between"], strict=False)
    return max(most - before for most, before in pairs)


if __name__ == "__main__":
    main()
