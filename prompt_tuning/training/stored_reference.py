"""The log-probabilities of a reference, computed once and stored in the run."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.losses.objective import TeacherModel, target_losses
from prompt_tuning.losses.preference import REFERENCE_LOGPROBS
from prompt_tuning.models.scoring import merge_model, token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.training.run_reference import RunReference
from prompt_tuning.training.stored_columns import (
    ColumnForm,
    CompletedGroups,
    StoredColumns,
    compute_rows,
)

REFERENCE_FILE = "reference.npz"
FORM = ColumnForm((REFERENCE_LOGPROBS,), {REFERENCE_LOGPROBS: np.dtype(np.float32)})


def reference_logprobs(
    reference: TeacherModel, graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> dict[str, Float[Array, "R m"]]:
    """Computes the log-probability of each learned token under a reference."""
    head = merge_model(graph, parameters).output_head()
    losses = target_losses(reference.hidden(parameters, batch), head, batch)
    return {REFERENCE_LOGPROBS: -losses.nll}


def answer_logprobs(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> dict[str, Float[Array, "R m"]]:
    """Computes the log-probability of each learned token under a model."""
    return {REFERENCE_LOGPROBS: -token_losses(graph, parameters, batch).nll}


def with_stored_reference(
    reference: TeacherModel,
    examples: ExampleGroups,
    model: PromptedModel,
    data: DataSource,
    parameters: Parameters,
    file: Path | None = None,
    frozen_model: str = "",
) -> CompletedGroups:
    """Returns examples with the log-probabilities of a reference.

    Without a file, they are kept only in memory.
    """

    def compute(numbers: Collection[int]) -> list[Any]:
        if isinstance(reference, RunReference):
            of_run = reference.model, reference.parameters(parameters)
            return compute_rows(answer_logprobs, *of_run, examples, data, numbers)
        run = functools.partial(reference_logprobs, reference)
        return compute_rows(run, model, parameters, examples, data, numbers)

    if isinstance(reference, RunReference):
        frozen_model += reference.digest
    stored = StoredColumns(FORM, examples, compute, file, frozen_model)
    return CompletedGroups(examples, stored)
