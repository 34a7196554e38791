"""The batches of a sweep: one that all members share, or one for each."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import jax
import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.candidates import Candidates
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.training.loop import Trainer
from prompt_tuning.training.run_plan import RunPlan


@dataclasses.dataclass(frozen=True)
class SweepBatch:
    """What one step of a sweep reads.

    Attributes:
      whole: the batch that all share, or all members' on a leading axis `K`.
      members: the batch of each member, as it is in `whole`.
    """

    whole: Batch
    members: tuple[Batch, ...]


def load_shared_examples(members: Sequence[RunPlan]) -> Examples | Candidates:
    """The training examples, which must be the same for each member.

    Raises:
      InputError: if the data cannot be used, or rows fit beside one prompt only.
    """
    by_length = sorted(members, key=lambda member: member.model.prompt_length)
    shortest, longest = by_length[0], by_length[-1]
    examples = longest.examples()
    if (
        examples.skipped
        and shortest.model.maximum_length != longest.model.maximum_length
    ):
        left_out = shortest.examples().skipped
        if left_out != examples.skipped:
            raise InputError(
                f"beside {longest.model.prompt_length} prompt vectors "
                f"{examples.skipped} rows are too long and left out, beside "
                f"{shortest.model.prompt_length} only {left_out}, so the members would "
                "learn from different rows; take those rows out of the files, or sweep "
                "over lengths that leave the same"
            )
    return examples


def reads_own_batches(members: Sequence[RunPlan]) -> bool:
    """Whether the members read the rows in orders of their own."""
    return len({member.run.order_seed for member in members}) > 1


def stream_sweep(
    members: Sequence[Trainer], start: int
) -> Generator[SweepBatch, None, None]:
    """The batches from step `start` on, of members that share model, data and length.

    Where orders differ, each step's batches are padded to the widest of them.
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
                yield SweepBatch(batches[0], batches * len(members))
                continue
            padded = dict(zip(readers, pad_to_widest(batches, pad_id), strict=True))
            own = tuple(padded[seed] for seed in seeds)
            yield SweepBatch(jax.tree.map(lambda *rows: np.stack(rows), *own), own)


def pad_to_widest(batches: Sequence[Batch], pad_id: int) -> list[Batch]:
    """Batches of one shape: each array as large as the largest in every dimension.

    What is added is like the filling rows and the padding that a batch has anyway.
    """
    fillings = {"tokens": pad_id, "targets": pad_id, "lengths": 1, "gold": FILLING}

    def pad(path: tuple, array: np.ndarray, *others: np.ndarray) -> np.ndarray:
        widest = np.max([other.shape for other in others], axis=0)
        missing = [(0, int(w) - s) for w, s in zip(widest, array.shape, strict=True)]
        return np.pad(array, missing, constant_values=fillings.get(path[0].name, 0))

    return [jax.tree.map_with_path(pad, batch, *batches) for batch in batches]
