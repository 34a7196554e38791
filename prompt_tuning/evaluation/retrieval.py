"""Measure how well text vectors find what belongs to a query."""

from concurrent.futures import Executor
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples import contrastive_examples
from prompt_tuning.evaluation.batch_scores import score_batches
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.metric_sums import MetricSums, mean_metric, ratio
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.evaluation.token_outcomes import LOSS
from prompt_tuning.losses.contrastive import Contrastive
from prompt_tuning.models.scoring import pooled_states
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation

RECALL, RANK = "recall_at_1", "mrr"
"""Share of the queries with the positive ranked first, and mean reciprocal rank."""
AT_ONCE = 1024
"""Number of queries that are compared with all texts at a time."""


def open_texts(
    model: PromptedModel, data: DataSource, pooling: str
) -> contrastive_examples.ContrastiveExamples:
    """Opens the files of a data source; see `load_contrastive`."""
    encode = TextEncoding(model, data).encode
    return contrastive_examples.load_contrastive(data, model.interface, encode, pooling)


class RetrievalEvaluator(Evaluator):
    """Ranks all distinct texts of held-out records for each query, by cosine.

    Raises:
      InputError: if the files cannot be used, or the evaluation requests other metrics.
    """

    def __init__(
        self, model: PromptedModel, evaluation: Evaluation, objective: Contrastive
    ):
        objective.check_model(model.config)
        if evaluation.generates or evaluation.labels or evaluation.category_key:
            raise InputError(
                "vectors of texts are measured by recall_at_1 and mrr alone: leave out "
                "exact_match, labels, categories and metrics of generated texts"
            )
        self._model, self._evaluation = model, evaluation
        self._contrastive, self.categories = objective, None
        self.examples = open_texts(model, evaluation.data, objective.pooling)
        self._plan = plan_batches(
            evaluation.data, model.interface, self.examples, shuffle=False
        )

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; also used in the training log."""
        return [LOSS, RECALL, RANK]

    @property
    def loss_meaning(self) -> str:
        """Meaning of `loss` for reports."""
        return "contrastive loss of a query among all held-out texts, in nats"

    def __len__(self) -> int:
        return len(self.examples)

    def compile_ahead(self, executor: Executor, parameters: Any) -> None:
        """Does nothing: the first measurement compiles the program."""
        del executor, parameters

    def predictions(self, system: str, result: EvaluationResult) -> list[str]:
        """Raises an error: vectors are not answers that could be listed.

        Raises:
          InputError: always.
        """
        raise InputError("vectors of texts give no answers to list: leave it out")

    def _measure(self, parameters: Parameters, with_texts: bool) -> EvaluationResult:
        del with_texts
        vectors = self._vectors(parameters)  # [E, C, D]
        chosen, positives = self.examples.candidates()
        candidates = vectors[:, 1:].reshape(-1, vectors.shape[-1])[chosen]
        losses, ranks = [], []
        for start in range(0, len(vectors), AT_ONCE):
            stop = start + AT_ONCE
            scores = vectors[start:stop, 0] @ candidates.T
            positive = positives[start:stop]
            ranks.append(_ranks(scores, positive))
            losses.append(
                _losses(scores / float(self._contrastive.temperature), positive)
            )
        rank, loss = np.concatenate(ranks), np.concatenate(losses)
        rows = np.stack([loss, np.ones_like(loss)], axis=1)
        metrics = {
            LOSS: MetricSums(rows, ratio, lower_is_better=True),
            RECALL: mean_metric(rank == 1),
            RANK: mean_metric(1 / rank),
        }
        return EvaluationResult(metrics, {})

    def _vectors(self, parameters: Parameters) -> Float[np.ndarray, "E C D"]:
        """Computes normalized vectors of all texts."""
        model, texts, plan = self._model, self.examples, self._plan
        shape = len(texts), texts.rows_per_example, model.config.width
        vectors = np.zeros(shape, np.float32)
        batches = stream_batches(
            texts, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
        )
        scored = score_batches(pooled_states, model, parameters, batches)
        for index, (_, states) in enumerate(scored):
            numbers = plan.batch(index).rows
            real = numbers != FILLING
            grouped = np.asarray(states).reshape(len(numbers), *shape[1:])
            vectors[numbers[real]] = grouped[real]
        norms = np.linalg.norm(vectors, axis=2, keepdims=True)
        return vectors / np.maximum(norms, 1e-12)


def _ranks(
    scores: Float[np.ndarray, "n c"], own: Int[np.ndarray, "n"]
) -> Int[np.ndarray, "n"]:
    """Returns the rank of each query's positive, after others with equal scores."""
    right = np.take_along_axis(scores, own[:, None], axis=1)
    return np.sum(scores >= right, axis=1)


def _losses(
    scores: Float[np.ndarray, "n c"], own: Int[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
    """Computes the cross-entropy of each query's positive."""
    right = np.take_along_axis(scores, own[:, None], axis=1)[:, 0]
    highest = scores.max(1)
    total = np.exp(scores - highest[:, None]).sum(1)
    return highest + np.log(total) - right
