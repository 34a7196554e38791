"""What a prompt is worth: nats, exact match, accuracy by ranking verbalizers."""

import jax
import numpy as np

from prompt_tuning.data.batches import stream_batches
from prompt_tuning.data.readings import Example
from prompt_tuning.decoding.generate import strip_end
from prompt_tuning.decoding.texts import check_rows, continue_all
from prompt_tuning.errors import InputError
from prompt_tuning.models.parameters import Parameters
from prompt_tuning.pretrained import PromptedModel
from prompt_tuning.run import Evaluation
from prompt_tuning.training.ranking import rank_labels
from prompt_tuning.training.step import Sums, loss_sums

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
        self._labels = self._encode_labels()
        asked = self._examples if evaluation.exact_match or self._labels else ()
        pairs = [(given(x, model), completion(x, model)) for x in asked]
        self._given = [row for row, _ in pairs]
        self._wanted = [row for _, row in pairs]
        self._gold = self._gold_labels() if self._labels else []
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
        )
        right = [a == b for a, b in zip(made, self._wanted, strict=True)]
        return float(np.mean(right))

    def _label_accuracy(self, parameters: Parameters) -> float:
        assert self._labels is not None
        scores = rank_labels(
            self._model,
            parameters,
            self._given,
            self._labels,
            add_eos=self._evaluation.data.add_eos,
            batch_size=self._evaluation.data.batch_size,
        )
        return float(np.mean(scores.argmin(axis=1) == np.array(self._gold)))

    def _encode_labels(self) -> list[list[int]] | None:
        if not self._evaluation.labels:
            return None
        tokenizer = self._model.needed_tokenizer()
        joiner = self._evaluation.data.joiner
        encoded = []
        for label in self._evaluation.labels:
            ids = tokenizer.encode_continuation(joiner + label)
            if self._model.config.architecture == "encoder_decoder":
                ids = tokenizer.encode(label)
            if not ids:
                raise InputError(
                    f"the label {label!r} gives no token, so it cannot be ranked; use "
                    "another verbalizer"
                )
            encoded.append(ids)
        return encoded

    def _gold_labels(self) -> list[int]:
        assert self._labels is not None
        gold = []
        for index, ids in enumerate(self._wanted):
            if ids not in self._labels:
                text = self._model.needed_tokenizer().decode(ids)
                raise InputError(
                    f"example {index} has the completion {text!r}, which is none of "
                    f"the labels {list(self._evaluation.labels or ())}"
                )
            gold.append(self._labels.index(ids))
        return gold


def given(example: Example, model: PromptedModel) -> list[int]:
    """What the model is given of an example, to continue or to answer."""
    if model.config.architecture == "encoder_decoder":
        return example.inputs.tolist()
    return example.inputs[: example.prefix_length].tolist()


def completion(example: Example, model: PromptedModel) -> list[int]:
    """What is wanted of the model, without the token that ends it."""
    targets = example.targets
    if model.config.architecture == "decoder_only":
        targets = targets[example.prefix_length :]
    return strip_end(targets.tolist(), model.config.eos_id)
