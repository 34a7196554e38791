"""Arrays in an Orbax folder, of which each process writes and reads its own shards.

    arrays/            Orbax's files: a tree with the levels group, name, array

An array is stored as it is sharded on its mesh, including the padding of a vocabulary;
its unpadded shape is recorded separately. A reader may use another mesh: it drops what
exceeds the requested shape and fills what is missing with zeros (see
`orbax.checkpoint.ArrayRestoreArgs.global_shape`).

Orbax is imported on use, because that takes longer than the rest of the package.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prompt_tuning.core.errors import InputError

FOLDER = "arrays"
CHUNK = 32 * 2**20
"""Maximum size of a chunk in bytes, so that a process with a small shard of an array
need not read the larger shard that another wrote."""

LIMIT = 24 * 3600
"""Seconds that processes wait for each other; their heartbeat ends them sooner."""


class Writing:
    """A write of arrays in progress, in which each process writes its own shards.

    All processes create it together and wait for it. Once it is created, the arrays
    have been copied to the host and may be donated.
    """

    def __init__(self, folder: Path, groups: Mapping[str, Mapping[str, jax.Array]]):
        """Starts to write.

        Args:
          folder: empty folder that all processes see and nobody reads yet. Its name
            identifies the barriers of the processes, so no two concurrent writes may
            use folders of the same name.
          groups: arrays by name, by group.
        """
        import orbax.checkpoint as ocp

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
        raise OSError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in an Orbax folder, which is read on request.

    Attributes:
      folder: folder that contains `arrays/`.
      group: group of the array.
      name: name of the array.
      shape: shape without padding.
      dtype: dtype of the array.
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
        """Reads the whole array to the host memory of this process."""
        import orbax.checkpoint as ocp

        if copy is False:
            raise ValueError("an array in a checkpoint cannot be read without a copy")
        stored = np.asarray(self._restore(ocp.RestoreArgs(restore_type=np.ndarray)))
        return np.asarray(stored[tuple(map(slice, self.shape))], dtype)

    def restore(
        self, shape: tuple[int, ...], sharding: jax.sharding.Sharding
    ) -> jax.Array:
        """Reads the array to devices; each process reads its own shards.

        Args:
          shape: shape of the array, or the shape on the mesh, padded with zeros.
          sharding: sharding on the mesh.

        Raises:
          InputError: if it cannot be read.
        """
        import orbax.checkpoint as ocp

        return self._restore(
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=False)
        )

    def _restore(self, restore_args: Any) -> Any:
        import orbax.checkpoint as ocp

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
                raise InputError(
                    f"{path} cannot be read: {self.group} {self.name}: {error}; remove "
                    f"{self.folder} to use the checkpoint before it"
                ) from error
        return tree[self.group][self.name]


Leaf = np.ndarray | StoredArray
"""An array in memory, or one that is still to be read."""


def like(stored: Leaf, leaf: jax.Array) -> jax.Array:
    """Puts a leaf on devices, with the sharding of another array if it is stored.

    Args:
      stored: leaf to put on devices.
      leaf: array whose shape and sharding the result has.
    """
    if isinstance(stored, StoredArray):
        return stored.restore(leaf.shape, leaf.sharding)
    return jax.numpy.array(stored)
