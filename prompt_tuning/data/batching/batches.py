"""Batches of arrays, built from examples in the order of a plan."""

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Sequence

import jax
import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, PlannedBatch
from prompt_tuning.data.examples.candidates import Candidates
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


def build_batch(
    examples: Examples | Candidates | Sequence[Example],
    planned: PlannedBatch,
    pad_id: int,
    *,
    prompt_ids: bool = False,
    columns: Collection[str] = (),
) -> Batch:
    """Reads the planned rows and pads them; filling rows carry no weight.

    In a packed batch `segment_ids` tell the examples of a row apart, and positions of
    the loss count from the row's start. Of candidates all rows of an example are read.

    Args:
      examples: what the planned rows are numbers of.
      planned: the rows, and the shape they go into.
      pad_id: fills rows.
      prompt_ids: whether the examples say which prompt they have.
      columns: names of the columns that an objective reads.
    """
    if isinstance(examples, Candidates):
        return _candidate_batch(examples, planned, pad_id, prompt_ids=prompt_ids)
    count, packed = len(planned.rows), planned.rows.ndim == 2
    tokens = np.full((count, planned.input_length), pad_id, np.int32)
    targets = np.full((count, planned.target_length), pad_id, np.int32)
    batch = Batch(
        tokens=tokens,
        lengths=np.ones(count, np.int32),
        targets=targets,
        loss_positions=np.zeros((count, planned.positions), np.int32),
        loss_weights=np.zeros((count, planned.positions), np.float32),
        prefix_lengths=np.zeros(planned.rows.shape, np.int32),
        segment_ids=np.zeros_like(tokens) if packed else None,
        prompt_ids=np.zeros(planned.rows.shape, np.int32) if prompt_ids else None,
        target_segment_ids=(
            np.zeros_like(targets) if packed and not planned.same_tokens else None
        ),
        real_rows=(planned.rows.reshape(count, -1) != FILLING).any(1).astype(np.int32),
        columns={
            name: np.zeros((count, planned.positions), np.float32) for name in columns
        },
    )
    for place, row in enumerate(planned.rows.reshape(count, -1).tolist()):
        found = [examples[number] for number in row if number != FILLING]
        if found:
            _fill_row(batch, place, found)
            _describe_segments(batch, place, found)
    return batch


def _candidate_batch(
    candidates: Candidates, planned: PlannedBatch, pad_id: int, *, prompt_ids: bool
) -> Batch:
    """The rows of each planned example, and which of them is right."""
    real = planned.rows != FILLING
    numbers = planned.rows[real]
    rows = [row for number in numbers.tolist() for row in candidates[number]]
    places = np.full((len(real), candidates.classes), FILLING)
    places[real] = np.arange(len(rows)).reshape(-1, candidates.classes)
    planned = dataclasses.replace(planned, rows=places.reshape(-1))
    gold = np.full(len(real), FILLING, np.int32)
    gold[real] = candidates.gold[numbers]
    weights = np.zeros(len(real), np.float32)
    weights[real] = candidates.weights[numbers]
    batch = build_batch(rows, planned, pad_id, prompt_ids=prompt_ids)
    return dataclasses.replace(batch, gold=gold, example_weights=weights)


def _fill_row(batch: Batch, place: int, found: Sequence[Example]) -> None:
    """Writes examples into a row, one after the other."""
    inputs = np.concatenate([example.inputs for example in found])
    targets = np.concatenate([example.targets for example in found])
    weights = np.concatenate([example.weights for example in found])
    batch.tokens[place, : len(inputs)] = inputs
    batch.lengths[place] = len(inputs)
    batch.targets[place, : len(targets)] = targets
    positions = np.flatnonzero(weights)
    batch.loss_positions[place, : len(positions)] = positions
    batch.loss_weights[place, : len(positions)] = weights[positions]
    for name, column in batch.columns.items():
        values = np.concatenate([example.columns[name] for example in found])
        column[place, : len(positions)] = values[positions]


def _describe_segments(batch: Batch, place: int, found: Sequence[Example]) -> None:
    """Writes what is known of each example of a row, the only one if not packed."""
    for name in ("prefix_length", "prompt_id"):
        of_rows = getattr(batch, f"{name}s")
        if of_rows is not None:
            # One column to a segment, and a single one where rows are not packed.
            of_segments = of_rows.reshape(len(of_rows), -1)[place]
            of_segments[: len(found)] = [getattr(example, name) for example in found]
    if batch.segment_ids is not None:
        _number(batch.segment_ids[place], [len(x.inputs) for x in found])
    if batch.target_segment_ids is not None:
        _number(batch.target_segment_ids[place], [len(x.targets) for x in found])


def _number(segment_ids: np.ndarray, lengths: Sequence[int]) -> None:
    """Numbers the segments of a row of so many tokens each, from 1."""
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segment_ids[: len(numbers)] = numbers


def stream_batches(
    examples: Examples | Candidates,
    plan: BatchPlan,
    start: int,
    stop: int,
    *,
    pad_id: int,
    prefetch: int = 4,
) -> Generator[Batch, None, None]:
    """Batches `start` to `stop - 1` of the plan, in its order, read ahead by threads.

    With `plan.accumulate` above 1 the arrays of a batch are `[A, B, ...]`. What a
    reading thread raises is raised here. Close the iterator to stop the threads early.

    Args:
      examples: what the plan's rows are numbers of.
      plan: the order.
      start: index of the first batch.
      stop: one past the index of the last.
      pad_id: fills rows.
      prefetch: batches that are read ahead, and threads that read them; 0 reads each
        when it is asked for.
    """
    import grain

    def read(index: int) -> Batch:
        batch = build_batch(
            examples,
            plan.batch(index),
            pad_id,
            prompt_ids=examples.has_prompt_ids,
            columns=examples.columns,
        )
        return batch if plan.accumulate == 1 else _stacked(batch, plan.accumulate)

    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    order = grain.MapDataset.range(start, stop).map(read)
    with contextlib.closing(iter(order.to_iter_dataset(options))) as batches:
        yield from batches


def _stacked(batch: Batch, accumulate: int) -> Batch:
    def split(array: np.ndarray) -> np.ndarray:
        return array.reshape(accumulate, -1, *array.shape[1:])

    return jax.tree.map(split, batch)


def real_token_share(batch: Batch) -> float:
    """Real tokens over all tokens of a batch's inputs: 1 where nothing is padding."""
    real_rows = np.any(batch.loss_weights != 0, axis=-1)
    return float(np.sum(batch.lengths * real_rows) / batch.tokens.size)
