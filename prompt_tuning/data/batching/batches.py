"""Batches of arrays, built from examples in the order of a plan."""

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

import jax
import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, PlannedBatch
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


def build_batch(
    examples: Examples | ExampleGroups | Sequence[Example],
    planned: PlannedBatch,
    pad_id: int,
    *,
    prompt_ids: bool = False,
    columns: Collection[str] = (),
) -> Batch:
    """Reads the planned rows and pads them; rows without an example have no weight.

    In a packed batch `segment_ids` number the examples of a row, and loss positions
    count from the row's start. An example of `ExampleGroups` takes more than one row.

    Args:
      examples: examples that the plan numbers.
      planned: the examples of the rows, and the shape to pad to.
      pad_id: token id that fills rows.
      prompt_ids: whether the examples select their prompts.
      columns: names of the columns that the objective reads, or their types by name;
        float32 without a type.
    """
    if isinstance(examples, ExampleGroups):
        return _build_group_batch(
            examples, planned, pad_id, prompt_ids=prompt_ids, columns=columns
        )
    count, packed = len(planned.rows), planned.rows.ndim == 2
    if not isinstance(columns, Mapping):
        columns = dict.fromkeys(columns, np.float32)
    tokens = np.full((count, planned.input_length), pad_id, np.int32)  # [B, T]
    targets = np.full((count, planned.target_length), pad_id, np.int32)  # [B, U]
    batch = Batch(
        tokens=tokens,
        lengths=np.ones(count, np.int32),
        targets=targets,
        loss_positions=np.zeros((count, planned.positions), np.int32),  # [B, m]
        loss_weights=np.zeros((count, planned.positions), np.float32),
        prefix_lengths=np.zeros(planned.rows.shape, np.int32),  # [B] or [B, n]
        segment_ids=np.zeros_like(tokens) if packed else None,
        prompt_ids=np.zeros(planned.rows.shape, np.int32) if prompt_ids else None,
        target_segment_ids=(
            np.zeros_like(targets) if packed and not planned.same_tokens else None
        ),
        real_rows=(planned.rows.reshape(count, -1) != FILLING).any(1).astype(np.int32),
        columns={
            name: np.zeros((count, planned.positions), kind)
            for name, kind in columns.items()
        },
    )
    for row, numbers in enumerate(planned.rows.reshape(count, -1).tolist()):
        segments = [examples[number] for number in numbers if number != FILLING]
        if segments:
            _fill_row(batch, row, segments)
            _describe_segments(batch, row, segments)
    return batch


def _build_group_batch(
    examples: ExampleGroups,
    planned: PlannedBatch,
    pad_id: int,
    *,
    prompt_ids: bool,
    columns: Collection[str],
) -> Batch:
    real = planned.rows != FILLING
    numbers = planned.rows[real]
    rows = [row for number in numbers.tolist() for row in examples[number]]
    # [B, C]: the entry of `rows` for each row of an example.
    row_numbers = np.full((len(real), examples.rows_per_example), FILLING)
    row_numbers[real] = np.arange(len(rows)).reshape(-1, examples.rows_per_example)
    planned = dataclasses.replace(planned, rows=row_numbers.reshape(-1))
    gold = np.full(len(real), FILLING, np.int32)
    gold[real] = examples.gold[numbers]
    weights = np.zeros(len(real), np.float32)
    weights[real] = examples.weights[numbers]
    batch = build_batch(rows, planned, pad_id, prompt_ids=prompt_ids, columns=columns)
    if examples.shares_prompt:
        batch = share_prompts(batch, examples.rows_per_example)
    return dataclasses.replace(batch, gold=gold, example_weights=weights)


def share_prompts(batch: Batch, answers: int) -> Batch:
    """Keeps the inputs of one row in `answers`, because these rows have the same
    prompt.
    """
    prompt_ids = None if batch.prompt_ids is None else batch.prompt_ids[::answers]
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[::answers],
        lengths=batch.lengths[::answers],
        prefix_lengths=batch.prefix_lengths[::answers],
        prompt_ids=prompt_ids,
    )


