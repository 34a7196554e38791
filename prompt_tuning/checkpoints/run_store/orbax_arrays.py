"""Arrays in an orbax folder: each process writes and reads its own parts alone.

    arrays/            orbax's own files, a tree of two levels: group, name, array

An array is stored as it lies on its mesh, with what a vocabulary is padded by; its own
shape is told beside it. A reader has a mesh of its own: what of the stored array lies
beyond the shape that is asked for is dropped, and what is missing is zero (see
`orbax.checkpoint.ArrayRestoreArgs.global_shape`).

orbax is imported where it is used: it takes longer than the rest of the package.
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
"""Bytes of the largest piece that is read and written at once, so that who has a small
part of an array need not read what a larger part was written as."""

LIMIT = 24 * 3600
"""Seconds that processes wait for each other; what watches them ends them sooner."""


class Writing:
    """Arrays on their way to the disk, of which each process writes its own parts.

    All processes make it, together, and wait for it. Once it is made, the arrays may be
    donated: what is written has been copied to the host.
    """

    def __init__(self, folder: Path, groups: Mapping[str, Mapping[str, jax.Array]]):
        """Starts to write.

        Args:
          folder: an empty one that all processes see and nobody reads yet. They meet
            under its name, which no other writing of theirs has at the time.
          groups: arrays by name, by group.
        """
        import orbax.checkpoint as ocp

        together = ocp.options.MultiprocessingOptions(
            # All by their numbers: then they meet without an operation of the devices.
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
        with _as_of_the_system():
            self._checkpointer.save(
                (folder / FOLDER).absolute(), args=ocp.args.PyTreeSave(tree, how)
            )

    def wait(self) -> None:
        """Waits until every process has written its parts.

        Raises:
          OSError: if one could not.
        """
        with _as_of_the_system():
            self._checkpointer.close()


@contextlib.contextmanager
def _as_of_the_system() -> Iterator[None]:
    """Raises what orbax says of the disk as what it is.

    It comes as a ValueError, or as a plain Exception, with tensorstore's words in it.
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
    """An array in such a folder, which is read when and where it is asked for.

    Attributes:
      folder: the one that holds `arrays/`.
      group: of the array.
      name: of the array.
      shape: its own, without padding.
      dtype: its type.
    """

    folder: Path
    group: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, on this process's host."""
        import orbax.checkpoint as ocp

        if copy is False:
            raise ValueError("what is in a checkpoint cannot be read without a copy")
        stored = np.asarray(self._restored(ocp.RestoreArgs(restore_type=np.ndarray)))
        return np.asarray(stored[tuple(map(slice, self.shape))], dtype)

    def restore(
        self, shape: tuple[int, ...], sharding: jax.sharding.Sharding
    ) -> jax.Array:
        """The array on devices; of each process its own parts are read.

        Args:
          shape: its own, or the longer one that it has on the mesh, with zeros there.
          sharding: how it lies there.

        Raises:
          InputError: if it cannot be read.
        """
        import orbax.checkpoint as ocp

        return self._restored(
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=False)
        )

    def _restored(self, how: Any) -> Any:
        import orbax.checkpoint as ocp

        number = jax.process_index()
        # By itself: of several processes one may read what the others do not.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=number,
            active_processes={number},
            barrier_sync_key_prefix=str(number),
        )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        leaf = jax.ShapeDtypeStruct(self.shape, self.dtype)
        wanted = ocp.args.PyTreeRestore(
            item={self.group: {self.name: leaf}},
            restore_args={self.group: {self.name: how}},
            partial_restore=True,
        )
        path = (self.folder / FOLDER).absolute()
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            try:
                with _as_of_the_system():
                    found = reader.restore(path, args=wanted)
            except OSError as error:
                raise InputError(
                    f"{path} cannot be read: {self.group} {self.name}: {error}; remove "
                    f"{self.folder}, and the checkpoint before it is used"
                ) from error
        return found[self.group][self.name]


Leaf = np.ndarray | StoredArray
"""An array that was read, or one that is to be."""


def like(found: Leaf, leaf: jax.Array) -> jax.Array:
    """A stored array where another of its shape lies; one in memory on the device.

    Args:
      found: what is to be there.
      leaf: the one that lies where it is to be read to.
    """
    if isinstance(found, StoredArray):
        return found.restore(leaf.shape, leaf.sharding)
    return jax.numpy.array(found)
