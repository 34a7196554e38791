"""Predict labels or generate text for inputs without targets."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.data.rows.python_rows import data_files
from prompt_tuning.data.rows.text_records import lines_of
from prompt_tuning.data.rows.word_rows import TAGS, WORDS, encode_words, read_words
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_checks import check_rows
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.label_ranker import LabelRanker
from prompt_tuning.evaluation.results import Ranking
from prompt_tuning.evaluation.tag_measure import tag_words
from prompt_tuning.losses.class_objective import ClassObjective
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.input_encoding import (
    PROMPT_KEY,
    EncodedInputs,
    encode_inputs,
    fit_inputs,
    text_key,
)


class Prediction(NamedTuple):
    """The predicted label of one input.

    Attributes:
      label: the most probable label.
      probabilities: probability of each label.
    """

    label: str
    probabilities: dict[str, float]


class LabelSet(NamedTuple):
    """The labels of one input in a multi-label problem (`ClassHead.problem`).

    Attributes:
      labels: labels with a probability above one half.
      probabilities: probability that each label applies.
    """

    labels: list[str]
    probabilities: dict[str, float]


class Numbers(NamedTuple):
    """The predicted numbers of one input in a regression.

    Attributes:
      values: each number by name.
    """

    values: dict[str, float]


class WordTags(NamedTuple):
    """The tags of the words of one input, from a token classification head.

    Attributes:
      words: the words of the input.
      tags: the most probable tag of each; None for a word without tokens.
      probabilities: probability of each of these tags; 0 for such a word.
    """

    words: list[str]
    tags: list[str | None]
    probabilities: list[float]


AnyPrediction = Prediction | LabelSet | Numbers | WordTags


def label_settings(
    run: Run,
    labels: Sequence[str] | None = None,
    batch_size: int | None = None,
    of_head: Sequence[str] = (),
) -> Evaluation | None:
    """Returns the settings for ranking a run's labels; None without labels.

    Labels come from the run's evaluation, or else from an objective that compares
    classes, or from a class head.

    Raises:
      InputError: if the labels cannot be ranked.
    """
    objective = run.objective
    evaluation = run.evaluation or Evaluation(data=run.source)
    chosen, normalize = evaluation.labels, evaluation.length_normalize
    if not chosen and isinstance(objective, ClassObjective):
        chosen, normalize = objective.labels, objective.length_normalize
    head = run.tuning.class_head
    if not chosen:
        chosen = of_head or (None if head is None else head.labels)
    if not (labels or chosen):
        return None
    data, ranked = evaluation.data, list(labels or chosen or ())
    return Evaluation(
        data=dataclasses.replace(data, batch_size=batch_size or data.batch_size),
        # A head of one number has no labels to rank.
        labels=ranked if labels or len(ranked) > 1 else None,
        length_normalize=normalize,
        calibrate=evaluation.calibrate,
    )


def predict_inputs(
    run: Run,
    model: PromptedModel,
    parameters: Parameters,
    inputs: Sequence[str | Mapping[str, Any]],
    *,
    labels: Sequence[str] | None = None,
    batch_size: int | None = None,
    prompt_id: int | None = None,
) -> list[AnyPrediction]:
    """Predicts the labels of inputs given in Python.

    Inputs are texts, or mappings with the keys of the run's data.

    Raises:
      InputError: if there are no labels, or an input cannot be used.
    """
    evaluation = label_settings(run, labels, batch_size, model.config.labels)
    if evaluation is None:
        raise InputError(
            "the run has no labels: predict(inputs, labels=[...]), or generate(texts)"
        )
    source = evaluation.data
    plain = any(isinstance(item, str) for item in inputs)
    lines = lines_of(inputs, text_key(source) if plain else PROMPT_KEY)
    if model.config.problem == "tokens":
        return [*predict_tags(model, parameters, source, lines, labels, prompt_id)]
    encoded = encode_inputs(model, source, lines, prompt_id)
    return predict_labels(model, parameters, evaluation, encoded)


def predict_labels(
    model: PromptedModel,
    parameters: Parameters,
    evaluation: Evaluation,
    inputs: EncodedInputs,
    on_batch: Callable[[int], None] | None = None,
) -> list[AnyPrediction]:
    """Ranks the labels for each input, as an evaluation does.

    `on_batch` is called after each batch with its number of (input, label) rows.

    Raises:
      InputError: if an input is too long.
    """
    ranker = LabelRanker(model, evaluation)
    rows = fit_inputs(model, evaluation.data, inputs, ranker.answer_length)
    ranker.check_room(rows)
    ranking = ranker.rank(parameters, rows, inputs.prompt_ids, on_batch)
    return [_prediction(ranking, number) for number in range(len(rows))]


def predict_tags(
    model: PromptedModel,
    parameters: Parameters,
    source: DataSource,
    lines: Sequence[JsonLine],
    labels: Sequence[str] | None = None,
    prompt_id: int | None = None,
) -> list[WordTags]:
    """Predicts the tag of each word of inputs.

    A line has a list of words, or a text to split at white space. `labels` must be
    None, because the head has its own.

    Raises:
      InputError: if an input cannot be used, or there are labels.
    """
    if labels is not None:
        raise InputError(
            "labels are given, but the head scores "
            f"{shown(list(model.config.labels))} for each word: leave them out"
        )
    key = source.prompt_id_key if prompt_id is None else "prompt_id"
    interface, tokenizer = model.interface, model.needed_tokenizer()
    words, pieces, records = [], [], []
    for line in lines:
        with line.locating_errors():
            words.append(read_words(line.content, source.prompt_key))
            pieces.append(encode_words(tokenizer, words[-1]))
            ids = [*interface.begin_ids, *itertools.chain(*pieces[-1])]
            if any(pieces[-1]):
                check_rows(model, [interface.scored_row(ids)], 0)
        task = {} if key is None else {key: prompt_id}
        if key is not None and prompt_id is None:
            task = {key: line.value(key, "DataSource.prompt_id_key")}
        if any(pieces[-1]):
            # Any tag makes a word one that is answered.
            records.append({**task, WORDS[0]: words[-1], TAGS[0]: [0] * len(words[-1])})
    answers = iter(())
    if records:
        unread = DataSource(
            files=(),
            prompt_id_key=key,
            prompt_id_names=source.prompt_id_names,
            batch_size=source.batch_size,
        )
        with data_files(records, unread) as files:
            data = dataclasses.replace(unread, files=files)
            examples = load_examples(data, interface)
            plan = plan_batches(data, interface, examples, shuffle=False)
            tagged = tag_words(model, parameters, examples, plan)
        answers = zip(tagged.tags, tagged.probabilities, strict=True)
    return [
        _word_tags(x, y, *(next(answers) if any(y) else ((), ())))
        for x, y in zip(words, pieces, strict=True)
    ]


def _word_tags(
    words: list[str],
    pieces: Sequence[Sequence[int]],
    tags: Sequence[str],
    probabilities: Sequence[float] | np.ndarray,
) -> WordTags:
    """Returns the tags of words; those without tokens have none."""
    found = zip(tags, probabilities, strict=True)
    result = WordTags(words, [], [])
    for tokens in pieces:
        tag, probability = next(found) if tokens else (None, 0)
        result.tags.append(tag)
        result.probabilities.append(float(probability))
    return result


def _prediction(ranking: Ranking, number: int) -> AnyPrediction:
    answer = ranking.answer(number)
    if ranking.problem == "regression":
        return Numbers(answer)
    if ranking.problem == "multi_label":
        return LabelSet([label for label, p in answer.items() if p > 0.5], answer)
    return Prediction(ranking.labels[int(ranking.answers[number])], answer)


def generate_outputs(
    model: PromptedModel,
    parameters: Parameters,
    source: DataSource,
    inputs: EncodedInputs,
    *,
    new_tokens: int,
    batch_size: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[str]:
    """Continues each input greedily, encoded with the settings of the run's data.

    Other arguments are as in `continue_rows`.

    Raises:
      InputError: if an input is too long.
    """
    rows = fit_inputs(model, source, inputs, new_tokens)
    continuations = continue_rows(
        model,
        parameters,
        rows,
        Sampling(new_tokens=new_tokens),
        batch_size=batch_size or source.batch_size,
        prompt_ids=inputs.prompt_ids,
        on_batch=on_batch,
    )
    return decode_continuations(model, rows, continuations)
