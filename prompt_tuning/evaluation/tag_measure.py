"""Measure the tags that a model assigns to words, and the entities in them.

Tags in the form IOB2, e.g. B-PER, I-PER and O, mark entities. As in the script
`conlleval` (Tjong Kim Sang and De Meulder 2003) and the library seqeval, `I` continues
the previous word's entity if that has the same type, and otherwise starts a new one. An
answered entity is right if its first word, last word and type are right.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.metric_directions import (
    BEGINS,
    ENTITY_F1,
    OUTSIDE,
    mark_entities,
)
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.metric_sums import MetricSums, micro_f1
from prompt_tuning.evaluation.token_outcomes import learned_values
from prompt_tuning.models.scoring import tag_nll
from prompt_tuning.pretrained.prompted_model import PromptedModel

ENTITY_METRICS = ("entity_precision", "entity_recall", ENTITY_F1)

Tags = Sequence[Sequence[str]]
"""The tags of the words of each example."""


class TagAnswers(NamedTuple):
    """The tags that a model assigns to the words of each example."""

    tags: Tags
    probabilities: Sequence[Float[np.ndarray, "w"]]


class TagMeasure:
    """Tags of held-out words, and the metrics of answers.

    Attributes:
      gold: tags of each example's learned words.
    """

    def __init__(self, model: PromptedModel, examples: Examples, plan: BatchPlan):
        self._model, self._examples, self._plan = model, examples, plan
        labels = model.config.labels
        each = (examples[number] for number in range(len(examples)))
        self.gold: Tags = [
            [labels[tag] for tag in x.targets[x.weights != 0]] for x in each
        ]

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; without entities, only the accuracy."""
        return list(ENTITY_METRICS) if mark_entities(self._model.config.labels) else []

    def answer(self, parameters: Parameters) -> TagAnswers:
        """Finds the most probable tag of each learned word."""
        return tag_words(self._model, parameters, self._examples, self._plan)

    def metrics(self, answers: TagAnswers) -> Mapping[str, MetricSums]:
        """Computes the metrics of the answers."""
        if not self.metric_names:
            return {}
        return entity_metrics(self.gold, answers.tags)


def tag_words(
    model: PromptedModel, parameters: Parameters, examples: Examples, plan: BatchPlan
) -> TagAnswers:
    """Finds the most probable tag of each learned word."""
    arguments = model, parameters, examples, plan, tag_nll
    _, *nats = learned_values(*arguments, lambda nll: list(np.moveaxis(nll, -1, 0)))
    costs = np.stack(nats)  # [C, t]
    best, lowest = costs.argmin(axis=0), np.exp(-costs.min(axis=0))
    ends = np.cumsum(examples.weight_counts)[:-1]
    labels = model.config.labels
    tags = [[labels[number] for number in part] for part in np.split(best, ends)]
    return TagAnswers(tags, np.split(lowest, ends))


def entities(tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yields each entity's first word, the word after its last, and its type."""
    start, kind = 0, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        following = "" if tag == OUTSIDE else tag[2:]
        if kind and (tag.startswith(BEGINS) or following != kind):
            yield start, index, kind
            kind = ""
        if following and not kind:
            start, kind = index, following


def entity_metrics(gold: Tags, answered: Tags) -> dict[str, MetricSums]:
    """Computes precision, recall and F1 over the entities of all examples.

    They are 0 where the divisor is 0.
    """
    rows = np.zeros((len(gold), 3))  # right, answered and expected entities
    for row, pair in zip(rows, zip(answered, gold, strict=True), strict=True):
        found, expected = ({*entities(tags)} for tags in pair)
        row[:] = len(found & expected), len(found), len(expected)

    def share(of: int):
        return lambda sums: np.asarray(sums[..., 0] / np.maximum(sums[..., of], 1))

    scores = (share(1), share(2), micro_f1)
    return {
        name: MetricSums(rows, score, per_example=False)
        for name, score in zip(ENTITY_METRICS, scores, strict=True)
    }
