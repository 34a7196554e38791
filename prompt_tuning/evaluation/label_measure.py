"""Measure how well a model chooses the labels of held-out examples."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int64

from prompt_tuning.core.batch import value_columns
from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation import metric_sums
from prompt_tuning.evaluation.label_ranker import LabelRanker
from prompt_tuning.evaluation.ranking import gold_label_indices
from prompt_tuning.evaluation.results import Ranking, values_text
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.evaluation_settings import Evaluation

VALUE_METRICS = {
    "multi_label": ("label_accuracy", "label_micro_f1", "label_macro_f1"),
    "regression": ("mse", "pearson", "spearman"),
}
"""Metrics of heads that predict a value per class, by problem."""


class LabelMeasure:
    """Labels of held-out examples, and the metrics of answers.

    Attributes:
      ranker: ranks the labels, or computes their values.
      gold: index of each example's label, `[n]`; for heads that predict a value per
        class, all values, `[n, C]`.

    Raises:
      InputError: if an example's completion is not a label, and as `LabelRanker`.
    """

    gold: Int64[np.ndarray, "n"] | Float[np.ndarray, "n C"]

    def __init__(
        self,
        model: PromptedModel,
        evaluation: Evaluation,
        examples: Examples,
        context_ids: Sequence[int] = (),
    ):
        self.ranker = LabelRanker(model, evaluation, context_ids)
        self._problem: ClassProblem = model.config.problem
        self._calibrates = bool(evaluation.calibrate)
        labels = self.ranker.labels
        if self._problem != "single_label":
            self.gold = _values(examples, len(labels))
        elif self.ranker.has_head:
            numbers = range(len(examples))
            self.gold = np.array([examples[i].targets[-1] for i in numbers], np.int64)
        else:
            encoded = self.ranker.encoded
            self.gold = np.array(gold_label_indices(model, examples, encoded, labels))

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics."""
        if self._problem != "single_label":
            return list(VALUE_METRICS[self._problem])
        kinds = ["label", *["calibrated"] * self._calibrates]
        return [f"{k}_{m}" for k in kinds for m in ("accuracy", "macro_f1")]

    def expected(self) -> list[str]:
        """Returns the text of each example's label, labels or numbers."""
        labels = self.ranker.labels
        if self._problem == "single_label":
            return [labels[number] for number in self.gold]
        rows = np.asarray(self.gold, float).tolist()
        return [values_text(labels, row, self._problem) for row in rows]

    def metrics(self, ranking: Ranking) -> Mapping[str, metric_sums.MetricSums]:
        """Computes the metrics of the answers."""
        if ranking.problem == "regression":
            return metric_sums.number_metrics(-ranking.nats, self.gold)
        if ranking.problem == "multi_label":
            chosen = ranking.probabilities > 0.5
            return metric_sums.label_set_metrics(chosen, self.gold > 0.5, "label")
        ranked = {"label": ranking.nats, "calibrated": ranking.calibrated}
        return {
            name: metric
            for prefix, nats in ranked.items()
            if nats is not None
            for name, metric in metric_sums.class_metrics(
                nats.argmin(axis=1), self.gold, len(ranking.labels), prefix
            ).items()
        }


def _values(examples: Examples, count: int) -> Float[np.ndarray, "n C"]:
    names = value_columns(count)
    columns = (examples[i].columns for i in range(len(examples)))
    return np.array([[x[name][-1] for name in names] for x in columns], float)