def _fill_row(batch: Batch, row: int, segments: Sequence[Example]) -> None:
    """Writes the tokens of a row's examples, one after the other."""
    inputs = np.concatenate([example.inputs for example in segments])
    targets = np.concatenate([example.targets for example in segments])
    weights = np.concatenate([example.weights for example in segments])
    batch.tokens[row, : len(inputs)] = inputs
    batch.lengths[row] = len(inputs)
    batch.targets[row, : len(targets)] = targets
    # Only targets with a loss weight get one of the row's `m` loss positions.
    positions = np.flatnonzero(weights)
    batch.loss_positions[row, : len(positions)] = positions
    batch.loss_weights[row, : len(positions)] = weights[positions]
    for name, column in batch.columns.items():
        values = np.concatenate([example.columns[name] for example in segments])
        column[row, : len(positions)] = values[positions]


def _describe_segments(batch: Batch, row: int, segments: Sequence[Example]) -> None:
    for name in ("prefix_length", "prompt_id"):
        array = getattr(batch, f"{name}s")
        if array is not None:
            # [B, n], with a single column if rows are not packed.
            columns = array.reshape(len(array), -1)[row]
            columns[: len(segments)] = [getattr(example, name) for example in segments]
    if batch.segment_ids is not None:
        _number_segments(batch.segment_ids[row], [len(x.inputs) for x in segments])
    if batch.target_segment_ids is not None:
        lengths = [len(x.targets) for x in segments]
        _number_segments(batch.target_segment_ids[row], lengths)


def _number_segments(segment_ids: np.ndarray, lengths: Sequence[int]) -> None:
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segment_ids[: len(numbers)] = numbers


def stream_batches(
    examples: Examples | ExampleGroups,
    plan: BatchPlan,
    start: int,
    stop: int,
    *,
    pad_id: int,
    prefetch: int = 4,
) -> Generator[Batch, None, None]:
    """Yields batches `start` to `stop - 1` of a plan in order, prefetched by threads.

    With micro-batches, the arrays of a batch are `[A, B, ...]`. Errors of the threads
    are raised here. Close the iterator to stop the threads early. With `prefetch=0`,
    batches are read on demand.
    """
    import grain

    def read(index: int) -> Batch:
        return read_batch(examples, plan, index, pad_id=pad_id)

    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    order = grain.MapDataset.range(start, stop).map(read)
    with contextlib.closing(iter(order.to_iter_dataset(options))) as batches:
        yield from batches


def read_batch(
    examples: Examples | ExampleGroups, plan: BatchPlan, index: int, *, pad_id: int
) -> Batch:
    """Reads one batch of a plan; see `stream_batches`."""
    batch = build_batch(
        examples,
        plan.batch(index),
        pad_id,
        prompt_ids=examples.has_prompt_ids,
        columns=examples.columns,
    )
    if plan.accumulate == 1:
        return batch
    return split_micro_batches(batch, plan.accumulate)


def read_first_batches(
    examples: Examples | ExampleGroups,
    plan: BatchPlan,
    start: int,
    stop: int,
    *,
    pad_id: int,
) -> Iterator[Batch]:
    """Yields one batch of every shape, in the order of their first use.

    Shapes that do not occur within two epochs are left out.
    """
    seen, shapes = set(), len(plan.shapes())
    for index in range(start, min(stop, start + 2 * plan.batches_per_epoch)):
        if len(seen) == shapes:
            return
        planned = plan.batch(index)
        lengths = (planned.input_length, planned.target_length, planned.positions)
        if (shape := (planned.rows.shape, *lengths)) not in seen:
            seen.add(shape)
            yield read_batch(examples, plan, index, pad_id=pad_id)


def split_micro_batches(batch: Batch, accumulate: int) -> Batch:
    """Reshapes the arrays of a batch from `[A * B, ...]` to `[A, B, ...]`."""

    def split(array: np.ndarray) -> np.ndarray:
        return array.reshape(accumulate, -1, *array.shape[1:])

    return jax.tree.map(split, batch)


def real_token_share(batch: Batch) -> float:
    """Returns the share of a batch's inputs without padding, between 0 and 1."""
    rows = (*batch.lengths.shape, -1)
    real_rows = np.any(batch.loss_weights.reshape(rows) != 0, axis=-1)
    return float(np.sum(batch.lengths * real_rows) / batch.tokens.size)
