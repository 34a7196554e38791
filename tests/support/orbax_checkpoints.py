"""Checkpoints in Orbax's format, and correct checksums for damaged ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore

from prompt_tuning.checkpoints.run_store.checkpoint_state import measured, sealed
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore

LEAF = "encoder/prompt/prompt"
ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


def write_checkpoint(run: Path) -> Path:
    """Writes a checkpoint with one trained array; returns its folder."""
    store = CheckpointStore(run, form="orbax")
    trained, moments = {LEAF: jnp.asarray(ARRAY)}, {"count": jnp.asarray(3)}
    store.save_sharded(1, trained, moments, {}, shapes=(trained, moments))
    store.wait()
    return store.folder / "checkpoint_1"


def seal(
    checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda state: None
) -> None:
    """Changes the state, and writes the digests of all files and of the state."""
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    del state["checksum"]
    paths = [path for path in (checkpoint / "arrays").rglob("*") if path.is_file()]
    names = [path.relative_to(checkpoint).as_posix() for path in paths]
    state["files"] = {name: measured(checkpoint / name) for name in names}
    change(state)
    file.write_text(sealed(state))


def read_metadata(checkpoint: Path) -> bytes:
    """Returns the metadata of the stored array, JSON."""
    return _open(checkpoint).read(_KEY).result().value


def write_metadata(checkpoint: Path, metadata: bytes) -> None:
    """Replaces the metadata of the stored array."""
    _open(checkpoint).write(_KEY, metadata).result()


_KEY = f"trained.{LEAF}/.zarray"


def _open(checkpoint: Path) -> Any:
    base = f"file://{checkpoint}/arrays/"
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
