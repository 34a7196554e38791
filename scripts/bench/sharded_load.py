"""Measures what each of two processes reads of a checkpoint, and its memory.

    python -m scripts.bench.sharded_load

Writes random checkpoints in float32, of about 1 GB (Llama) and 0.5 GB (T5). Two
processes of two CPU devices each load them onto a mesh {fsdp 2, tensor 2}, so that each
process has half of nearly every parameter. Linux only: memory is the anonymous memory
in `/proc`, which includes the arrays of CPU devices but not the pages of mapped files.
"""

import argparse
import gzip
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from flax import serialization
from rich.console import Console
from rich.table import Table

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families import t5x
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained
from scripts.bench.load_cost import MODEL, memory
from scripts.random_model import write_random_model

PROCESSES, DEVICES = 2, 2
MESH = MeshShape(data=1, fsdp=2, tensor=2)
T5 = t5_config(width=768, feed_forward_width=2048, layers=6, heads=12)
CASES = {
    "safetensors float32": ("llama", "float32"),
    "safetensors bfloat16": ("llama", "bfloat16"),
    "safetensors int8": ("llama", "int8"),
    "t5x msgpack": ("msgpack", "float32"),
    "t5x zarr": ("zarr", "float32"),
}
PAUSE = 0.002
"""Seconds between samples of the memory."""


def main() -> None:
    """Measures all cases, or runs as one process of a case."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--checkpoint", help="load this one and print JSON")
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    parser.add_argument("--process", type=int, help="the number of this process")
    parser.add_argument("--port", type=int, help="port of process 0")
    given = parser.parse_args()
    if given.checkpoint is not None:
        jax.config.update("jax_num_cpu_devices", DEVICES)
        address = f"localhost:{given.port}"
        jax.distributed.initialize(address, PROCESSES, given.process)
        print(json.dumps(load(Path(given.checkpoint), given.dtype)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_random_model(root / "llama", MODEL)
        write_t5x(root)
        show({name: in_processes(root / path, t) for name, (path, t) in CASES.items()})


def write_t5x(root: Path) -> None:
    """Writes a random T5 in both of T5X's formats.

    The zarr arrays have four chunks along each axis, as T5X writes them from a mesh.
    The msgpack arrays have Flax's chunks, which can end within a row.
    """
    random = np.random.default_rng(0)
    abstract = describe(lambda key: split(build_model(key, T5)), jax.random.key(0))[1]
    arrays, specs = {}, {}
    for path, recipe in t5x.t5x_recipes(T5).items():
        shape = abstract[path].shape[1 if recipe.stacked else 0 :]
        for name in recipe.sources:
            values = recipe.transform(random.standard_normal(shape, np.float32))
            arrays[name] = np.ascontiguousarray(values)
            folder = f"target.{name.replace('/', '.')}"
            write_zarr(root / "zarr" / folder, arrays[name])
            kvstore = {"driver": "file", "path": folder}
            specs[name] = {"driver": "zarr", "kvstore": kvstore}
    (root / "msgpack").mkdir()
    serialization.MAX_CHUNK_SIZE = 10_000_000
    for kind, leaves in (("msgpack", arrays), ("zarr", specs)):
        tree = {"version": 3, "optimizer": {"state": {"step": 1}, "target": leaves}}
        packed = serialization.msgpack_serialize(tree)
        (root / kind / "checkpoint").write_bytes(packed)


def write_zarr(folder: Path, array: np.ndarray) -> None:
    """Writes an array as gzip chunks, four along each axis."""
    folder.mkdir(parents=True)
    chunks = [-(-size // 4) for size in array.shape]
    metadata = {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": chunks,
        "dtype": "<f4",
        "compressor": {"id": "gzip", "level": 1},
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    for index in itertools.product(*[range(4)] * array.ndim):
        starts = [i * chunk for i, chunk in zip(index, chunks, strict=True)]
        if all(start < size for start, size in zip(starts, array.shape, strict=True)):
            whole = np.zeros(chunks, np.float32)
            part = array[tuple(map(slice, starts, np.add(starts, chunks)))]
            whole[tuple(map(slice, part.shape))] = part
            packed = gzip.compress(whole.tobytes(), 1)
            (folder / ".".join(map(str, index))).write_bytes(packed)


def in_processes(checkpoint: Path, dtype: str) -> list[dict]:
    """Loads a checkpoint in two processes; returns the measurements of each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scripts.bench.sharded_load"]
    command += ["--checkpoint", str(checkpoint), "--dtype", dtype, "--port", str(port)]
    running = [
        subprocess.Popen(
            [*command, "--process", str(number)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    return [json.loads(process.communicate()[0]) for process in running]


def load(checkpoint: Path, dtype: str) -> dict[str, int]:
    """Loads this process's shards of a checkpoint; returns sizes in bytes."""
    source = Pretrained(
        checkpoint=str(checkpoint),
        config=None if (checkpoint / "config.json").exists() else T5,
        parameter_dtype=dtype,
    )
    model = open_pretrained(source, key=jax.random.key(0), mesh=MESH)
    jax.block_until_ready(jax.numpy.zeros(1))
    read, whole_read, peak = 0, StoredTensor.read, 0

    def counting(tensor: StoredTensor, block=None) -> np.ndarray:
        nonlocal read
        block_values = whole_read(tensor, block)
        read += block_values.nbytes
        return block_values

    done, before = threading.Event(), memory("RssAnon")

    def watch() -> None:
        nonlocal peak
        while not done.wait(PAUSE):
            peak = max(peak, memory("RssAnon") - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with mock.patch.object(StoredTensor, "read", counting):
        parameters = model.read_parameters()
    done.set()
    watcher.join()
    return {"read": read, "peak": peak, **own_bytes(model, parameters)}


def own_bytes(model: PromptedModel, parameters: dict) -> dict[str, int]:
    """Returns the bytes of this process's shards, in memory and in the file's type."""
    in_memory = stored = 0
    for path, array in parameters.items():
        parts = {str(shard.index): shard.data for shard in array.addressable_shards}
        in_memory += sum(part.nbytes for part in parts.values())
        if path.endswith("_scale"):  # computed from the kernel's bytes
            continue
        recipe = model.plan.restored[path]
        width = model.plan.stored[recipe.sources[0]].dtype.itemsize
        stored += sum(part.size for part in parts.values()) * width
    return {"memory": in_memory, "stored": stored}


def show(cases: dict[str, list[dict]]) -> None:
    """Prints a row for each process of each case."""
    table = Table(
        *("checkpoint, weights as", "process", "shards in the file", "bytes read"),
        *("ratio", "shards in memory", "peak memory growth", "ratio "),
        title="MB",
    )
    for name, processes in cases.items():
        for number, row in enumerate(processes):
            table.add_row(
                name,
                str(number),
                *(f"{row[key] / 1e6:,.1f}" for key in ("stored", "read")),
                f"{row['read'] / row['stored']:.3f}",
                *(f"{row[key] / 1e6:,.1f}" for key in ("memory", "peak")),
                f"{row['peak'] / row['memory']:.3f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
