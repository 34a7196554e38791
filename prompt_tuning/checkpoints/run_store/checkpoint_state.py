"""A checkpoint's `state.json`: its checksum, and checks of its untrusted fields."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from prompt_tuning.core.atomic_files import sync_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_names import path_within
from prompt_tuning.core.numpy_files import check_shape
from prompt_tuning.core.typed_json import JsonObject, as_object, read_object

TRAINED, OPTIMIZER = "trained", "optimizer"
MAXIMUM_BYTES = 2**60
"""Maximum size of a file of a checkpoint."""
KINDS = "biuf"
"""Kinds of NumPy's dtypes that a checkpoint stores."""


def sealed(content: dict[str, Any]) -> str:
    """Returns JSON text that includes a checksum of its content.

    Raises:
      InputError: if the content is not JSON.
    """
    try:
        # Normalize as reading does: string keys, and lists instead of tuples.
        content = json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the state of a run must be finite JSON, but: {error}"
        ) from error
    return json.dumps(content | {"checksum": _checksum(content)}, indent=1) + "\n"


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with a checksum, and syncs the file."""
    with path.open("w") as file:
        file.write(sealed(content))
        sync_file(file)


def read_sealed(path: Path) -> dict[str, Any]:
    """Reads JSON with a checksum, and verifies it.

    Raises:
      InputError: if it is missing or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing: the checkpoint is incomplete")
    try:
        state = dict(read_object(path).values)
    except InputError as error:
        raise InputError(f"the checkpoint is damaged: {error}") from error
    if "checksum" not in state:
        raise InputError(f"{path} is not the state of a checkpoint: it has no checksum")
    expected = state.pop("checksum")
    try:
        actual = _checksum(state)
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if actual != expected:
        raise InputError(
            f"{path} is damaged: its content has SHA-256 {actual}, expected "
            f"{shown(expected)}"
        )
    return state


def _checksum(state: dict[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON, independent of white space."""
    canonical = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def measured(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def check_state(path: Path, content: dict[str, Any], *, sharded: bool) -> None:
    """Checks type and range of every field that we read from a state.

    `path` is the path of `state.json`; the files that it names are in the same folder.
    `sharded` tells whether they are in Orbax's format.

    Raises:
      InputError: for the first field that is missing or wrong.
    """
    state = JsonObject(str(path), content)
    state.integer("step")
    state.nested("extra")
    metrics = state.nested("metrics")
    for name in metrics.values:
        metrics.number(name)
    best = state.sequence("keep_best", None)
    if best is not None and not _is_selection(best):
        state.refuse("keep_best", "a metric and 'min' or 'max'")
    for name, described in _entries(state, "files"):
        path_within(path.parent, name, str(path))
        described.integer("bytes", maximum=MAXIMUM_BYTES)
        described.text("sha256")
    check = _check_sharded if sharded else _check_leaves
    check(state, path)


def _check_leaves(state: JsonObject, path: Path) -> None:
    """Checks the description of leaves in NumPy's formats."""
    for _, leaf in _entries(state, TRAINED):
        path_within(path.parent, leaf.value("file"), leaf.source)
        check_shape(leaf.value("shape"), leaf.source)


def _check_sharded(state: JsonObject, path: Path) -> None:
    """Checks the description of leaves in Orbax's format."""
    for group in (TRAINED, OPTIMIZER):
        for name, leaf in _entries(state, group):
            if ".." in PurePosixPath(name).parts:
                raise InputError(f"{path} has the leaf {shown(name)}, a path with ..")
            check_shape(leaf.value("shape"), leaf.source)
            dtype_name = leaf.text("dtype")
            try:
                kind = np.dtype(dtype_name).kind
            # NumPy parses the name, and raises anything for a wrong one.
            except Exception:
                kind = ""
            if kind not in KINDS or not kind:
                leaf.refuse("dtype", "the name of a numeric type of NumPy")


def _entries(state: JsonObject, name: str) -> list[tuple[str, JsonObject]]:
    """Returns the objects in an object, by name."""
    outer = state.nested(name)
    return [
        (key, as_object(value, f"{key!r} in {outer.source}"))
        for key, value in outer.values.items()
    ]


def _is_selection(value: list) -> bool:
    """Tests whether a value selects the best checkpoint (see `CheckpointStore`)."""
    return len(value) == 2 and type(value[0]) is str and value[1] in ("min", "max")
