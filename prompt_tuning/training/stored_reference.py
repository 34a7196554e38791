"""The log-probabilities of a reference, computed once and stored beside the run."""

import dataclasses
import functools
import hashlib
import io
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from prompt_tuning import processes
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.numpy_files import read_npz
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.evaluation.batch_scores import score_batches
from prompt_tuning.losses.objective import TeacherModel, target_losses
from prompt_tuning.losses.preference import REFERENCE_LOGPROBS
from prompt_tuning.models.scoring import merge_model, token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.training.run_reference import RunReference

REFERENCE_FILE = "reference.npz"
MODEL, ROWS, COUNTS, VALUES = "model", "rows", "counts", "values"
"""Arrays of the file: the reference's fingerprint as bytes, the digest of each row,
its number of learned tokens, and their log-probabilities, one row after the other."""
Logprobs = Float32[np.ndarray, " m"]
DIGEST = 16
"""Bytes of the digest of a row."""


class ReferencedExamples(ExampleGroups):
    """Examples whose learned tokens have their log-probabilities under a reference.

    They are computed when they are first read, unless `reference.npz` in the run
    directory has them: of the same row, under the same frozen model.

    Args:
      examples: the examples.
      compute: returns the log-probabilities of the learned tokens of each row of the
        given examples, `[rows, m]`, in their order.
      file: where they are stored; None to keep them in memory alone.
      fingerprint: digest of the reference.
    """

    columns = (REFERENCE_LOGPROBS,)

    def __init__(
        self,
        examples: ExampleGroups,
        compute: Callable[[Collection[int]], list[Logprobs]],
        file: Path | None,
        fingerprint: str,
    ):
        self._examples, self._compute = examples, compute
        self._file, self._fingerprint = file, fingerprint
        # Rows are read by several threads.
        self._lock = threading.Lock()
        self._known: dict[bytes, Logprobs] | None = None
        for name in (
            *("gold", "weights", "skipped", "truncated", "unlearned"),
            *("without_completion", "repetition", "has_prompt_ids", "shares_prompt"),
        ):
            setattr(self, name, getattr(examples, name))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the rows of an example, with the reference's log-probabilities."""
        known, rows = self.read(), []
        for row in self._examples[number]:
            logprobs = np.zeros(len(row.weights), np.float32)
            logprobs[row.weights != 0] = known[digest(row)]
            columns = {**row.columns, REFERENCE_LOGPROBS: logprobs}
            rows.append(dataclasses.replace(row, columns=columns))
        return rows

    def read(self) -> dict[bytes, Logprobs]:
        """Returns the log-probabilities of all rows by their digests."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
        return self._known

    @property
    def rows_per_example(self) -> int:
        """See `ExampleGroups`."""
        return self._examples.rows_per_example

    @property
    def input_lengths(self) -> np.ndarray:
        """See `ExampleGroups`."""
        return self._examples.input_lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """See `ExampleGroups`."""
        return self._examples.target_lengths

    @property
    def weight_counts(self) -> np.ndarray:
        """See `ExampleGroups`."""
        return self._examples.weight_counts

    def _read(self) -> dict[bytes, Logprobs]:
        """Returns the log-probabilities of all rows, and computes missing ones."""
        model, known = self._fingerprint, {}
        if self._file is not None:
            known = read_stored(self._file, model)
        missing = {}
        for number in range(len(self._examples)):
            rows = self._examples[number]
            if any(not _has(known, row) for row in rows):
                missing[number] = rows
        if not missing:
            return known
        with status("computing the reference's log-probabilities"):
            computed = self._compute(missing)
        rows = [row for of_example in missing.values() for row in of_example]
        known |= {digest(r): x for r, x in zip(rows, computed, strict=True)}
        file = self._file
        if file is not None:
            processes.run_on_first(lambda: write_stored(file, model, known))
        return known


def _has(known: dict[bytes, Logprobs], row: Example) -> bool:
    """Returns whether the log-probabilities of a row are known."""
    stored = known.get(digest(row))
    return stored is not None and len(stored) == int((row.weights != 0).sum())


def digest(row: Example) -> bytes:
    """Returns a digest of a row's tokens and of which of them are learned."""
    content = hashlib.sha256()
    for array in (row.inputs, row.targets, row.weights != 0):
        content.update(
            f"{len(array)} ".encode() + np.ascontiguousarray(array).tobytes()
        )
    content.update(str(row.prefix_length).encode())
    return content.digest()[:DIGEST]


