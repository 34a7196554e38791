"""Compares metrics of generated text with manual counts and other libraries."""

import importlib.util

import pytest
import sacrebleu

from prompt_tuning.core.errors import InputError
from prompt_tuning.evaluation.metric_sums import intervals
from prompt_tuning.evaluation.text_metrics import (
    TEXT_METRICS,
    answer_words,
    bleu,
    rouge,
    squad,
    word_f1,
)
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import METRIC_NAMES, Evaluation

MADE = ["the cat sat on a mat today", "hello there big world", "x"]
REFERENCES = [["the cat sat on the mat today"], ["hello there, world", "hi"], ["y x"]]


def test_answers_are_compared_without_case_marks_and_articles():
    assert answer_words("The  U.S.'s an-apple, a Day!") == ["uss", "anapple", "day"]
    assert answer_words(" theatre of THE absurd\n") == ["theatre", "of", "absurd"]


def test_f1_counts_a_word_as_often_as_both_have_it():
    # Two of the three generated words, two of the four reference words.
    assert word_f1(["b", "b", "c"], ["b", "b", "d", "e"]) == pytest.approx(4 / 7)
    assert word_f1([], []) == 1 and word_f1([], ["a"]) == 0 == word_f1(["a"], ["b"])


def test_squad_uses_the_best_reference():
    scores = squad(["in Paris", "the Nile", ""], [["Rome", "Paris"], ["Nile"], ["x"]])
    assert scores["squad_f1"].each().tolist() == [pytest.approx(2 / 3), 1, 0]
    assert scores["squad_exact_match"].each().tolist() == [0, 1, 0]


def test_rouge_is_the_fraction_of_shared_n_grams():
    (one,) = REFERENCES[:1]
    scores = rouge(MADE[:1], [one])
    # Six of seven words, four of six pairs, and six words in order.
    assert scores["rouge1"].value == pytest.approx(6 / 7)
    assert scores["rouge2"].value == pytest.approx(4 / 6)
    assert scores["rougeL"].value == pytest.approx(6 / 7)


def test_bleu_of_summed_counts_equals_bleu_of_the_corpus():
    references = [["the cat sat on the mat today"], ["hello there, world"], ["y x"]]
    streams = [[one for (one,) in references]]
    scores = bleu(MADE, references)["bleu"]
    assert scores.value == pytest.approx(sacrebleu.corpus_bleu(MADE, streams).score)
    first = sacrebleu.corpus_bleu(MADE[:1], [references[0]]).score
    low, high = intervals({"bleu": scores}, resamples=200, seed=0)["bleu"]
    assert low < scores.value < high <= first + 1e-9


def test_bleu_accepts_any_number_of_references():
    streams = [[one[0] for one in REFERENCES], [None, "hi", None]]
    whole = sacrebleu.corpus_bleu(MADE, streams)  # pyright: ignore[reportArgumentType]
    assert bleu(MADE, REFERENCES)["bleu"].value == pytest.approx(whole.score)


@pytest.mark.parametrize("name", TEXT_METRICS)
def test_each_metric_matches_its_definition(name):
    assert tuple(TEXT_METRICS[name](MADE, REFERENCES)) == METRIC_NAMES[name]


@pytest.mark.parametrize(("name", "library"), [("rouge", "rouge-score")])
def test_a_missing_library_is_named_with_its_install_command(
    name, library, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=f"needs {library}: pip install {library}"):
        Evaluation(data=DataSource(files="x.jsonl"), metrics=[name])
