"""Writes, verifies and reads the files of one checkpoint of a run.

Small checkpoints, e.g. of a prompt, use NumPy's formats:

    checkpoint_{step}/
      encoder.prompt.prompt.npy   one file per trained leaf, float32, path with dots
      optimizer.npz               optimizer leaves, by position in the tree
      state.json                  step, metrics, the caller's JSON, and the size and
                                  SHA-256 of every other file

Checkpoints too large for one process use Orbax's format (see `orbax_arrays`):

    checkpoint_{step}/
      arrays/                     Orbax's files: trained leaves by path, optimizer
                                  leaves by position, with the shards of each process
      state.json                  as above, with the unpadded shape and dtype of leaves

Pickle is neither written nor read.
"""

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from prompt_tuning.checkpoints.run_store import orbax_arrays
from prompt_tuning.checkpoints.run_store.checkpoint_state import (
    OPTIMIZER,
    TRAINED,
    check_state,
    measured,
    read_sealed,
    write_sealed,
)
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf, StoredArray, Writing
from prompt_tuning.core.atomic_files import sync_file, sync_path
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_names import check_links, path_within
from prompt_tuning.core.numpy_files import read_npy, read_npz

FORMAT = 1
SHARDED_FORMAT = "orbax-1"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.npz"

AUTO, NUMPY, ORBAX = "auto", "numpy", "orbax"
FORMS = (AUTO, NUMPY, ORBAX)
LARGE = 256 * 2**20
"""Total size in bytes of the leaves from which `auto` selects Orbax's format."""

Trained = Mapping[str, Any]


def check_storable(trained: Trained, optimizer_state: Any) -> None:
    """Checks, before training, that a checkpoint can store all leaves.

    Leaves may be arrays or `jax.ShapeDtypeStruct`s; trained ones are by slash-joined
    path.

    Raises:
      InputError: for a trained leaf that is not float32, an optimizer leaf without a
        NumPy dtype, or paths that give an invalid or the same file name.
    """
    names = [file_name(path) for path in trained]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two trained leaves would both be written as {name}")
    for path, leaf in trained.items():
        if leaf.dtype != np.float32:
            raise InputError(
                f"trained leaf {path} is {leaf.dtype}, expected float32: trained "
                "leaves are float32 whatever the model computes in"
            )
    for name, leaf in named_leaves(optimizer_state).items():
        _, dtype = kind(leaf)
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
            raise InputError(
                f"optimizer leaf {name} is {dtype}, expected bool, integer or a "
                "floating-point type of NumPy; does the optimizer keep bfloat16 "
                "moments? Use float32 moments"
            )


def file_name(path: str) -> str:
    """Returns the file name of a trained leaf: its path with dots, and `.npy`.

    Raises:
      InputError: if the path contains anything but letters, digits, `_`, `-`, `.`, `/`.
    """
    if not re.fullmatch(r"\w[\w.\-]*(/\w[\w.\-]*)*", path):
        raise InputError(f"the parameter path {path!r} cannot become a file name")
    return path.replace("/", ".") + ".npy"


def write_files(
    directory: Path, trained: Trained, optimizer_state: Any, state: dict[str, Any]
) -> None:
    """Writes the files of a checkpoint, `state.json` last, and syncs each of them.

    The directory is empty, and nobody reads it yet. Leaves, files and checksum are
    added to `state`, which is JSON.

    Raises:
      InputError: if a leaf cannot be stored (see `check_storable`), or `state` is not
        JSON.
    """
    check_storable(trained, optimizer_state)
    leaves = {}
    for path, leaf in trained.items():
        array = np.asarray(leaf)
        leaves[path] = {"file": file_name(path), "shape": list(array.shape)}
        with (directory / file_name(path)).open("wb") as file:
            np.save(file, array, allow_pickle=False)
            sync_file(file)
    with (directory / OPTIMIZER_FILE).open("wb") as file:
        _write_archive(file, named_leaves(optimizer_state))
        sync_file(file)
    files = [leaf["file"] for leaf in leaves.values()] + [OPTIMIZER_FILE]
    content = {"format": FORMAT, **state, "trained": leaves}
    content["files"] = {name: measured(directory / name) for name in files}
    write_sealed(directory / STATE_FILE, content)


def is_sharded(form: str, trained: Trained, optimizer_state: Any) -> bool:
    """Tests whether leaves are stored in Orbax's format; `form` is one of `FORMS`.

    Leaves may be arrays or `jax.ShapeDtypeStruct`s.
    """
    if form != AUTO:
        return form == ORBAX
    kinds = map(kind, [*trained.values(), *jax.tree.leaves(optimizer_state)])
    sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kinds)
    return sum(sizes) >= LARGE


def start_sharded(directory: Path, trained: Trained, optimizer_state: Any) -> Writing:
    """Starts to write a checkpoint in Orbax's format, together with all processes.

    Leaves have the padding of their mesh.
    """
    leaves = named_leaves(optimizer_state)
    return Writing(directory, {TRAINED: dict(trained), OPTIMIZER: leaves})


def described(trained: Trained, optimizer_state: Any) -> dict[str, Any]:
    """Returns shape and dtype of leaves as JSON; takes arrays or shapes."""
    groups = {TRAINED: trained, OPTIMIZER: named_leaves(optimizer_state)}
    return {
        group: {
            name: {"shape": list(shape), "dtype": np.dtype(dtype).name}
            for name, (shape, dtype) in ((n, kind(x)) for n, x in leaves.items())
        }
        for group, leaves in groups.items()
    }


