"""The files of one checkpoint of a run: what is in them, and whether they are whole.

    checkpoint_{step}/
      encoder.prompt.prompt.npy   each trained leaf, float32, its path with dots
      optimizer.npz               optimiser leaves, by their place in the tree
      state.json                  step, metrics, the caller's JSON, and the size and
                                  SHA-256 of every file beside it

That is the form of a prompt. The other one is for what is too large to be put together
in one place (see `sharded_arrays`):

    checkpoint_{step}/
      arrays/                     orbax's files: trained leaves by path, optimiser
                                  leaves by their place, each process's parts apart
      state.json                  the same, with every leaf's own shape and type

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
from prompt_tuning.checkpoints.run_store.checksummed_json import (
    measured,
    read_sealed,
    write_sealed,
)
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf, StoredArray, Writing
from prompt_tuning.core.atomic_files import sync_file, sync_path
from prompt_tuning.core.errors import InputError

FORMAT = 1
SHARDED_FORMAT = "orbax-1"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.npz"

AUTO, NUMPY, ORBAX = "auto", "numpy", "orbax"
FORMS = (AUTO, NUMPY, ORBAX)
LARGE = 256 * 2**20
"""Bytes of trained and optimiser leaves from which on `auto` is orbax's form."""

TRAINED, OPTIMIZER = "trained", "optimizer"
Trained = Mapping[str, Any]


def check_storable(trained: Trained, optimizer_state: Any) -> None:
    """Refuses, before training, what a checkpoint could not hold.

    Args:
      trained: leaves, or their `jax.ShapeDtypeStruct`s, by slash-joined path.
      optimizer_state: a tree of the same.

    Raises:
      InputError: for a trained leaf that is not float32, an optimiser leaf that NumPy
        has no type for, a path that is no file name, or two with the same one.
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
                f"optimiser leaf {name} is {dtype}, expected bool, integer or a "
                "floating type of NumPy's own; does the optimiser keep bfloat16 "
                "moments? Give it float32 ones"
            )


def file_name(path: str) -> str:
    """The file of a trained leaf: its path with dots, `.npy`.

    Raises:
      InputError: if the path holds anything but letters, digits, `_`, `-`, `.`, `/`.
    """
    if not re.fullmatch(r"\w[\w.\-]*(/\w[\w.\-]*)*", path):
        raise InputError(f"the parameter path {path!r} cannot become a file name")
    return path.replace("/", ".") + ".npy"


def write_files(
    directory: Path, trained: Trained, optimizer_state: Any, state: dict[str, Any]
) -> None:
    """Fills an empty directory and syncs every file in it, `state.json` last.

    Args:
      directory: where to write; it is empty and nobody reads it yet.
      trained: float32 arrays by slash-joined path.
      optimizer_state: any tree of arrays.
      state: JSON, to which the leaves, files and checksum are added.

    Raises:
      InputError: as `check_storable`; if `state` is not JSON.
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
    """Whether something is kept in orbax's form.

    Args:
      form: one of `FORMS`.
      trained: leaves, or their `jax.ShapeDtypeStruct`s, by slash-joined path.
      optimizer_state: a tree of the same.
    """
    if form != AUTO:
        return form == ORBAX
    kinds = map(kind, [*trained.values(), *jax.tree.leaves(optimizer_state)])
    sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kinds)
    return sum(sizes) >= LARGE


def start_sharded(directory: Path, trained: Trained, optimizer_state: Any) -> Writing:
    """Starts to fill an empty directory in orbax's form; all processes do so together.

    Args:
      directory: see `Writing`.
      trained: float32 arrays by slash-joined path, with the padding of their mesh.
      optimizer_state: any tree of arrays.
    """
    leaves = named_leaves(optimizer_state)
    return Writing(directory, {TRAINED: dict(trained), OPTIMIZER: leaves})


def described(trained: Trained, optimizer_state: Any) -> dict[str, Any]:
    """Shape and type of leaves, as JSON.

    Args:
      trained: arrays or `jax.ShapeDtypeStruct`s, by slash-joined path.
      optimizer_state: a tree of the same.
    """
    groups = {TRAINED: trained, OPTIMIZER: named_leaves(optimizer_state)}
    return {
        group: {
            name: {"shape": list(shape), "dtype": np.dtype(dtype).name}
            for name, (shape, dtype) in ((n, kind(x)) for n, x in leaves.items())
        }
        for group, leaves in groups.items()
    }


def seal_sharded(directory: Path, state: dict[str, Any]) -> None:
    """Syncs a directory that all processes have filled, and writes `state.json`.

    Args:
      directory: that of `start_sharded`.
      state: JSON with what is `described` in it, to which files and checksum are added.

    Raises:
      InputError: if `state` is not JSON.
    """
    content: dict[str, Any] = {"format": SHARDED_FORMAT, **state, "files": {}}
    for path in sorted((directory / orbax_arrays.FOLDER).rglob("*")):
        sync_path(path)
        if path.is_file():
            content["files"][path.relative_to(directory).as_posix()] = measured(path)
    sync_path(directory / orbax_arrays.FOLDER)
    write_sealed(directory / STATE_FILE, content)


