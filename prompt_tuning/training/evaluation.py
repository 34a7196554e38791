"""What a prompt is worth: nats, exact match, accuracy by ranking verbalizers."""

import jax
import numpy as np

from prompt_tuning.data.batches import stream_batches
from prompt_tuning.decoding.texts import check_rows, continue_all
from prompt_tuning.errors import InputError
from prompt_tuning.losses.objective import Sums
from prompt_tuning.models.parameters import Parameters
from prompt_tuning.pretrained import PromptedModel
from prompt_tuning.run import Evaluation
from prompt_tuning.training.ranking import (
    closed,
    completion,
    encode_labels,
    given,
    gold_labels,
    rank_labels,
)
from prompt_tuning.training.step import loss_sums

batch_sums = jax.jit(loss_sums, static_argnums=0)


class Evaluator:
    """Measures parameters on held-out examples, which are read and checked once."""

    def __init__(self, model: PromptedModel, evaluation: Evaluation):
        """Opens the held-out files.

        Raises:
          InputError: if they cannot be used, or an example's completion is no label.
        """
        self._model, self._evaluation = model, evaluation
        self._examples = evaluation.data.load(model)
        self._plan = evaluation.data.plan(model, self._examples, shuffle=False)
        texts = evaluation.labels or ()
        self._labels = encode_labels(model, evaluation.data, texts) if texts else []
        asked = self._examples if evaluation.exact_match or self._labels else ()
        parts = [(given(x, model), completion(x, model), x.prompt_id) for x in asked]
        self._given = [row for row, _, _ in parts]
        self._wanted = [row for _, row, _ in parts]
        tasks = [prompt_id for _, _, prompt_id in parts]
        self._prompt_ids = tasks if self._examples.has_prompt_ids else None
        self._gold = []
        if self._labels:
            self._gold = gold_labels(model, self._wanted, self._labels, texts)
        self._check_room()

    def __call__(self, parameters: Parameters) -> dict[str, float]:
        """Measures everything that was asked for.

        Returns:
          `loss` (mean nats per weighted token) and `accuracy` (of these tokens), and
          where asked `exact_match` and `label_accuracy`, as shares of the examples.
        """
        metrics = self._token_metrics(parameters)
        if self._evaluation.exact_match:
            metrics["exact_match"] = self._exact_match(parameters)
        if self._labels:
            metrics["label_accuracy"] = self._label_accuracy(parameters)
        return metrics

    @property
    def skipped(self) -> int:
        """Held-out rows that are left out because they are too long."""
        return self._examples.skipped

    def check_metric(self, name: str) -> None:
        """Refuses to choose the best by a metric that is not measured.

        Raises:
          InputError: with those that are.
        """
        measured = ["loss", "accuracy"]
        measured += ["exact_match"] if self._evaluation.exact_match else []
        measured += ["label_accuracy"] if self._labels else []
        if name not in measured:
            raise InputError(
                f"Run.keep_best names the metric {name!r}, but the evaluation measures "
                f"{', '.join(measured)}; ask for it in Evaluation, or choose another"
            )

    def _check_room(self) -> None:
        """Refuses rows that an answer does not fit behind, before anything runs."""
        if self._labels:
            longest = max(len(label) for label in self._labels)
            room = longest + int(self._evaluation.data.add_eos)
            check_rows(self._model, self._given, room)
        if self._evaluation.exact_match:
            check_rows(self._model, self._given, self._evaluation.new_tokens)

    def _token_metrics(self, parameters: Parameters) -> dict[str, float]:
        total = np.zeros(len(Sums._fields))
        batches = stream_batches(
            self._examples,
            self._plan,
            0,
            self._plan.batches_per_epoch,
            pad_id=self._model.config.pad_id,
        )
        for batch in batches:
            sums = batch_sums(self._model.graph, parameters, batch)
            total += np.array(jax.device_get(sums))
        loss, weight, correct = total.tolist()
        return {"loss": loss / weight, "accuracy": correct / weight}

    def _exact_match(self, parameters: Parameters) -> float:
        made = continue_all(
            self._model,
            parameters,
            self._given,
            new_tokens=self._evaluation.new_tokens,
            batch_size=self._evaluation.data.batch_size,
            prompt_ids=self._prompt_ids,
        )
        right = [a == b for a, b in zip(made, self._wanted, strict=True)]
        return float(np.mean(right))

    def _label_accuracy(self, parameters: Parameters) -> float:
        scores = rank_labels(
            self._model,
            parameters,
            self._given,
            self._labels,
            add_eos=self._evaluation.data.add_eos,
            batch_size=self._evaluation.data.batch_size,
            prompt_ids=self._prompt_ids,
        )
        if self._evaluation.length_normalize:
            ends = closed(self._labels, self._model, self._evaluation.data.add_eos)
            scores = scores / [len(label) for label in ends]
        return float(np.mean(scores.argmin(axis=1) == np.array(self._gold)))
