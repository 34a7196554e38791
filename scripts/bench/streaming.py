"""Measures training with streamed weights: memory, time and losses.

    python -m scripts.bench.streaming
    python -m scripts.bench.streaming --full --steps 5

Writes a random Llama of about 1.5 GB layer by layer into a temporary folder. Two
processes tune a soft prompt on it for a few steps: one streams the weights of the
blocks from the files, the other has them in memory. At every layer each process samples
the bytes of all arrays on the device and its anonymous memory (without mapped file
pages), and prints its measurements as JSON. With `--full` both train all weights of the
model with AdamW: one keeps them, their gradients and their moments in host memory.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import return_freed_memory
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import ParameterGroup, adamw
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.families.hf_folder import find_recipes
from prompt_tuning.families.llama import llama_settings
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.pretrained.weight_storage import DEVICE, STREAMED
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained, WeightLocation
from prompt_tuning.streaming.compiled_segments import CompiledOnce
from prompt_tuning.streaming.layered_weights import LayerReader
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import streamed_step

MEGABYTE = 1e6
PROMPT_LENGTH = 20


def main() -> None:
    """Writes the model, measures in separate processes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 8, "width": 1792, "steps": 3}
    sizes |= {"micro_batches": 2, "rows": 2, "length": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[STREAMED, DEVICE],
        choices=get_args(WeightLocation),
        help="location of the weights in each process",
    )
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--checkpoint", help="measure this model in this process")
    options = parser.parse_args()
    if options.checkpoint is not None:
        measured = measure_full if options.full else measure
        print(json.dumps(measured(options, options.weights[0])))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = llama(options.layers, options.width)
        written = write_model(Path(folder), config)
        size_options = [f"--{name}={getattr(options, name)}" for name in sizes]
        size_options += ["--full"] * options.full
        results = [in_a_process(folder, kind, size_options) for kind in options.weights]
    show(config, written, results)


def llama(layers: int, width: int) -> ModelConfig:
    """Describes a Llama with about `15 * width**2` parameters per block."""
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
    """Writes a random model with one file per layer; returns its bytes."""
    _, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    random, recipes = np.random.default_rng(0), find_recipes(config)
    weight_map, size = {}, 0
    for layer in (None, *range(config.layers)):
        arrays = {}
        for path, leaf in abstract.items():
            recipe = recipes[path]
            if recipe.stacked != (layer is None):
                # Files have one array per layer; a kernel's axes are reversed.
                shape = leaf.shape[:0:-1] if recipe.stacked else leaf.shape
                name = recipe.sources[layer or 0]
                arrays[name] = _drawn(random, path, shape)
        file = f"model-{'rest' if layer is None else layer}.safetensors"
        save_file(arrays, folder / file)
        weight_map |= dict.fromkeys(arrays, file)
        size += sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(llama_settings(config)))
    return size


def _drawn(random: np.random.Generator, path: str, shape: tuple[int, ...]):
    if path.endswith("scale"):
        return np.ones(shape, np.float32)
    return random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


