"""Evaluate a model: token loss, generated text, ranked labels."""

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import WITH_VALUES
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.status_line import status
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.source_reading import tasks_of
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_checks import check_generates, check_rows, check_scores
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.categories import read_categories, read_references
from prompt_tuning.evaluation.exact_match import (
    CompletionPlaces,
    decide_by_tokens,
    exact_matches,
)
from prompt_tuning.evaluation.label_ranker import LabelMeasure
from prompt_tuning.evaluation.metric_sums import MetricSums, mean_metric
from prompt_tuning.evaluation.preference_measure import METRICS as PREFERENCE_METRICS
from prompt_tuning.evaluation.preference_measure import PreferenceMeasure
from prompt_tuning.evaluation.ranking import completion_tokens, given_tokens
from prompt_tuning.evaluation.results import (
    AnswerTexts,
    EvaluationResult,
    prediction_lines,
    split_by_category,
)
from prompt_tuning.evaluation.tag_measure import TagMeasure
from prompt_tuning.evaluation.text_metrics import TEXT_METRICS
from prompt_tuning.evaluation.token_outcomes import (
    CROSS_ENTROPY,
    LOSS,
    TokenOutcomes,
    compile_scores_ahead,
    measure_tokens,
    token_measure,
)
from prompt_tuning.losses.objective import HeldOutObjective
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.evaluation_settings import (
    METRIC_NAMES,
    PERPLEXITY,
    Evaluation,
)

Rows = list[list[int]]


class _Rows(NamedTuple):
    """Tokens of all examples.

    `places` are the positions of each completion among the learned tokens; None if the
    input was cut, because the losses then belong to another input.
    """

    given: Rows
    completions: Rows
    prompt_ids: list[int] | None
    places: list[CompletionPlaces | None]


