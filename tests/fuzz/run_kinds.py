"""Kinds of input in the directories of runs and sweeps."""

import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.checkpoints.run_store.checkpoint_state import sealed
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.training.metrics_log import METRICS_FILE, MetricsLog
from prompt_tuning.training.run_directory import IDENTITY_FILE
from prompt_tuning.training.sweep.best_member import BEST_FILE, best_member
from prompt_tuning.training.sweep.sweep_run import DIVERGED_FILE, read_diverged
from tests.fuzz.fuzz_kind import Kind, file_names_and, run_command
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_text
from tests.support.orbax_checkpoints import (
    read_metadata,
    seal,
    write_checkpoint,
    write_metadata,
)
from tests.support.small_runs import DECODER, UPPER, Files, write_model, write_pairs

CHECKPOINT = f"{FOLDER}/checkpoint_2"


@functools.cache
def trained_run() -> Path:
    """Trains a small run once in this process; returns its directory."""
    folder = Path(tempfile.mkdtemp())
    model = write_model(folder / "model", DECODER)
    rows = write_pairs(folder / "rows.jsonl", UPPER[:8])
    files = Files(model, model, rows, rows, rows, rows)
    environment = dict(os.environ)
    choices: Any = {"Run__steps": 2, "Run__save_every": 2}
    run_command("train", *files.arguments(folder / "run", **choices))
    os.environ.clear()
    os.environ.update(environment)
    return folder / "run"


def write_run(folder: Path) -> None:
    """Copies a run directory."""
    shutil.copytree(trained_run(), folder, dirs_exist_ok=True)


def read_config(folder: Path) -> None:
    """Reads the config of a run directory, as every command does that takes one."""
    read_run_directory(folder)


def convert(folder: Path) -> None:
    """Writes the best checkpoint of a run as an array."""
    run_command("convert", folder, folder / "prompt.npy")


def read_log(folder: Path) -> None:
    """Opens the log of a run to append to it."""
    MetricsLog(folder, 1).close()


def resume(folder: Path) -> None:
    """Checks what a resumed run would do."""
    directory = f"--gin.Run.directory='{folder}'"
    run_command("train", "--gin_file", folder / "config.gin", "--dry_run", directory)


def mutate_sealed(rng: random.Random, data: bytes) -> bytes:
    """Damages JSON with a checksum, and writes a correct checksum if possible."""
    damaged = mutate_json(rng, data)
    try:
        content = json.loads(damaged)
        content.pop("checksum", None)
        return sealed(content).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return damaged


def write_sweep(folder: Path) -> None:
    """Writes the files of a sweep that name its best and its diverged members."""
    (folder / BEST_FILE).write_text(
        json.dumps({"directory": "a", "step": 3, "value": 0.5})
    )
    (folder / DIVERGED_FILE).write_text(json.dumps({"step": 3, "reason": "infinite"}))


def read_sweep(folder: Path) -> None:
    """Reads them."""
    best_member(folder)
    read_diverged(folder)


def write_orbax(folder: Path) -> None:
    """Writes a checkpoint in Orbax's format, and a copy of an array's metadata."""
    checkpoint = write_checkpoint(folder)
    (folder / "metadata.json").write_bytes(read_metadata(checkpoint))


def read_orbax(changes_metadata: bool, folder: Path) -> None:
    """Reads all arrays of a checkpoint, whose checksums are made correct."""
    checkpoint = folder / CHECKPOINT.replace("_2", "_1")
    if changes_metadata:
        write_metadata(checkpoint, (folder / "metadata.json").read_bytes())
    seal(checkpoint)
    state = checkpoint_files.verify(checkpoint)
    for array in checkpoint_files.read_trained(checkpoint, state).values():
        np.asarray(array)
    for array in checkpoint_files.read_optimizer_leaves(checkpoint).values():
        np.asarray(array)


def _kind(name: str, file: str, mutation, read) -> Kind:
    names = functools.partial(file_names_and, f"{FOLDER}/checkpoint_")
    return Kind(name, write_run, {file: mutation}, read, names=names)


KINDS = [
    Kind(
        "orbax-files",
        write_orbax,
        {f"{FOLDER}/*/arrays/**/*": mutate_bytes, f"{FOLDER}/*/*/_*": mutate_json},
        functools.partial(read_orbax, False),
        names=functools.partial(file_names_and, f"{FOLDER}/checkpoint_"),
    ),
    Kind(
        "orbax-metadata",
        write_orbax,
        {"metadata.json": mutate_json},
        functools.partial(read_orbax, True),
        replaceable=False,
        names=functools.partial(file_names_and, f"{FOLDER}/checkpoint_"),
    ),
    _kind("run-config", "config.gin", mutate_text, read_config),
    _kind("run-state", f"{CHECKPOINT}/state.json", mutate_sealed, convert),
    _kind("run-arrays", f"{CHECKPOINT}/*.np*", mutate_bytes, convert),
    _kind("run-identity", IDENTITY_FILE, mutate_json, resume),
    _kind("run-log", METRICS_FILE, mutate_text, read_log),
    Kind(
        "sweep-records",
        write_sweep,
        {BEST_FILE: mutate_json, DIVERGED_FILE: mutate_json},
        read_sweep,
    ),
]
