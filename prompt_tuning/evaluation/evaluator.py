"""What a prompt is worth: of tokens, of generated texts, of ranked verbalizers."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.calibration import calibrate_nats
from prompt_tuning.evaluation.categories import read_categories, read_references
from prompt_tuning.evaluation.evaluation_settings import PERPLEXITY, Evaluation
from prompt_tuning.evaluation.metric_sums import MetricSums, class_metrics, mean_metric
from prompt_tuning.evaluation.ranking import (
    completion_tokens,
    encode_labels,
    given_tokens,
    gold_label_indices,
    label_nats,
)
from prompt_tuning.evaluation.results import (
    AnswerTexts,
    EvaluationResult,
    Ranking,
    prediction_lines,
    split_by_category,
)
from prompt_tuning.evaluation.text_metrics import METRIC_NAMES, TEXT_METRICS
from prompt_tuning.evaluation.token_outcomes import measure_tokens
from prompt_tuning.generation.text_generation import (
    GENERATES,
    check_rows,
    continuation_text,
    continue_all,
    encode_given,
)
from prompt_tuning.pretrained.prompted_model import PromptedModel

Rows = list[list[int]]


class Evaluator:
    """Measures parameters on held-out examples, which are read and checked once.

    Attributes:
      categories: of the examples, if the evaluation names them.
    """

    def __init__(
        self,
        model: PromptedModel,
        evaluation: Evaluation,
        *,
        given_before: Sequence[int] = (),
        examples: Examples | None = None,
    ):
        """Opens the held-out files.

        Args:
          model: that is measured.
          evaluation: what is measured of it.
          given_before: ids of a text that is put before what each example is given.
          examples: of these files, in place of all that they hold.

        Raises:
          InputError: if the files cannot be used, or an example's completion is no
            label.
        """
        self._model, self._evaluation = model, evaluation
        self._given_before = list(given_before)
        data = evaluation.data
        if examples is None:
            examples = data.load(model, given_before=given_before)
        self._examples = examples
        self._plan = data.plan(model, self._examples, shuffle=False)
        texts = evaluation.labels or ()
        self._labels = encode_labels(model, data, texts) if texts else []
        self._gold = np.zeros(0, np.int64)
        if texts:
            gold = gold_label_indices(model, self._rows[1], self._labels, texts)
            self._gold = np.array(gold)
        self._references = self._read_references()
        self.categories = None
        if evaluation.category_key is not None:
            tasks = data.tasks(model)
            self.categories = read_categories(
                evaluation,
                self._examples,
                separate=model.config.architecture == "encoder_decoder",
                dropped=tasks.token.at if tasks and tasks.token else None,
            )
        self._check_room()

    def __call__(self, parameters: Parameters) -> dict[str, float]:
        """Measures everything that was asked for.

        Returns:
          what `metrics` names: `loss` (mean nats per weighted token) and `accuracy` (of
          these tokens), and what else was asked for, most of it as shares of the
          examples.
        """
        tallies = self.measure(parameters).metrics
        return {name: tallies[name].value for name in self.metric_names}

    @property
    def metric_names(self) -> list[str]:
        """What is measured, also in training."""
        asked = self._evaluation
        names = ["loss", "accuracy"]
        names += [PERPLEXITY] if PERPLEXITY in asked.metrics else []
        names += ["exact_match"] if asked.exact_match else []
        names += [
            name for metric in asked.text_metrics for name in METRIC_NAMES[metric]
        ]
        kinds = [*(["label"] if self._labels else [])]
        kinds += ["calibrated"] if asked.calibrate else []
        return names + [f"{k}_{m}" for k in kinds for m in ("accuracy", "macro_f1")]

    @property
    def skipped(self) -> int:
        """Held-out rows that are left out because they are too long."""
        return self._examples.skipped

    @property
    def uncounted(self) -> int:
        """Tokens that are not measured for the sake of another model's numbers."""
        return self._examples.uncounted

    def __len__(self) -> int:
        return len(self._examples)

    def check_metric(self, name: str) -> None:
        """Refuses to choose the best by a metric that is not measured.

        Raises:
          InputError: with those that are.
        """
        if name not in self.metric_names:
            raise InputError(
                f"Run.keep_best names the metric {name!r}, but the evaluation measures "
                f"{', '.join(self.metric_names)}; ask for it in Evaluation, or choose "
                "another"
            )

    def measure(self, parameters: Parameters) -> EvaluationResult:
        """Measures everything, and keeps what each example adds to it."""
        tokens = measure_tokens(self._model, parameters, self._examples, self._plan)
        tallies: dict[str, MetricSums] = dict(tokens.metrics())
        made = self._generate(parameters) if self._evaluation.generates else None
        if made is not None:
            tallies |= self._tallies_of_texts(made)
        ranking = self._rank(parameters) if self._labels else None
        if ranking is not None:
            tallies |= self._tallies_of_labels(ranking)
        categories, parts = self.categories, {}
        if categories is not None:
            of_tokens = {
                name: tokens.metrics(categories.target_categories == index)
                for index, name in enumerate(categories.names)
            }
            parts = split_by_category(tallies, of_tokens, categories)
        return EvaluationResult(tallies, parts, ranking, made)

    def predictions(self, system: str, findings: EvaluationResult) -> list[str]:
        """A line of JSON for each example; see `prediction_lines`.

        Raises:
          InputError: if there is no tokenizer to tell texts by.
        """
        rows, wanted, _ = self._rows
        tokenizer = self._model.needed_tokenizer()
        answers = AnswerTexts(
            [tokenizer.decode(self._words(row)) for row in rows],
            self._texts(wanted),
            None if findings.generated is None else self._texts(findings.generated),
        )
        return list(prediction_lines(system, findings, answers, self.categories))

    @property
    def completion_lengths(self) -> list[int]:
        """Tokens of each example's completion."""
        return [len(completion) for completion in self._rows[1]]

    @functools.cached_property
    def _rows(self) -> tuple[Rows, Rows, list[int] | None]:
        """What is given of each example, what is wanted, and which prompt it has."""
        model, examples = self._model, self._examples
        parts = [
            (
                given_tokens(example, model),
                completion_tokens(example, model),
                example.prompt_id,
            )
            for example in (examples[index] for index in range(len(examples)))
        ]
        tasks = [prompt_id for _, _, prompt_id in parts]
        return (
            [row for row, _, _ in parts],
            [row for _, row, _ in parts],
            tasks if examples.has_prompt_ids else None,
        )

    def _read_references(self) -> list[list[str]] | None:
        """The texts that generated ones are compared with, if they are."""
        if not self._evaluation.text_metrics:
            return None
        if self._evaluation.references_key is not None:
            return read_references(self._evaluation, self._examples)
        return [[text] for text in self._texts(self._rows[1])]

    def _texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Completions as texts that continue what was given."""
        tokenizer = self._model.needed_tokenizer()
        if self._model.config.architecture == "encoder_decoder":
            return [tokenizer.decode(ids) for ids in completions]
        return [
            continuation_text(tokenizer, self._words(row), ids)
            for row, ids in zip(self._rows[0], completions, strict=True)
        ]

    def _words(self, row: Sequence[int]) -> list[int]:
        """A row without the ids that stand for vectors of a template's prompt."""
        return [id for id in row if id < self._model.config.vocabulary_size]

    def _check_room(self) -> None:
        """Refuses rows that an answer does not fit behind, before anything runs."""
        if self._labels:
            longest = max(len(label) for label in self._labels)
            room = longest + int(self._evaluation.data.add_eos)
            check_rows(self._model, self._rows[0] + self._content_free, room)
        if self._evaluation.generates:
            self._model.weight_storage.reject_streamed(GENERATES)
            check_rows(self._model, self._rows[0], self._evaluation.new_tokens)

    def _generate(self, parameters: Parameters) -> Rows:
        rows, _, prompt_ids = self._rows
        return continue_all(
            self._model,
            parameters,
            rows,
            new_tokens=self._evaluation.new_tokens,
            batch_size=self._evaluation.data.batch_size,
            prompt_ids=prompt_ids,
        )

    def _tallies_of_texts(self, made: Rows) -> dict[str, MetricSums]:
        tallies = {}
        if self._evaluation.exact_match:
            right = [a == b for a, b in zip(made, self._rows[1], strict=True)]
            tallies["exact_match"] = mean_metric(right)
        if self._references is not None:
            texts = self._texts(made)
            for name in self._evaluation.text_metrics:
                tallies |= TEXT_METRICS[name](texts, self._references)
        return tallies

    def _rank(self, parameters: Parameters) -> Ranking:
        rows, _, prompt_ids = self._rows
        nats = self._label_nats(parameters, rows, prompt_ids)
        labels = list(self._evaluation.labels or ())
        if not self._content_free:
            return Ranking(labels, nats)
        # Every prompt is asked without content; each example has its own one's answer.
        count = self._model.prompt_count
        free = self._label_nats(
            parameters,
            self._content_free * count,
            None
            if prompt_ids is None
            else np.repeat(np.arange(count), len(self._content_free)).tolist(),
        ).reshape(count, len(self._content_free), len(labels))
        own = np.zeros(len(rows), int) if prompt_ids is None else np.array(prompt_ids)
        return Ranking(labels, nats, calibrate_nats(nats, free[own]))

    @functools.cached_property
    def _content_free(self) -> Rows:
        """Token ids of the inputs without content that labels are calibrated by."""
        texts = self._evaluation.calibrate or ()
        template = self._evaluation.data.token_template(self._model)
        rows = [encode_given(self._model, text, template) for text in texts]
        bos = self._model.config.bos_id
        return [
            [*row[:1], *self._given_before, *row[1:]]
            if row[:1] == [bos]
            else [*self._given_before, *row]
            for row in rows
        ]

    def _label_nats(
        self, parameters: Parameters, rows: Rows, prompt_ids: list[int] | None
    ) -> Float[np.ndarray, "n C"]:
        data = self._evaluation.data
        return label_nats(
            self._model,
            parameters,
            rows,
            self._labels,
            add_eos=data.add_eos,
            length_normalize=self._evaluation.length_normalize,
            batch_size=data.batch_size,
            prompt_ids=prompt_ids,
        )

    def _tallies_of_labels(self, ranking: Ranking) -> Mapping[str, MetricSums]:
        ranked = {"label": ranking.nats, "calibrated": ranking.calibrated}
        return {
            metric: tally
            for start, nats in ranked.items()
            if nats is not None
            for metric, tally in class_metrics(
                nats.argmin(axis=1), self._gold, len(self._labels), start
            ).items()
        }