class Evaluator:
    """Measures parameters on held-out examples, which are opened and checked once.

    Attributes:
      examples: the held-out examples, with the counts of those left out.
      categories: categories of the examples, if requested.
    """

    def __init__(
        self,
        model: PromptedModel,
        evaluation: Evaluation,
        *,
        context_ids: Sequence[int] = (),
        examples: Examples | None = None,
        objective: HeldOutObjective | None = None,
        preferences: PreferenceMeasure | None = None,
    ):
        """Opens the held-out files.

        Args:
          model: the model to evaluate.
          evaluation: settings of the evaluation.
          context_ids: token ids of a text to insert before each example's input.
          examples: examples to use instead of those in the files.
          objective: reported as `loss`, with the cross-entropy as `cross_entropy`; None
            to report the cross-entropy as `loss`.
          preferences: additional measure of judged answers, if any.

        Raises:
          InputError: if the files cannot be used, an example's completion is not a
            label, or the model is an encoder without a class head.
        """
        check_scores(model)
        if evaluation.generates:
            check_generates(model)
        self._model, self._evaluation = model, evaluation
        self._context_ids = list(context_ids)
        self._ahead: list[Future[Any]] = []
        data = evaluation.data
        if examples is None:
            examples = load_examples(data, model.interface, context_ids=context_ids)
        self.examples = examples
        self._objective, self._preferences = objective, preferences
        self._token_measure = token_measure(objective)
        self._plan = plan_batches(data, model.interface, self.examples, shuffle=False)
        self._labels = self._tags = None
        if model.config.problem == "tokens":
            self._tags = TagMeasure(model, self.examples, self._plan)
        elif evaluation.labels or model.config.labels:
            arguments = (model, evaluation, self.examples, context_ids)
            self._labels = LabelMeasure(*arguments)
        self._references = self._read_references()
        self.categories = None
        if evaluation.category_key is not None:
            tasks = tasks_of(data, model.interface)
            self.categories = read_categories(
                evaluation,
                self.examples,
                separate=model.config.architecture == "encoder_decoder",
                dropped=tasks.token.position if tasks and tasks.token else None,
            )
        self._check_room()

    def __call__(self, parameters: Parameters) -> dict[str, float]:
        """Computes all metrics of the evaluation.

        Returns:
          the metrics in `metric_names`: `loss` (mean nats per weighted token),
          `accuracy` (of these tokens), `cross_entropy` if `loss` is another objective,
          and all others that the evaluation requests.
        """
        metrics = self.measure(parameters).metrics
        return {name: metrics[name].value for name in self.metric_names}

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; also used in the training log."""
        evaluation = self._evaluation
        names = [LOSS, *([CROSS_ENTROPY] if self._objective else [])]
        numbers = self._model.config.problem == "regression"
        names += [] if numbers else ["accuracy"]
        names += PREFERENCE_METRICS if self._preferences else []
        names += [PERPLEXITY] if PERPLEXITY in evaluation.metrics else []
        names += ["exact_match"] if evaluation.exact_match else []
        names += [
            name for metric in evaluation.text_metrics for name in METRIC_NAMES[metric]
        ]
        measure = self._labels or self._tags
        return names + ([] if measure is None else measure.metric_names)

    @property
    def loss_meaning(self) -> str | None:
        """Meaning of `loss` for reports; None if it is the cross-entropy."""
        return None if self._objective is None else self._objective.meaning

    def __len__(self) -> int:
        return len(self.examples)

    def check_metric(self, name: str, setting: str) -> None:
        """Checks that the metric of the best checkpoint is measured.

        Raises:
          InputError: if it is not, listing those that are.
        """
        if name not in self.metric_names:
            raise InputError(
                f"{setting} names the metric {name!r}, but the evaluation measures "
                f"{', '.join(self.metric_names)}; ask for it, e.g. by "
                f"{how_to_set('Evaluation.exact_match', True)} or "
                f"{how_to_set('Evaluation.metrics', ['METRIC'])}, or choose another"
            )

    def compile_ahead(
        self, executor: Executor, parameters: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Starts to compile the token-loss program in another thread."""
        self._ahead = compile_scores_ahead(
            executor,
            self._model,
            parameters,
            self.examples,
            self._plan,
            self._token_measure,
        )

    def measure(
        self, parameters: Parameters, *, with_texts: bool = False
    ) -> EvaluationResult:
        """Computes all metrics, with the contribution of each example.

        `with_texts` also generates the completions of exact match, for `predictions`.
        """
        with status("evaluating"):
            return self._measure(parameters, with_texts)

    def _measure(self, parameters: Parameters, with_texts: bool) -> EvaluationResult:
        while self._ahead:
            if not (program := self._ahead.pop()).cancelled():
                program.result()
        tokens = measure_tokens(
            self._model, parameters, self.examples, self._plan, self._token_measure
        )
        metrics = self._token_metrics(tokens)
        generated, evaluation = None, self._evaluation
        if evaluation.text_metrics or (evaluation.exact_match and with_texts):
            generated = self.generate(parameters)
            metrics |= self._text_metrics(generated)
        elif evaluation.exact_match:
            matches = self._exact_matches(parameters, tokens)
            metrics["exact_match"] = mean_metric(matches)
        ranking = None
        if self._labels is not None:
            inputs = self._rows.given, self._rows.prompt_ids
            ranking = self._labels.ranker.rank(parameters, *inputs)
            metrics |= self._labels.metrics(ranking)
        answers = None if self._tags is None else self._tags.answer(parameters)
        if self._tags is not None and answers is not None:
            metrics |= self._tags.metrics(answers)
        categories, by_category = self.categories, {}
        if categories is not None:
            token_metrics = {
                name: self._token_metrics(tokens, categories.target_categories == index)
                for index, name in enumerate(categories.names)
            }
            by_category = split_by_category(metrics, token_metrics, categories)
        if self._preferences is not None:
            metrics |= self._preferences(parameters)
        tags = None if answers is None else answers.tags
        return EvaluationResult(metrics, by_category, ranking, generated, tokens, tags)

    def _token_metrics(
        self, tokens: TokenOutcomes, chosen: Bool[np.ndarray, "t"] | None = None
    ) -> dict[str, MetricSums]:
        metrics, problem = tokens.metrics(chosen), self._model.config.problem
        if problem in WITH_VALUES:
            del metrics[PERPLEXITY]
        if problem == "regression":
            del metrics["accuracy"]
        return metrics

    def predictions(self, system: str, result: EvaluationResult) -> list[str]:
        """Returns a line of JSON per example; see `prediction_lines`.

        Raises:
          InputError: if the model has no tokenizer to decode texts.
        """
        rows, tokenizer = self._rows, self._model.needed_tokenizer()
        answers = AnswerTexts(
            [tokenizer.decode(self._words(row)) for row in rows.given],
            self._expected(),
            None if result.generated is None else self._texts(result.generated),
        )
        return list(prediction_lines(system, result, answers, self.categories))

    @property
    def completion_lengths(self) -> list[int]:
        """Number of tokens of each example's completion."""
        return [len(completion) for completion in self._rows.completions]

    @functools.cached_property
    def _rows(self) -> _Rows:
        model, examples = self._model, self.examples
        rows = _Rows([], [], [] if examples.has_prompt_ids else None, [])
        for index in range(len(examples)):
            example = examples[index]
            whole = given_tokens(example, model)
            row = self._with_room(whole)
            completion = completion_tokens(example, model)
            places = None
            if row == whole:
                new_tokens = self._evaluation.new_tokens
                places = CompletionPlaces.find(example, completion, new_tokens)
            rows.given.append(row)
            rows.completions.append(completion)
            rows.places.append(places)
            if rows.prompt_ids is not None:
                rows.prompt_ids.append(example.prompt_id)
        return rows

    def _with_room(self, row: list[int]) -> list[int]:
        """Shortens an input, if it may be truncated, to leave room for every answer."""
        truncation = self.examples.truncation
        if truncation is None:
            return row
        answers = [0]
        # The inputs of a head of classes are cut already.
        if self._labels is not None and not self._labels.ranker.has_head:
            answers.append(self._labels.ranker.answer_length)
        if self._evaluation.generates:
            answers.append(self._evaluation.new_tokens)
        room = truncation.maximum - max(answers)
        return row if room < 1 else truncation.cut_prompt(row, room)

    def _read_references(self) -> list[list[str]] | None:
        """Returns the reference texts if any metric needs them."""
        if not self._evaluation.text_metrics:
            return None
        if self._evaluation.references_key is not None:
            return read_references(self._evaluation, self.examples)
        return [[text] for text in self._texts(self._rows.completions)]

    def _expected(self) -> list[str]:
        """Returns the text of each completion; with a class head, the label."""
        if self._labels is not None and self._labels.ranker.has_head:
            return self._labels.expected()
        if self._tags is not None:
            return [" ".join(tags) for tags in self._tags.gold]
        return self._texts(self._rows.completions)

    def _texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        return decode_continuations(self._model, self._rows.given, completions)

    def _words(self, row: Sequence[int]) -> list[int]:
        """Drops ids that stand for prompt vectors of a template."""
        return [id for id in row if id < self._model.config.vocabulary_size]

    def _check_room(self) -> None:
        """Checks before any computation that every answer fits after its row."""
        if self._labels is not None:
            self._labels.ranker.check_room(self._rows.given)
        if self._evaluation.generates:
            check_rows(self._model, self._rows.given, self._evaluation.new_tokens)

    def generate(self, parameters: Parameters) -> Rows:
        """Generates the answer to each example."""
        return continue_rows(
            self._model,
            parameters,
            self._rows.given,
            Sampling(new_tokens=self._evaluation.new_tokens),
            batch_size=self._evaluation.data.batch_size,
            prompt_ids=self._rows.prompt_ids,
        )

    def _exact_matches(
        self, parameters: Parameters, outcomes: TokenOutcomes
    ) -> Bool[np.ndarray, "n"]:
        """Finds exact matches, as far as possible from token outcomes."""
        rows, prompt_ids = self._rows, self._rows.prompt_ids
        matches = decide_by_tokens(outcomes, rows.places, self._model.stop_ids)
        undecided = [i for i, match in enumerate(matches) if match is None]
        decided = np.array(matches, bool)
        decided[undecided] = exact_matches(
            self._model,
            parameters,
            [rows.given[i] for i in undecided],
            [rows.completions[i] for i in undecided],
            new_tokens=self._evaluation.new_tokens,
            batch_size=self._evaluation.data.batch_size,
            prompt_ids=prompt_ids and [prompt_ids[i] for i in undecided],
        )
        return decided

    def _text_metrics(self, generated: Rows) -> dict[str, MetricSums]:
        metrics = {}
        if self._evaluation.exact_match:
            right = [
                a == b for a, b in zip(generated, self._rows.completions, strict=True)
            ]
            metrics["exact_match"] = mean_metric(right)
        if self._references is not None:
            texts = self._texts(generated)
            for name in self._evaluation.text_metrics:
                metrics |= TEXT_METRICS[name](texts, self._references)
        return metrics