def in_a_process(folder: str, weights: str, size_options: list[str]) -> dict[str, Any]:
    """Measures in a new process, so that its memory includes nothing else."""
    command = [sys.executable, "-m", "scripts.bench.streaming", *size_options]
    done = subprocess.run(
        [*command, "--checkpoint", folder, "--weights", weights],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Watch(threading.Thread):
    """Peak bytes on the device and peak memory of the process.

    The device is sampled when the object is called, the memory continuously.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.device = self.memory = 0

    def __call__(self, layer: int = 0) -> None:
        """Samples the device once."""
        del layer
        live = sum(array.nbytes for array in jax.live_arrays())
        self.device = max(self.device, live)

    def run(self) -> None:
        """Samples the memory until the process ends."""
        while True:
            self.memory = max(self.memory, anonymous())
            time.sleep(0.005)


def anonymous() -> int:
    """Returns the bytes of this process's anonymous memory."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure(options: argparse.Namespace, weights: WeightLocation) -> dict[str, Any]:
    """Trains a prompt in this process; returns times, memory and losses."""
    source = Pretrained(checkpoint=options.checkpoint, weights=weights)
    prompt = functools.partial(SoftPrompt, length=PROMPT_LENGTH)
    model = open_pretrained(source, Tuning(prompt=prompt), key=jax.random.key(0))
    path = "decoder/prompt/prompt"
    # Compile once first, to exclude the compiler's own memory.
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


def measure_full(
    options: argparse.Namespace, weights: WeightLocation
) -> dict[str, Any]:
    """Trains all weights of the model; returns times, memory and losses."""
    run = Run(
        directory="not written",
        model=Pretrained(
            checkpoint=options.checkpoint,
            weights=weights,
            trained_weights="host" if weights == STREAMED else "device",
        ),
        groups=[ParameterGroup([".*"], adamw(1e-4))],
    )
    plan, watch = plan_run(run), Watch()
    batch = make_batch(options, plan.model.config.vocabulary_size)
    watch.start()
    start = anonymous()
    state = plan.start(plan.model.read_parameters())
    loaded = anonymous()
    if plan.model.weight_storage.by_layer:
        CompiledOnce.__call__ = watched(CompiledOnce.__call__, watch)
        step: Any = streamed_step(
            plan.model.graph,
            plan.optimizer_of([]),
            {},
            dropout=False,
            reader=LayerReader(watch),
            host=plan.host_optimizer(),
        )
    else:
        step = compile_step(plan.model.graph, plan.optimizer, dropout=False)
    losses, seconds, growth, between = [], [], [], []
    for _ in range(options.steps):
        watch.memory, before = 0, time.monotonic()
        state, metrics = step(state, {}, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.monotonic() - before)
        watch()
        growth.append(watch.memory - loaded)
        between.append(anonymous() - loaded)
    return {
        "weights": weights,
        "losses": losses,
        "seconds": seconds,
        "resident": 0,
        "device": watch.device,
        "reading": loaded - start,
        "growth": growth,
        "between": between,
    }


def watched(call: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """Samples the device while the outputs of each layer's program are there."""

    def run(*arguments: Any) -> Any:
        outputs = jax.block_until_ready(call(*arguments))
        watch()
        return outputs

    return run


def make_step(
    model: PromptedModel, optimizer: optax.GradientTransformation, watch: Watch
) -> Callable[..., Any]:
    """Returns the library's step, sampled at every layer if it streams the weights."""
    if not model.weight_storage.streamed:
        return compile_step(model.graph, optimizer, dropout=False)
    return streamed_step(
        model.graph,
        optimizer,
        model.weight_storage.streamed,
        dropout=False,
        reader=LayerReader(watch),
    )


def make_batch(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Builds random rows, of which the last quarter is learned."""
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


def show(config: ModelConfig, written: int, results: list[dict[str, Any]]) -> None:
    """Prints a column for each location; memory is also shown in layers."""
    table_bytes = config.vocabulary_size * config.width * 4
    layer = (written - table_bytes) / config.layers
    console = Console()
    console.print(
        f"{written / MEGABYTE:,.0f} MB: {config.layers} layers of "
        f"{layer / MEGABYTE:,.1f} MB and a table of {table_bytes / MEGABYTE:,.1f} MB"
    )

    def sized(size: float) -> str:
        return f"{size / MEGABYTE:,.0f} MB ({size / layer:.2f} layers)"

    table = Table("", *(one["weights"] for one in results))
    rows = {
        "always on the device": [sized(x["resident"]) for x in results],
        "peak on the device": [sized(x["device"]) for x in results],
        "peak without always": [sized(x["device"] - x["resident"]) for x in results],
        "memory: reading": [sized(x["reading"]) for x in results],
        "memory: compiling, first step": [sized(x["growth"][0]) for x in results],
        "memory: still in use after it": [sized(x["between"][0]) for x in results],
        "memory: a later step": [sized(_later(x)) for x in results],
        "seconds, first step": [f"{x['seconds'][0]:.1f}" for x in results],
        "seconds, later steps": [f"{min(x['seconds'][1:]):.1f}" for x in results],
        "losses": [" ".join(f"{x:.7f}" for x in one["losses"]) for one in results],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def _later(one: dict[str, Any]) -> int:
    """Returns the maximum growth of memory during a later step."""
    pairs = zip(one["growth"][1:], one["between"], strict=False)
    return max(most - before for most, before in pairs)


if __name__ == "__main__":
    main()