def _write_archive(file: IO[bytes], leaves: Mapping[str, Any]) -> None:
    """Writes arrays in the .npz format; unlike NumPy's, without the time of day."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, leaf in leaves.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(leaf), allow_pickle=False)


def read_state(directory: Path) -> dict[str, Any]:
    """Reads `state.json` and checks it against its own checksum.

    Raises:
      InputError: if it is missing, damaged, or of another format.
    """
    path = directory / STATE_FILE
    state = read_sealed(path)
    if state.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise InputError(
            f"{path} has format {state.get('format')}, this version reads {FORMAT} and "
            f"{SHARDED_FORMAT}"
        )
    return state


def verify(directory: Path) -> dict[str, Any]:
    """Checks size and SHA-256 of every file and returns the state.

    Raises:
      InputError: for the first file that is missing or damaged, with what was found
        and what was expected.
    """
    state = read_state(directory)
    for name, expected in state["files"].items():
        path = directory / name
        if not path.is_file():
            raise InputError(
                f"{path} is missing, expected a file of {expected['bytes']} bytes"
            )
        found = measured(path)
        if found != expected:
            raise InputError(
                f"{path} is damaged: found {found['bytes']} bytes with SHA-256 "
                f"{found['sha256']}, expected {expected['bytes']} bytes with "
                f"{expected['sha256']}"
            )
    return state


def verify_own(directory: Path) -> dict[str, Any]:
    """As `verify`, for each of several processes once the first has called that.

    Of orbax's files each reads its own parts; the state alone is checked again.
    """
    state = read_state(directory)
    return state if state["format"] == SHARDED_FORMAT else verify(directory)


def read_trained(directory: Path, state: dict[str, Any]) -> dict[str, np.ndarray]:
    """The trained leaves of a verified checkpoint by slash-joined path.

    Raises:
      InputError: if a file is no float32 array of the shape that the state says.
    """
    opened = open_trained(directory, state)
    return {path: np.asarray(leaf) for path, leaf in opened.items()}


def open_trained(directory: Path, state: dict[str, Any]) -> dict[str, Leaf]:
    """The same; in orbax's form each is read where it is put.

    Raises:
      InputError: as `read_trained`.
    """
    if state["format"] == SHARDED_FORMAT:
        return _stored(directory, TRAINED, state)
    return {
        path: _read_leaf(directory / leaf["file"], tuple(leaf["shape"]))
        for path, leaf in state[TRAINED].items()
    }


def read_optimizer(directory: Path, template: Any) -> Any:
    """The optimiser state of a verified checkpoint, as a tree like the template.

    Its leaves are those of `read_optimizer_leaves`.

    Raises:
      InputError: if a leaf is missing, left over, or of another shape or dtype.
    """
    found, expected = read_optimizer_leaves(directory), named_leaves(template)
    stored = directory / OPTIMIZER_FILE
    if not stored.exists():
        stored = directory / orbax_arrays.FOLDER
    check_leaves(f"{stored} (was the optimiser changed?)", found, expected)
    return jax.tree.unflatten(
        jax.tree.structure(template), [found[name] for name in expected]
    )


def read_optimizer_leaves(directory: Path) -> dict[str, Leaf]:
    """The leaves of a verified checkpoint's optimiser state; see `named_leaves`.

    In orbax's form each is read where it is put.

    Raises:
      InputError: if its file is no archive of arrays.
    """
    state = read_state(directory)
    if state["format"] == SHARDED_FORMAT:
        return _stored(directory, OPTIMIZER, state)
    path = directory / OPTIMIZER_FILE
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no archive of arrays: {error}") from error


def _stored(directory: Path, group: str, state: dict[str, Any]) -> dict[str, Leaf]:
    """What orbax's folder holds, by name."""
    return {
        name: StoredArray(
            directory, group, name, tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        )
        for name, leaf in state[group].items()
    }


def check_leaves(source: str, found: Trained, expected: Trained) -> None:
    """Compares names, shapes and dtypes of leaves with those that a run needs.

    Args:
      source: where the found ones come from, for the message.
      found: arrays by name.
      expected: arrays or `jax.ShapeDtypeStruct`s by name.

    Raises:
      InputError: with every missing and left-over name, or the first leaf that differs.
    """
    missing = sorted(expected.keys() - found.keys())
    left_over = sorted(found.keys() - expected.keys())
    if missing or left_over:
        raise InputError(
            f"{source}: this run needs the leaves {missing}, which are not there, and "
            f"has no place for {left_over}"
        )
    for name, leaf in expected.items():
        (shape, dtype), (wanted, wanted_dtype) = kind(found[name]), kind(leaf)
        if shape != wanted or dtype != wanted_dtype:
            raise InputError(
                f"{source}: leaf {name} has shape {shape} and dtype {dtype}, expected "
                f"{wanted} and {wanted_dtype}"
            )


def kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, a `jax.ShapeDtypeStruct` or a number."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(leaf.shape), leaf.dtype


def _read_leaf(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """One trained leaf.

    Raises:
      InputError: if it is no float32 array of that shape.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise InputError(f"{path} is no array: {error}") from error
    if array.shape != shape or array.dtype != np.float32:
        raise InputError(
            f"{path} has shape {array.shape} and dtype {array.dtype}, expected {shape} "
            "and float32"
        )
    return array


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their place in the tree, such as `[0].mu['encoder/prompt/prompt']`."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