def read_stored(file: Path, model: str) -> dict[bytes, Logprobs]:
    """Reads stored log-probabilities; none of another model, or of a damaged file."""
    check_links(file.parent, file.name)
    if not file.is_file():
        return {}
    try:
        arrays = read_npz(file)
        if arrays[MODEL].tobytes() != model.encode():
            return {}
        stops = np.cumsum(arrays[COUNTS])
        if stops[-1] != len(arrays[VALUES]):
            return {}
        parts = np.split(arrays[VALUES].astype(np.float32), stops[:-1])
        pairs = list(zip(arrays[ROWS], parts, strict=True))
    except (InputError, ValueError, KeyError, IndexError, TypeError):
        return {}  # they are computed again
    return {name.tobytes(): part for name, part in pairs}


def write_stored(file: Path, model: str, known: dict[bytes, Logprobs]) -> None:
    """Stores the log-probabilities of rows by their digests."""
    content = io.BytesIO()
    names = np.frombuffer(b"".join(known), np.uint8).reshape(-1, DIGEST)
    arrays = {
        MODEL: np.frombuffer(model.encode(), np.uint8),
        ROWS: names,
        COUNTS: np.array([len(x) for x in known.values()], np.int64),
        VALUES: np.concatenate([*known.values()]),
    }
    np.savez(content, **arrays)
    replace_file(file, content.getvalue())


def reference_logprobs(
    reference: TeacherModel,
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
) -> Float[Array, "R m"]:
    """Computes the log-probability of each learned token under a reference."""
    head = merge_model(graph, parameters).output_head()
    return -target_losses(reference.hidden(parameters, batch), head, batch).nll


def answer_logprobs(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "R m"]:
    """Computes the log-probability of each learned token under a model."""
    return -token_losses(graph, parameters, batch).nll


def compute_logprobs(
    reference: TeacherModel,
    model: PromptedModel,
    parameters: Parameters,
    examples: ExampleGroups,
    data: DataSource,
    numbers: Collection[int],
) -> list[Logprobs]:
    """Computes the log-probabilities of the learned tokens of some examples' rows.

    Args:
      reference: the reference.
      model: the model that is trained.
      parameters: all of its parameters.
      examples: the examples.
      data: settings of batches.
      numbers: numbers of the examples to compute.
    """
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    chosen = set(numbers)
    planned = [
        batch
        for index in range(plan.batches_per_epoch)
        if chosen & {*(batch := plan.batch(index)).rows.reshape(-1).tolist()}
    ]
    batches = (build_batch(examples, each, model.config.pad_id) for each in planned)
    if isinstance(reference, RunReference):
        run, scored = answer_logprobs, reference.model
        parameters = reference.parameters(parameters)
    else:
        run, scored = functools.partial(reference_logprobs, reference), model
    found: dict[int, list[Logprobs]] = {}
    for each, (batch, logprobs) in zip(
        planned, score_batches(run, scored, parameters, batches), strict=True
    ):
        by_example = np.asarray(logprobs).reshape(len(each.rows), -1, logprobs.shape[1])
        learned = batch.loss_weights.reshape(by_example.shape) != 0
        for number, rows, mask in zip(each.rows, by_example, learned, strict=True):
            if number != FILLING:
                found[int(number)] = [x[m] for x, m in zip(rows, mask, strict=True)]
    return [row for number in numbers for row in found[number]]


def with_stored_reference(
    reference: TeacherModel,
    examples: ExampleGroups,
    model: PromptedModel,
    data: DataSource,
    parameters: Parameters,
    file: Path | None = None,
    frozen_model: str = "",
) -> ReferencedExamples:
    """Returns examples with the log-probabilities of a reference.

    Args:
      reference: the reference.
      examples: the examples.
      model: the model that is trained.
      data: settings of batches.
      parameters: all parameters of the model.
      file: where they are stored; None to keep them in memory alone.
      frozen_model: fingerprint of the frozen model, if there is a file.
    """
    compute = functools.partial(
        compute_logprobs, reference, model, parameters, examples, data
    )
    fingerprint = frozen_model
    if isinstance(reference, RunReference):
        fingerprint += reference.digest
    return ReferencedExamples(examples, compute, file, fingerprint)
