"""Arrays in an Orbax folder; each process writes and reads its own shards.

    arrays/            Orbax's files: a tree with the levels group, name, array

An array is stored as it is sharded on its mesh, including a vocabulary's padding, and
its unpadded shape is recorded separately. You may read it on another mesh: numbers
beyond the requested shape are dropped, and missing ones filled with zeros (see
`orbax.checkpoint.ArrayRestoreArgs.global_shape`).

Orbax takes longer to import than the rest of the package, so it is imported on use.
"""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prompt_tuning.core.errors import DISK_FULL, InputError, shown
from prompt_tuning.core.typed_json import as_object, parse_json, read_object

FOLDER = "arrays"
CHUNK = 32 * 2**20
"""Maximum size of a chunk in bytes, so that a process with a small shard of an array
need not read the larger shard that another wrote."""

ADVICE = "; remove the checkpoint to use the one before it"

MAXIMUM_PADDING = 2**24
"""Numbers by which a stored array may exceed twice its unpadded size."""

COMPRESSIONS = ("zstd", None)
"""Compressions of arrays; Orbax writes the first."""

LIMIT = 24 * 3600
"""Seconds that processes wait for each other; their heartbeat ends them sooner."""


def check_names(folder: Path, names: Collection[str]) -> None:
    """Checks that Orbax can open only the files of a checkpoint.

    `folder` contains `arrays/`, and `names` are the paths of files with verified
    digests.

    Raises:
      InputError: for another file, or a pipe, which would never be read to its end.
    """
    for path in (folder / FOLDER).rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and name not in names:
            raise InputError(
                f"{folder} has {shown(name)}, expected only the files that its "
                f"state.json names{ADVICE}"
            )


class Writing:
    """A write of arrays in progress; each process writes its own shards.

    All processes create it together and wait for it. Once it is created, the arrays
    have been copied to the host and may be donated.
    """

    def __init__(self, folder: Path, groups: Mapping[str, Mapping[str, jax.Array]]):
        """Starts to write.

        Args:
          folder: empty folder that all processes see and nobody reads yet. Its name
            identifies the processes' barriers, so concurrent writes must not use
            folders with the same name.
          groups: arrays by name, by group.
        """
        import orbax.checkpoint as ocp

        # Without the filter, a full disk would print several tracebacks.
        logging.getLogger("absl").addFilter(_is_not_raised)
        together = ocp.options.MultiprocessingOptions(
            # With explicit processes, Orbax's barriers need no device computation.
            active_processes=set(range(jax.process_count())),
            barrier_sync_key_prefix=folder.name,
        )
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(multiprocessing_options=together),
            async_options=ocp.AsyncOptions(timeout_secs=LIMIT),
            multiprocessing_options=together,
        )
        tree = {group: dict(arrays) for group, arrays in groups.items()}
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), tree)
        with _raising_disk_errors():
            self._checkpointer.save(
                (folder / FOLDER).absolute(), args=ocp.args.PyTreeSave(tree, how)
            )

    def wait(self) -> None:
        """Waits until every process has written its shards.

        Raises:
          OSError: if one of them failed.
        """
        with _raising_disk_errors():
            self._checkpointer.close()