def seal_sharded(directory: Path, state: dict[str, Any]) -> None:
    """Syncs a directory that all processes have written, and writes `state.json`.

    `state` is JSON with the description of the leaves (see `described`); files and
    checksum are added.
    """
    content: dict[str, Any] = {"format": SHARDED_FORMAT, **state, "files": {}}
    for path in sorted((directory / orbax_arrays.FOLDER).rglob("*")):
        sync_path(path)
        if path.is_file():
            content["files"][path.relative_to(directory).as_posix()] = measured(path)
    sync_path(directory / orbax_arrays.FOLDER)
    write_sealed(directory / STATE_FILE, content)


def _write_archive(file: IO[bytes], leaves: Mapping[str, Any]) -> None:
    """Writes arrays in .npz format, reproducibly: unlike NumPy, without timestamps."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, leaf in leaves.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(leaf), allow_pickle=False)


def read_state(directory: Path) -> dict[str, Any]:
    """Reads `state.json` and verifies its checksum.

    Raises:
      InputError: if it is missing, damaged, or in another format, or names a file
        outside the directory.
    """
    path = directory / STATE_FILE
    check_links(directory, STATE_FILE)
    state = read_sealed(path)
    if state.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise InputError(
            f"{path} has format {shown(state.get('format'))}, this version reads "
            f"{FORMAT} and {SHARDED_FORMAT}"
        )
    check_state(path, state, sharded=state["format"] == SHARDED_FORMAT)
    return state


def verify(directory: Path) -> dict[str, Any]:
    """Verifies size and SHA-256 of every file and returns the state.

    Raises:
      InputError: for the first file that is missing or damaged; gives expected and
        actual values.
    """
    state = read_state(directory)
    if state["format"] == SHARDED_FORMAT:
        orbax_arrays.check_names(directory, state["files"])
    for name, expected in state["files"].items():
        path = directory / name
        if not path.is_file():
            raise InputError(
                f"{path} is missing, expected a file of {expected['bytes']} bytes by "
                f"{STATE_FILE}"
            )
        actual = measured(path)
        if actual != expected:
            raise InputError(
                f"{path} is damaged: found {actual['bytes']} bytes with SHA-256 "
                f"{actual['sha256']}, expected {expected['bytes']} bytes with "
                f"{shown(expected['sha256'])}"
            )
    return state


def verify_own(directory: Path) -> dict[str, Any]:
    """Verifies what this process reads, after the first process has called `verify`.

    In Orbax's format each process reads its own shards, so only the state is verified.
    """
    state = read_state(directory)
    return state if state["format"] == SHARDED_FORMAT else verify(directory)


def read_trained(directory: Path, state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads the trained leaves of a verified checkpoint, by slash-joined path.

    Raises:
      InputError: if a file is not a float32 array with the shape in the state.
    """
    leaves = open_trained(directory, state)
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def open_trained(directory: Path, state: dict[str, Any]) -> dict[str, Leaf]:
    """Opens the trained leaves; in Orbax's format they are read on request."""
    if state["format"] == SHARDED_FORMAT:
        return _stored(directory, TRAINED, state)
    return {
        path: _read_leaf(directory / leaf["file"], tuple(leaf["shape"]))
        for path, leaf in state[TRAINED].items()
    }


def read_optimizer(directory: Path, template: Any) -> Any:
    """Reads the optimizer state of a verified checkpoint, as a tree like the template.

    See `read_optimizer_leaves` for its leaves.

    Raises:
      InputError: if a leaf is missing, left over, or has another shape or dtype.
    """
    leaves, expected = read_optimizer_leaves(directory), named_leaves(template)
    stored = directory / OPTIMIZER_FILE
    if not stored.exists():
        stored = directory / orbax_arrays.FOLDER
    check_leaves(f"{stored} (was the optimizer changed?)", leaves, expected)
    return jax.tree.unflatten(
        jax.tree.structure(template), [leaves[name] for name in expected]
    )


def read_optimizer_leaves(directory: Path) -> dict[str, Leaf]:
    """Reads the optimizer leaves of a verified checkpoint, as named by `named_leaves`.

    In Orbax's format they are read on request.

    Raises:
      InputError: if the file is not an archive of arrays.
    """
    state = read_state(directory)
    if state["format"] == SHARDED_FORMAT:
        return _stored(directory, OPTIMIZER, state)
    return {**read_npz(path_within(directory, OPTIMIZER_FILE, str(directory)))}


def _stored(directory: Path, group: str, state: dict[str, Any]) -> dict[str, Leaf]:
    """Returns the arrays of a group in Orbax's folder, by name."""
    return {
        name: StoredArray(
            directory, group, name, tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        )
        for name, leaf in state[group].items()
    }


def check_leaves(source: str, found: Trained, expected: Trained) -> None:
    """Checks names, shapes and dtypes of leaves.

    `source` is their origin, for the message; `expected` may have
    `jax.ShapeDtypeStruct`s.

    Raises:
      InputError: gives all missing and unexpected names, or the first leaf that
        differs.
    """
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise InputError(
            f"{source}: this run needs the leaves {missing}, which are missing, and "
            f"has no use for {unexpected}"
        )
    for name, leaf in expected.items():
        (shape, dtype), (wanted, wanted_dtype) = kind(found[name]), kind(leaf)
        if shape != wanted or dtype != wanted_dtype:
            raise InputError(
                f"{source}: leaf {name} has shape {shape} and dtype {dtype}, expected "
                f"{wanted} and {wanted_dtype}"
            )


def kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of an array, a `jax.ShapeDtypeStruct` or a number."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(leaf.shape), leaf.dtype


def _read_leaf(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    array = read_npy(path)
    if array.shape != shape or array.dtype != np.float32:
        raise InputError(
            f"{path} has shape {array.shape} and dtype {array.dtype}, expected {shape} "
            "and float32"
        )
    return array


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by position, e.g. `[0].mu['encoder/prompt/prompt']`."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
