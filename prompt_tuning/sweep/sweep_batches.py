"""The batches of a sweep: one that all members share, or one for each member."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import jax
import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.training.run_plan import RunPlan
from prompt_tuning.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class SweepBatch:
    """The batch of one step of a sweep.

    Attributes:
      whole: the batch that all members share, or all members' batches on a leading axis
        `K`.
      members: the batch of each member, as in `whole`.
    """

    whole: Batch
    members: tuple[Batch, ...]


def load_shared_examples(members: Sequence[RunPlan]) -> Examples | ClassExamples:
    """Loads the training examples, which must be the same for all members.

    Raises:
      InputError: if the data cannot be used, or some rows fit only with the shorter
        prompts.
    """
    by_length = sorted(members, key=lambda member: member.model.prompt_length)
    shortest, longest = by_length[0], by_length[-1]
    examples = longest.examples()
    if (
        examples.truncated
        and shortest.model.maximum_length != longest.model.maximum_length
    ):
        raise InputError(
            f"with {longest.model.prompt_length} prompt vectors {examples.truncated} "
            "rows are truncated to other lengths than with "
            f"{shortest.model.prompt_length}, so the members would learn from "
            "different tokens; shorten those rows, or sweep over one length"
        )
    if (
        examples.skipped
        and shortest.model.maximum_length != longest.model.maximum_length
    ):
        left_out = shortest.examples().skipped
        if left_out != examples.skipped:
            raise InputError(
                f"with {longest.model.prompt_length} prompt vectors "
                f"{examples.skipped} rows are too long and left out, with "
                f"{shortest.model.prompt_length} only {left_out}, so the members would "
                "learn from different rows; remove those rows from the files, or sweep "
                "over lengths that leave out the same rows"
            )
    return examples


def reads_own_batches(members: Sequence[RunPlan]) -> bool:
    """Returns whether the members read the rows in different orders."""
    return len({member.run.order_seed for member in members}) > 1


def stream_sweep(
    members: Sequence[Trainer], start: int
) -> Generator[SweepBatch, None, None]:
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
                yield SweepBatch(batches[0], batches * len(members))
                continue
            padded = dict(zip(readers, pad_to_widest(batches, pad_id), strict=True))
            separate = tuple(padded[seed] for seed in seeds)
            stacked = jax.tree.map(lambda *rows: np.stack(rows), *separate)  # [K, ...]
            yield SweepBatch(stacked, separate)


def pad_to_widest(batches: Sequence[Batch], pad_id: int) -> list[Batch]:
    """Pads batches to one shape: the maximum size of each array in every dimension.

    The padding has the same values as a batch's own filler rows and padding tokens.
    """
    fillings = {"tokens": pad_id, "targets": pad_id, "lengths": 1, "gold": FILLING}

    def pad(path: tuple, array: np.ndarray, *others: np.ndarray) -> np.ndarray:
        shape = np.max([other.shape for other in others], axis=0)
        missing = [(0, int(n) - m) for n, m in zip(shape, array.shape, strict=True)]
        return np.pad(array, missing, constant_values=fillings.get(path[0].name, 0))

    return [jax.tree.map_with_path(pad, batch, *batches) for batch in batches]
