"""Rank the labels of an evaluation for any inputs, for `evaluate` and `predict`."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.row_checks import check_rows, check_scores
from prompt_tuning.evaluation.calibration import calibrate_nats
from prompt_tuning.evaluation.ranking import class_nats, encode_labels, label_nats
from prompt_tuning.evaluation.results import Ranking
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.evaluation_settings import PERPLEXITY, Evaluation

Rows = Sequence[Sequence[int]]


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
