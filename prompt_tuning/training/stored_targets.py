"""A distillation teacher's predictions, computed once and stored."""

import functools
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.losses.context_distillation import (
    HIDDEN,
    TEACHER_HIDDEN,
    TOP,
    TOP_COLUMNS,
    TOP_IDS,
    TOP_LOGPROBS,
    Distillation,
    StoredTargets,
)
from prompt_tuning.losses.cross_entropy import top_targets
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.training.stored_columns import (
    ColumnForm,
    CompletedExamples,
    StoredColumns,
    Values,
    compute_rows,
)

TARGETS_FILE = "teacher.npz"
COUNTS = "counts"
"""Name of the stored number of tokens kept per position."""


def with_stored_targets(
    objective: Distillation,
    examples: Examples,
    model: PromptedModel,
    data: DataSource,
    parameters: Parameters,
    file: Path,
    frozen_model: str,
) -> CompletedExamples:
    """Returns examples with the teacher's predictions.

    Raises:
      InputError: if tokens are to be ranked while several devices share the model.
    """
    stored, teacher = objective.stored, objective.teacher
    assert stored is not None
    if stored.kind == TOP and model.placement is not None:
        raise InputError(
            "the likeliest tokens of a teacher are found on one device: leave out the "
            f"mesh, or give {how_to_set('ContextDistillation.targets', HIDDEN)}"
        )

    def compute(numbers: Collection[int]) -> list[Any]:
        known = parameters
        if model.placement is None and not model.weight_storage.by_layer:
            known = parameters | teacher.read_context(parameters)
        run = functools.partial(_predict, objective)
        return compute_rows(run, model, known, examples, data, numbers)

    texts = [getattr(teacher, name, None) for name in ("tokens", "contexts")]
    read = repr((stored, texts))
    fingerprint = frozen_model + hashlib.sha256(read.encode()).hexdigest()
    form = _form(stored, model.config)
    columns = StoredColumns(form, examples, compute, file, fingerprint)
    return CompletedExamples(examples, columns)


def _predict(
    objective: Distillation, graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> dict[str, Array]:
    """Computes the teacher's predictions to store, `[R, m, ...]`."""
    hidden, stored = objective.teacher.hidden(parameters, batch), objective.stored
    assert stored is not None
    if stored.kind == HIDDEN:
        return {TEACHER_HIDDEN: hidden}
    head = merge_model(graph, parameters).output_head()
    found = top_targets(hidden, head, stored.mass, stored.top)
    return dict(zip(TOP_COLUMNS, found, strict=True))


def _form(stored: StoredTargets, config: ModelConfig) -> ColumnForm:
    if stored.kind == HIDDEN:
        kind = np.dtype(config.dtype)
        # NumPy's files have no bfloat16.
        as_stored = np.dtype(f"u{kind.itemsize}")
        return ColumnForm(
            (TEACHER_HIDDEN,),
            {TEACHER_HIDDEN: np.dtype((kind, (config.width,)))},
            lambda x: {TEACHER_HIDDEN: x[TEACHER_HIDDEN].view(as_stored)},
            lambda x: {TEACHER_HIDDEN: x[TEACHER_HIDDEN].view(kind)},
        )
    count = min(stored.top, config.vocabulary_size)
    columns = {
        TOP_IDS: np.dtype((np.int32, (count,))),
        TOP_LOGPROBS: np.dtype((np.float32, (count,))),
    }
    names, size = (COUNTS, *TOP_COLUMNS), config.vocabulary_size
    unpack = functools.partial(_unpack_top, count, size)
    return ColumnForm(names, columns, _pack_top, unpack)


def _pack_top(found: Values) -> Values:
    """Drops tokens beyond those that each position keeps."""
    kept = np.isfinite(found[TOP_LOGPROBS])  # [m, K]
    return {COUNTS: kept.sum(axis=1)} | {
        name: found[name][kept] for name in TOP_COLUMNS
    }


def _unpack_top(count: int, vocabulary_size: int, values: Values) -> Values:
    """Returns ids and log-probabilities `[m, K]`; -inf marks padding."""
    kept, tokens = np.arange(count) < values[COUNTS][:, None], values[TOP_IDS]
    if not kept.sum() == len(tokens) == len(values[TOP_LOGPROBS]):
        raise ValueError("other numbers of tokens are stored than counted")
    if ((tokens < 0) | (tokens >= vocabulary_size)).any():
        raise ValueError("a stored token is not in the vocabulary")
    ids = np.zeros(kept.shape, np.int32)
    logprobs = np.full(kept.shape, -np.inf, np.float32)
    ids[kept], logprobs[kept] = values[TOP_IDS], values[TOP_LOGPROBS]
    return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}
