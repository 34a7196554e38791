"""Every metric that an evaluation measures can choose the best checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.metric_directions import DIRECTIONS, metric_and_direction
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.label_ranker import LabelMeasure
from prompt_tuning.evaluation.retrieval import RetrievalEvaluator
from prompt_tuning.evaluation.tag_measure import ENTITY_METRICS
from prompt_tuning.evaluation.text_metrics import TEXT_METRICS
from prompt_tuning.settings.evaluation_settings import PERPLEXITY


def test_the_table_has_the_metrics_of_an_evaluation():
    evaluation = SimpleNamespace(
        metrics=[PERPLEXITY, *TEXT_METRICS],
        text_metrics=list(TEXT_METRICS),
        exact_match=True,
        calibrate=["N/A"],
    )
    retrieval: Any = object.__new__(RetrievalEvaluator)
    known = {*retrieval.metric_names, *ENTITY_METRICS}
    for problem in ("single_label", "multi_label", "regression"):
        evaluator: Any = object.__new__(Evaluator)
        evaluator._model = SimpleNamespace(config=SimpleNamespace(problem=problem))
        evaluator._evaluation, evaluator._objective = evaluation, object()
        evaluator._labels = labels = object.__new__(LabelMeasure)
        labels.__dict__.update(_problem=problem, _calibrates=True)
        evaluator._preferences = object()
        known |= set(evaluator.metric_names)
    assert known == DIRECTIONS.keys()


@pytest.mark.parametrize(
    ("keep_best", "labels", "expected"),
    [
        ("auto", None, ("loss", "min")),
        ("auto", ["a", "b"], ("label_accuracy", "max")),
        ("perplexity", ["a", "b"], ("perplexity", "min")),
        ("rougeL", None, ("rougeL", "max")),
        (("accuracy", "min"), None, ("accuracy", "min")),
        (None, ["a", "b"], None),
    ],
)
def test_the_metric_and_its_direction(keep_best, labels, expected):
    assert metric_and_direction(keep_best, labels) == expected


def test_tags_of_entities_are_chosen_by_their_f1():
    for tags, expected in ((["O", "B-PER"], "entity_f1"), (["NOUN", "VERB"], "loss")):
        assert metric_and_direction("auto", tags=tags) == (
            expected,
            DIRECTIONS[expected],
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("f1", "'f1', expected one of the metrics loss, .*bleu"),
        (("loss", "low"), "a metric and 'min' or 'max'"),
        (("loss",), "a metric and 'min' or 'max'"),
    ],
)
def test_other_values_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        metric_and_direction(given)
