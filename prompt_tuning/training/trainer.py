"""A run that is ready to step: opened, checked, and read."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from prompt_tuning.config.run import Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.source_reading import joined_words
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.transfer import Transfer

AnyStep = Callable[[Any, Parameters, Batch], tuple[Any, Any]]
"""`(state, frozen, batch) -> (state, metrics)`; donates `state`."""

MANY_EPOCHS = 200
"""Number of epochs from which a note points out how often examples are read."""


def _brief(epochs: float) -> str:
    """Returns a number of epochs with at least two digits."""
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A run, ready to step.

    `frozen` leaves out streamed parameters. Members that train together share one
    `step`, which takes and returns the states and metrics of all of them. `context` has
    arrays that the objective has computed once, by path.
    """

    run: Run
    model: PromptedModel
    frozen: Parameters
    start: TrainState
    step: AnyStep
    examples: Examples | ExampleGroups
    batch_plan: BatchPlan
    evaluator: Evaluator | None
    transfer: Transfer | None = None
    stages: PipelinePlan | None = None
    context: Parameters = dataclasses.field(default_factory=dict)

    def parameters(self, trained: Parameters) -> Parameters:
        """Returns all parameters in memory, with the given trained ones."""
        return trained | self.inputs

    @functools.cached_property
    def inputs(self) -> Parameters:
        """Second argument of a step: frozen parameters and the objective's context."""
        return self.frozen | self.context

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the frozen model."""
        frozen = self.model.weight_storage.with_streamed(self.frozen)
        return fingerprint(frozen, self.model.placement)

    def whole(self, path: str) -> np.ndarray:
        """Returns a frozen parameter without the padding of a mesh."""
        weight = self.model.weight_storage.with_streamed(self.frozen)[path]
        if isinstance(weight, LayeredWeight):
            return np.stack([weight.read(n) for n in range(weight.shape[0])])
        placement = self.model.placement
        array = np.asarray(weight) if placement is None else placement.to_host(weight)
        shape = self.model.plan.abstract[path].shape
        return array[tuple(slice(length) for length in shape)]

    def report(self) -> str:
        """Lists restored, fresh, trained and frozen parameters, with sizes."""
        rows = [self.model.plan.report()]
        if self.transfer is not None:
            rows.append(self.transfer.report())
        elif self.run.start_from is not None:
            rows.append(
                f"start_from {self.run.start_from}: ignored, the run resumes from its "
                "own checkpoint"
            )
        groups: dict[str, Any] = {"trained": self.start.trained, "frozen": self.frozen}
        if self.model.weight_storage.streamed:
            groups["streamed"] = self.model.weight_storage.streamed
        for name, leaves in groups.items():
            # Unpadded shapes: on a mesh the vocabulary may be padded.
            counts = {p: math.prod(self.model.plan.abstract[p].shape) for p in leaves}
            count = sum(counts.values())
            size = sum(counts[p] * x.dtype.itemsize for p, x in leaves.items())
            rows.append(f"{name:8} {len(leaves):>8} {count:>16,} {size:>18,}")
        rows.append(f"attention: {self.model.attention}")
        layout = self.model.layout
        if layout is not None and layout.whole_memories is not None:
            rows.append(layout.whole_memories)
        if self.stages is not None:
            rows.append(self.stages.report())
        if self.model.ends is not None:
            rows.append(self.model.ends)
        if self.evaluator is not None and self.evaluator.loss_meaning is not None:
            rows.append(
                f"loss, in training and evaluation: {self.evaluator.loss_meaning}"
            )
        rows += self._joining_note()
        rows.append(self.duration())
        rows += self._types_note()
        if self.examples.skipped:
            rows.append(f"{self.examples.skipped} left out because they are too long")
        if self.examples.unlearned:
            rows.append(f"{self.examples.unlearned} left out: nothing is learned")
        if self.examples.without_completion:
            count = self.examples.without_completion
            rows.append(f"{count} left out: they have no completion")
        if self.examples.repetition.conversations:
            rows.append(str(self.examples.repetition))
        if self.examples.truncated:
            limit = self.model.maximum_length
            rows.append(f"{self.examples.truncated} truncated to {limit} tokens")
        return "\n".join(rows)

    @property
    def epochs(self) -> float:
        """Number of passes of the whole run over its examples."""
        return self.run.steps / self.batch_plan.batches_per_epoch

    def duration(self) -> str:
        """Describes the length of the run, with a note if it repeats few examples."""
        count, steps = len(self.examples), f"{self.run.steps:,} steps"
        row = f"{count} training examples; {steps} are {_brief(self.epochs)} epochs"
        if self.epochs < MANY_EPOCHS:
            return row
        return (
            f"{row}\nnote: the run reads each example {self.epochs:,.0f} times: "
            f"{how_to_set('Run.steps', NUMBER)} sets less"
        )

    def _types_note(self) -> list[str]:
        """Returns a note if every token is learned because the data has no types."""
        source, examples = self.run.source, self.examples
        if source.use_token_type_ids is not None or not isinstance(examples, Examples):
            return []
        if examples.rows[examples.locate(0)[0]].token_types is not None:
            return []
        refusing = how_to_set("DataSource.use_token_type_ids", True)
        return [
            "note: the data has no token_type_ids, so every token is learned; to "
            f"refuse such data, give {refusing}"
        ]

    def _joining_note(self) -> list[str]:
        """Returns a note if a prompt runs into its completion without a space."""
        config = self.model.config
        if config.architecture == "encoder_decoder" or config.labels:
            return []
        words = joined_words(self.run.source)
        if words is None:
            return []
        return [
            f"note: no space separates prompts from completions, as in {shown(words)}; "
            f"to insert one, give {how_to_set('DataSource.joiner', ' ')}"
        ]
