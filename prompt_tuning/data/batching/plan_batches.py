"""Plans the batches of a data source's examples, and of rows that are read once."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning import processes
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, BucketPlan
from prompt_tuning.data.batching.packed_plan import PackedPlan
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.settings.data_source import DataSource

SAMPLES = 64
"""Number of examples whose tokens the processes compare."""


def plan_batches(
    source: DataSource,
    model: ModelInterface,
    examples: Examples | ExampleGroups,
    *,
    seed: int = 0,
    shuffle: bool,
    accumulate: int = 1,
) -> BatchPlan:
    """Plans batches in random order for training, or in one pass for evaluation.

    Without `shuffle`, no batch is larger than the number of examples. All processes
    must have the same examples, which is checked here.
    """
    if source.batch_tokens is None:
        model.rows.check(source.batch_size)
    processes.check_same("examples", lambda: _fingerprint(source.files, examples))
    if examples.has_groups and source.prompt_loss_weight > 0:
        raise InputError(
            f"prompt_loss_weight is {source.prompt_loss_weight}, but Run.objective "
            "compares whole answers and learns no prompt tokens: give "
            f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}, or use a "
            "TokenObjective"
        )
    return _plan_class(source, model, examples)(
        examples.input_lengths,
        weight_counts=examples.weight_counts,
        batch_size=source.batch_size if source.batch_tokens is None else None,
        batch_tokens=source.batch_tokens,
        seed=seed,
        shuffle=shuffle,
        maximum_length=model.maximum_length,
        accumulate=accumulate,
        row_parts=model.rows.parts,
    )


def _plan_class(
    source: DataSource, model: ModelInterface, examples: Examples | ExampleGroups
) -> Callable[..., BatchPlan]:
    """Returns the class of the plan, with the arguments that only this class has."""
    shares = examples.shares_prompt
    same_tokens = model.architecture == "decoder_only" and not shares
    if source.packing:
        return functools.partial(
            PackedPlan,
            target_lengths=None if same_tokens else examples.target_lengths,
            length=source.packed_length,
        )
    return functools.partial(
        BucketPlan,
        target_lengths=examples.target_lengths,
        same_tokens=same_tokens,
        buckets=source.buckets,
        rows_per_example=examples.rows_per_example,
        shares_prompt=shares,
    )


def _fingerprint(
    files: Sequence[str] | str, examples: Examples | ExampleGroups
) -> list[str]:
    """Returns lines that differ if two processes read different examples."""
    tables = (examples.input_lengths, examples.target_lengths, examples.weight_counts)
    lengths, tokens = hashlib.sha256(), hashlib.sha256()
    for table in tables:
        lengths.update(np.asarray(table, np.int64).tobytes())
    count = len(examples)
    # The tokens of all examples would take as long to read as an epoch.
    for number in np.linspace(0, count - 1, min(SAMPLES, count)).astype(int).tolist():
        rows = examples[number]
        for row in rows if isinstance(rows, list) else [rows]:
            tokens.update(np.asarray(row.inputs, np.int64).tobytes())
            tokens.update(np.asarray(row.targets, np.int64).tobytes())
    return [
        f"{count} examples of {files}",
        f"{int(np.sum(tables[0]))} inputs and {int(np.sum(tables[2]))} learned targets",
        f"digest of their lengths: {lengths.hexdigest()[:16]}",
        f"digest of {min(SAMPLES, count)} of them: {tokens.hexdigest()[:16]}",
    ]


class LengthGroup(NamedTuple):
    """The rows of a batch by number, or `FILLING`, and the length to pad them to."""

    rows: Int64[np.ndarray, "B"]
    length: int

    @property
    def real(self) -> list[int]:
        """Numbers of the rows without `FILLING`."""
        return self.rows[self.rows != FILLING].tolist()

    @property
    def repeated(self) -> list[int]:
        """Numbers of all rows, with the last one repeated in place of `FILLING`."""
        return [*self.real, *self.real[-1:] * (len(self.rows) - len(self.real))]


def group_by_length(
    lengths: Sequence[int] | Integer[np.ndarray, "E"],
    *,
    batch_size: int,
    maximum_length: int | None,
    row_parts: int = 1,
) -> list[LengthGroup]:
    """Divides rows into batches of few lengths; another one must pay for its
    compilation.

    `lengths` are the tokens of the rows; the rows of a batch divide among `row_parts`
    devices.
    """
    if not len(lengths):
        return []
    sizes = np.asarray(lengths, np.int64)
    plan = BucketPlan(
        sizes,
        sizes,
        np.ones_like(sizes),
        batch_size=batch_size,
        seed=0,
        shuffle=False,
        same_tokens=True,
        maximum_length=maximum_length,
        row_parts=row_parts,
    )
    return [LengthGroup(batch.rows, batch.input_length) for batch in plan.one_pass()]
