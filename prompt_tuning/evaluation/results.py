"""Results of an evaluation: metrics, rankings, and one line per example."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.evaluation.categories import NO_CATEGORY, Categories
from prompt_tuning.evaluation.metric_sums import MetricSums
from prompt_tuning.evaluation.token_outcomes import TokenOutcomes


@dataclasses.dataclass(frozen=True)
class AnswerTexts:
    """Inputs and answers of all examples, as texts."""

    given: Sequence[str]
    expected: Sequence[str]
    generated: Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Costs of all labels for all examples.

    Attributes:
      labels: texts of the labels.
      nats: cost of each label for each example, `[n, C]`; the lowest is the answer.
      calibrated: the costs after calibration, or None.
      problem: the class head's problem, see `ModelConfig.problem`; in a regression the
        costs are minus the numbers.
    """

    labels: Sequence[str]
    nats: Float[np.ndarray, "n C"]
    calibrated: Float[np.ndarray, "n C"] | None = None
    problem: ClassProblem = "single_label"

    @property
    def costs(self) -> Float[np.ndarray, "n C"]:
        """The costs that decide: calibrated ones if available."""
        return self.nats if self.calibrated is None else self.calibrated

    @property
    def answers(self) -> Integer[np.ndarray, "n"]:
        """Index of the winning label of each example."""
        return self.costs.argmin(axis=1)

    @property
    def probabilities(self) -> Float[np.ndarray, "n C"]:
        """Probability of each label among the labels: the softmax of minus its cost.

        The cost of a label is the sum of its tokens' negative log-probabilities,
        including the end token if the data has one, or their mean with
        `Evaluation.length_normalize`. In multi-label problems, each label has its own
        probability.
        """
        if self.problem == "multi_label":
            return np.exp(-self.nats)
        return np.exp(log_probabilities(self.costs))

    def answer(self, index: int) -> dict[str, float]:
        """Returns an example's probability of each label, or its numbers."""
        numbers = self.problem == "regression"
        values = -self.nats[index] if numbers else self.probabilities[index]
        return dict(zip(self.labels, values.tolist(), strict=True))


def values_text(
    labels: Sequence[str], values: Sequence[float], problem: ClassProblem
) -> str:
    """Formats the answer of a head with a value per class: labels or numbers."""
    if problem == "regression":
        return ", ".join(f"{value:.6g}" for value in values)
    pairs = zip(labels, values, strict=True)
    return ", ".join(label for label, value in pairs if value > 0.5)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """All measurements of one model.

    `generated` has the token ids of generated texts, and `tags` the answered tags of
    learned words, for token classification.
    """

    metrics: Mapping[str, MetricSums]
    by_category: Mapping[str, Mapping[str, MetricSums]]
    ranking: Ranking | None = None
    generated: Sequence[Sequence[int]] | None = None
    tokens: TokenOutcomes | None = None
    tags: Sequence[Sequence[str]] | None = None

    @property
    def groups(self) -> dict[str, Mapping[str, MetricSums]]:
        """Metrics of all examples, under the empty name, and of each category."""
        return {"": self.metrics, **self.by_category}


def split_by_category(
    metrics: Mapping[str, MetricSums],
    token_metrics: Mapping[str, Mapping[str, MetricSums]],
    categories: Categories,
) -> dict[str, dict[str, MetricSums]]:
    """Computes the metrics of each category.

    Args:
      metrics: metrics over all examples; they count an example in its first category.
      token_metrics: for each category, metrics that count only its tokens.
      categories: categories of the examples.
    """
    result = {}
    for index, name in enumerate(categories.names):
        in_category = categories.example_categories == index
        from_tokens = token_metrics[name]
        result[name] = {
            # The second sum is the weight: 0 in examples without such a token.
            metric: from_tokens[metric].select(from_tokens[metric].rows[:, 1] > 0)
            if metric in from_tokens
            else sums.select(in_category)
            for metric, sums in metrics.items()
        }
    return result


def prediction_lines(
    system: str,
    result: EvaluationResult,
    texts: AnswerTexts,
    categories: Categories | None,
) -> Iterator[str]:
    """Yields one line of JSON per example.

    Its keys are `system`, `example` (its number), `category` if there are categories,
    `input`, `target`, `output` (the generated text, else the winning label, else null),
    the winning `label` and each label's cost (`label_nats`) if labels were ranked, the
    `tags` of words from a token classification head, and `scores` with each metric that
    is meaningful for a single example.
    """
    values = {n: each.each() for n, each in result.metrics.items() if each.per_example}
    ranking = result.ranking
    for index, (given, expected) in enumerate(
        zip(texts.given, texts.expected, strict=True)
    ):
        line: dict[str, Any] = {"system": system, "example": index}
        if categories is not None:
            number = int(categories.example_categories[index])
            none = number == NO_CATEGORY
            line["category"] = None if none else categories.names[number]
        generated = None if texts.generated is None else texts.generated[index]
        line |= {"input": given, "target": expected, "output": generated}
        if ranking is not None and ranking.problem == "single_label":
            label = ranking.labels[int(ranking.answers[index])]
            nats = map(float, ranking.nats[index])
            line |= {
                "output": label if generated is None else generated,
                "label": label,
                "label_nats": dict(zip(ranking.labels, nats, strict=True)),
            }
        elif ranking is not None:
            answer = ranking.answer(index)
            numbers = list(answer.values())
            text = values_text(ranking.labels, numbers, ranking.problem)
            kind = "values" if ranking.problem == "regression" else "probabilities"
            line |= {"output": text, kind: answer}
        if result.tags is not None:
            tags = list(result.tags[index])
            line |= {"output": " ".join(tags), "tags": tags}
        scores = {name: float(each[index]) for name, each in values.items()}
        line["scores"] = {n: x for n, x in scores.items() if math.isfinite(x)}
        yield json.dumps(line, ensure_ascii=False) + "\n"


def calibrate_nats(
    nats: Float[np.ndarray, "n C"], content_free: Float[np.ndarray, "n f C"]
) -> Float[np.ndarray, "n C"]:
    """Calibrates the cost of each label by its cost without content; the lowest wins.

    A model prefers some labels whatever the input. Inputs without content, e.g. "N/A",
    measure this bias: each label's probability is divided by its probability given
    these (Zhao et al. 2021, "Calibrate before use", section 5).

    With the labels' probabilities `p`, normalized over the labels, and their mean `q`
    over the inputs without content, the result is `-log(p / q)`: the paper's diagonal
    matrix `diag(q)^-1`, without a bias.

    Args:
      nats: negative log likelihood of each label for each example.
      content_free: the same for each of `f` inputs without content, with the example's
        prompt.
    """
    # Mean probability of each label without content, [n, C]
    q = np.exp(log_probabilities(content_free)).mean(axis=1)
    return np.log(q) - log_probabilities(nats)


def log_probabilities(
    nats: Float[np.ndarray, "*lead C"],
) -> Float[np.ndarray, "*lead C"]:
    """Normalizes costs to log-probabilities over the labels."""
    minimum = nats.min(axis=-1, keepdims=True)
    total = np.exp(minimum - nats).sum(axis=-1, keepdims=True)
    return minimum - nats - np.log(total)
