"""The batches of a sweep's members: shared, or one per member."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import jax
import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class MemberBatches:
    """The batches of one step.

    Attributes:
      whole: the batch that all members share, or all members' batches on a leading axis
        `K`.
      members: the batch of each member.
    """

    whole: Batch
    members: tuple[Batch, ...]


def stream_members(
    members: Sequence[Trainer], start: int
) -> Generator[MemberBatches, None, None]:
    """Yields the batches from step `start` for members with the same model and data.

    If the members' orders differ, each step's batches are padded to the same shape.
    """
    run, pad_id = members[0].run, members[0].model.config.pad_id
    seeds = [member.run.order_seed for member in members]
    readers = {
        seed: stream_batches(
            member.examples, member.batch_plan, start, run.steps, pad_id=pad_id
        )
        for seed, member in zip(seeds, members, strict=True)
    }
    with contextlib.ExitStack() as open_readers:
        for reader in readers.values():
            open_readers.enter_context(contextlib.closing(reader))
        for batches in zip(*readers.values(), strict=True):
            if len(readers) == 1:
                yield MemberBatches(batches[0], batches * len(members))
                continue
            by_order = dict(zip(readers, batches, strict=True))
            yield join_members([by_order[seed] for seed in seeds], pad_id)


def join_members(batches: Sequence[Batch], pad_id: int) -> MemberBatches:
    """Joins the members' batches, padded to the same shape."""
    if len(batches) == 1:
        return MemberBatches(batches[0], tuple(batches))
    padded = tuple(pad_to_widest(batches, pad_id))
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *padded)  # [K, ...]
    return MemberBatches(stacked, padded)


def pad_to_widest(batches: Sequence[Batch], pad_id: int) -> list[Batch]:
    """Pads batches to a common shape, the maximum size in every dimension.

    The padding has the same values as a batch's own filler rows and padding tokens.
    """
    fillings = {"tokens": pad_id, "targets": pad_id, "lengths": 1, "gold": FILLING}

    def pad(path: tuple, array: np.ndarray, *others: np.ndarray) -> np.ndarray:
        shape = np.max([other.shape for other in others], axis=0)
        missing = [(0, int(n) - m) for n, m in zip(shape, array.shape, strict=True)]
        return np.pad(array, missing, constant_values=fillings.get(path[0].name, 0))

    return [jax.tree.map_with_path(pad, batch, *batches) for batch in batches]