@contextlib.contextmanager
def _raising_disk_errors() -> Iterator[None]:
    """Raises `OSError` for the disk errors that Orbax reports.

    Orbax raises a ValueError or a plain Exception with TensorStore's message.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        for number in DISK_FULL:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise OSError(_first_line(error)) from error


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Tests whether a log record is not an error that Orbax also raises."""
    return "orbax" not in record.pathname or record.exc_info is None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in an Orbax folder, which is read on request.

    Its shape is without padding.
    """

    folder: Path
    group: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import orbax.checkpoint as ocp

        if copy is False:
            raise ValueError("an array in a checkpoint cannot be read without a copy")
        stored = np.asarray(self._restore(ocp.RestoreArgs(restore_type=np.ndarray)))
        return np.asarray(stored[tuple(map(slice, self.shape))], dtype)

    def restore(
        self, shape: tuple[int, ...], sharding: jax.sharding.Sharding
    ) -> jax.Array:
        """Reads the array to devices; each process reads its own shards.

        `shape` may be the shape on the mesh, padded with zeros.
        """
        import orbax.checkpoint as ocp

        return self._restore(
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=False)
        )

    def _restore(self, restore_args: Any) -> Any:
        import orbax.checkpoint as ocp

        self._check_stored()
        number = jax.process_index()
        # Without barriers: a process may read an array that the others do not.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=number,
            active_processes={number},
            barrier_sync_key_prefix=str(number),
        )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        leaf = jax.ShapeDtypeStruct(self.shape, self.dtype)
        wanted = ocp.args.PyTreeRestore(
            item={self.group: {self.name: leaf}},
            restore_args={self.group: {self.name: restore_args}},
            partial_restore=True,
        )
        path = (self.folder / FOLDER).absolute()
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            try:
                with _raising_disk_errors():
                    tree = reader.restore(path, args=wanted)
            except OSError as error:
                raise InputError(f"{self._label}: {error}{ADVICE}") from error
        restored = tree[self.group][self.name]
        # Orbax returns the leaf itself if its metadata declare another kind of value.
        if not isinstance(restored, np.ndarray | jax.Array):
            raise InputError(f"{self._label} is not stored as an array{ADVICE}")
        return restored

    def _check_stored(self) -> None:
        """Checks what the folder declares before Orbax allocates memory for it."""
        settings = read_object(self.folder / FOLDER / "_METADATA")
        if settings.flag("use_zarr3", False):
            settings.refuse("use_zarr3", "false")
        stored = self._open()
        chunk = tuple(stored.chunk_layout.read_chunk.shape or ())
        limit = 2 * math.prod(self.shape) + MAXIMUM_PADDING
        fits = len(stored.shape) == self.ndim and all(
            there >= size for there, size in zip(stored.shape, self.shape, strict=True)
        )
        largest = max(math.prod(stored.shape), math.prod(chunk))
        if not fits or largest > limit or stored.dtype.numpy_dtype != self.dtype:
            raise InputError(
                f"{self._label} has shape {stored.shape} in chunks of {chunk} and "
                f"dtype {stored.dtype.name}, expected {self.shape} and {self.dtype} "
                f"with at most {limit:,} numbers; the checkpoint is damaged"
            )

    def _open(self) -> Any:
        """Opens the array without reading it; see `_check_stored`."""
        import tensorstore

        base = {"driver": "file", "path": f"{(self.folder / FOLDER).absolute()}/"}
        path = f"{self.group}.{self.name}/"
        kvstore = {"driver": "ocdbt", "base": base, "path": path}
        spec = {"driver": "zarr", "kvstore": kvstore}
        try:
            metadata = tensorstore.KvStore.open(kvstore).result()
            content = metadata.read(".zarray").result().value
            self._check_metadata(content)
            return tensorstore.open(spec, open=True, read=True).result()
        except InputError:
            raise
        # TensorStore raises other errors besides ValueError for damaged files.
        except Exception as error:
            problem = f"{_first_line(error)} (by .zarray)"
            raise InputError(f"{self._label}: {problem}{ADVICE}") from error

    def _check_metadata(self, content: bytes) -> None:
        """Checks the array's metadata; deep ones would crash TensorStore."""
        source = f"{self._label}, .zarray"
        metadata = as_object(parse_json(content, source), source)
        compressor = metadata.value("compressor", None)
        kind = compressor.get("id") if isinstance(compressor, dict) else compressor
        # Of others, TensorStore unpacks more than a chunk.
        if kind not in COMPRESSIONS:
            raise InputError(
                f"{source} has the compressor {shown(compressor)}, expected "
                f"zstd or null{ADVICE}"
            )

    @property
    def _label(self) -> str:
        return f"{self.folder / FOLDER}: {self.group} {shown(self.name)}"


Leaf = np.ndarray | StoredArray
"""An array in memory, or one that is still to be read."""


def like(stored: Leaf, leaf: jax.Array) -> jax.Array:
    """Puts a leaf on devices; a stored one with the shape and sharding of `leaf`."""
    if isinstance(stored, StoredArray):
        return stored.restore(leaf.shape, leaf.sharding)
    return jax.numpy.array(stored)
