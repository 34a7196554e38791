"""Rank the labels of an evaluation for any inputs, and measure the held-out answers."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int64

from prompt_tuning.core.batch import value_columns
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.decoding.row_checks import check_rows, check_scores
from prompt_tuning.evaluation import metric_sums
from prompt_tuning.evaluation.ranking import (
    class_nats,
    encode_labels,
    gold_label_indices,
    label_nats,
)
from prompt_tuning.evaluation.results import Ranking, calibrate_nats, values_text
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.evaluation_settings import PERPLEXITY, Evaluation

Rows = Sequence[Sequence[int]]

VALUE_METRICS = {
    "multi_label": ("label_accuracy", "label_micro_f1", "label_macro_f1"),
    "regression": ("mse", "pearson", "spearman"),
}
"""Metrics of heads that predict a value per class, by problem."""


class LabelRanker:
    """Computes the costs of an evaluation's labels.

    Attributes:
      labels: texts of the labels.
      encoded: token ids of each label, without the end token; empty with a class head.
      has_head: whether a class head scores the labels instead of their texts.

    Args:
      model: the model.
      evaluation: settings with labels.
      context_ids: token ids of a text that precedes each input.

    Raises:
      InputError: if a label has no tokens, two labels have the same tokens, the labels
        differ from those of the class head, or an encoder has no class head.
    """

    def __init__(
        self,
        model: PromptedModel,
        evaluation: Evaluation,
        context_ids: Sequence[int] = (),
    ):
        check_scores(model)
        self._model, self._evaluation = model, evaluation
        self._context_ids = context_ids
        self.labels = list(evaluation.labels or model.config.labels)
        self.has_head = bool(model.config.labels)
        self.encoded: list[list[int]] = []
        if self.has_head:
            _check_labels(self.labels, model.config.labels)
            unfit = "Evaluation.calibrate" if evaluation.calibrate else None
            if PERPLEXITY in evaluation.metrics:
                unfit = f"{PERPLEXITY!r} in Evaluation.metrics"
            if unfit and model.config.problem != "single_label":
                raise InputError(
                    f"{unfit} is set, but the model's head does not choose one class "
                    f"(ClassHead.problem is {model.config.problem!r}): leave it out"
                )
        else:
            self.encoded = encode_labels(model, evaluation.data, self.labels)

    @property
    def answer_length(self) -> int:
        """Number of tokens of the longest label, including its end token.

        A class takes no token, but an encoder's input ends with EOS.
        """
        if self.has_head:
            return int(self._model.interface.encodes)
        longest = max(len(label) for label in self.encoded)
        return longest + int(self._evaluation.data.add_eos)

    def check_room(self, rows: Rows) -> None:
        """Checks before any computation that every label fits after every row.

        Raises:
          InputError: if one does not.
        """
        check_rows(self._model, [*rows, *self._content_free], self.answer_length)

    def rank(
        self,
        parameters: Parameters,
        rows: Rows,
        prompt_ids: Sequence[int] | None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Ranking:
        """Computes the cost of each label for each row.

        `on_batch` is called after each batch with its number of (input, label) rows.
        """
        nats = self._nats(parameters, rows, prompt_ids, on_batch)
        if not self._content_free:
            problem = self._model.config.problem
            return Ranking(self.labels, nats, problem=problem)
        # Each prompt is calibrated by itself: [N, f, C], then one for each row.
        count, texts = self._model.prompt_count, len(self._content_free)
        without = None
        if prompt_ids is not None:
            without = np.repeat(np.arange(count), texts).tolist()
        content_free = self._nats(parameters, self._content_free * count, without)
        content_free = content_free.reshape(count, texts, len(self.labels))
        prompts = np.array([0] * len(rows) if prompt_ids is None else prompt_ids)
        return Ranking(self.labels, nats, calibrate_nats(nats, content_free[prompts]))

    @functools.cached_property
    def _content_free(self) -> list[list[int]]:
        texts = self._evaluation.calibrate or ()
        encoding = TextEncoding(self._model, self._evaluation.data)
        rows = [encoding.encode(text) for text in texts]
        counts = [self._model.interface.begin_length(row) for row in rows]
        return [
            [*row[:count], *self._context_ids, *row[count:]]
            for row, count in zip(rows, counts, strict=True)
        ]

    def _nats(
        self,
        parameters: Parameters,
        rows: Rows,
        prompt_ids: Sequence[int] | None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Float[np.ndarray, "n C"]:
        data = self._evaluation.data
        if self.has_head:
            return class_nats(
                self._model,
                parameters,
                rows,
                batch_size=data.batch_size,
                prompt_ids=prompt_ids,
                on_batch=on_batch,
            )
        return label_nats(
            self._model,
            parameters,
            rows,
            self.encoded,
            add_eos=data.add_eos,
            length_normalize=self._evaluation.length_normalize,
            batch_size=data.batch_size,
            prompt_ids=prompt_ids,
            on_batch=on_batch,
        )


def _check_labels(given: Sequence[str], labels: Sequence[str]) -> None:
    """Checks that the evaluation's labels are those of the class head."""
    if [label.strip() for label in given] != [label.strip() for label in labels]:
        raise InputError(
            f"the labels are {shown(list(given))}, but the model's head scores "
            f"{shown(list(labels))}: leave the labels out, or give these in this order"
        )


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
