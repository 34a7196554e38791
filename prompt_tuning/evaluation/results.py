"""What was found of one model on held-out examples, metric by metric and one by one."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from prompt_tuning.evaluation.categories import NO_CATEGORY, Categories
from prompt_tuning.evaluation.metric_sums import MetricSums


@dataclasses.dataclass(frozen=True)
class AnswerTexts:
    """What was said to each example, as texts.

    Attributes:
      given: what the model was given.
      wanted: the completion.
      made: what it generated; None where it did not.
    """

    given: Sequence[str]
    expected: Sequence[str]
    generated: Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Ranking:
    """How the labels were ranked.

    Attributes:
      labels: their texts.
      nats: what each costs after each example, `[n, C]`; the least is the answer.
      calibrated: the same after calibration, or None.
    """

    labels: Sequence[str]
    nats: Float[np.ndarray, "n C"]
    calibrated: Float[np.ndarray, "n C"] | None = None

    @property
    def answers(self) -> Integer[np.ndarray, "n"]:
        """The label that wins, calibrated where that was asked for."""
        found = self.nats if self.calibrated is None else self.calibrated
        return found.argmin(axis=1)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """What was found of one model.

    Attributes:
      tallies: each metric, over all examples.
      by_category: the same of each category's examples, by its name.
      ranking: of the labels, if there are any.
      made: token ids of what was generated, if anything was.
    """

    metrics: Mapping[str, MetricSums]
    by_category: Mapping[str, Mapping[str, MetricSums]]
    ranking: Ranking | None = None
    generated: Sequence[Sequence[int]] | None = None

    @property
    def groups(self) -> dict[str, Mapping[str, MetricSums]]:
        """All examples, under the empty name, and then each category."""
        return {"": self.metrics, **self.by_category}


def split_by_category(
    tallies: Mapping[str, MetricSums],
    of_tokens: Mapping[str, Mapping[str, MetricSums]],
    categories: Categories,
) -> dict[str, dict[str, MetricSums]]:
    """Each category's tallies.

    Args:
      tallies: of all examples.
      of_tokens: of each category those that were made of its tokens alone; the others
        are of the examples that are of it.
      categories: of the examples.
    """
    found = {}
    for index, name in enumerate(categories.names):
        inside = categories.example_categories == index
        own = of_tokens[name]
        found[name] = {
            metric: own[metric].select(own[metric].rows[:, 1] > 0)
            if metric in own
            else tally.select(inside)
            for metric, tally in tallies.items()
        }
    return found


def prediction_lines(
    system: str,
    findings: EvaluationResult,
    answers: AnswerTexts,
    categories: Categories | None,
) -> Iterator[str]:
    """One line of JSON for each example.

    It has `system`, `example` (its number), `category` where there are any, `given`,
    `wanted`, `made` (what was generated, else the label that won, else null), the
    `label` that won and what each costs (`label_nats`) where labels were ranked, and
    `scores`, each metric that means something of one example.

    Args:
      system: what was measured.
      findings: of it.
      answers: in text.
      categories: of the examples, or None.
    """
    each = {
        n: tally.each() for n, tally in findings.metrics.items() if tally.per_example
    }
    ranking = findings.ranking
    for index, (given, wanted) in enumerate(
        zip(answers.given, answers.expected, strict=True)
    ):
        line: dict[str, Any] = {"system": system, "example": index}
        if categories is not None:
            of = int(categories.example_categories[index])
            line["category"] = None if of == NO_CATEGORY else categories.names[of]
        made = None if answers.generated is None else answers.generated[index]
        line |= {"given": given, "wanted": wanted, "made": made}
        if ranking is not None:
            label = ranking.labels[int(ranking.answers[index])]
            nats = map(float, ranking.nats[index])
            line |= {
                "made": label if made is None else made,
                "label": label,
                "label_nats": dict(zip(ranking.labels, nats, strict=True)),
            }
        scores = {name: float(values[index]) for name, values in each.items()}
        line["scores"] = {n: x for n, x in scores.items() if math.isfinite(x)}
        yield json.dumps(line, ensure_ascii=False) + "\n"
