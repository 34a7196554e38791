"""Compares votes of prompts with the results of each prompt alone."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.ranking import encode_labels, given_tokens, label_nats
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.tuned import ensembles
from prompt_tuning.tuned.ensembles import (
    VOTES,
    evaluate_ensemble,
    majority_vote,
    mean_vote,
    open_ensemble,
)
from prompt_tuning.tuned.load_tuned import load_tuned
from tests.support.exhaustive import sample
from tests.support.small_runs import LENGTH, write_pairs

# These prompts choose different labels, and so do the two kinds of vote.
LABELS = ["fe", "nu", "se"]
NEW_TOKENS = 3


def test_the_most_frequent_answer_wins_regardless_of_its_probability():
    nats = np.array([[1.0, 9.0], [0.0, 9.0], [9.0, 8.0]])
    assert majority_vote(np.array([1, 1, 0]), nats) == 1
    assert mean_vote(np.array([1, 1, 0]), nats) == 0


def test_the_likelier_of_tied_answers_wins():
    nats = np.array([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    assert majority_vote(np.array([0, 1]), nats) == 1
    assert majority_vote(np.array([1, 0]), nats[:, [1, 0, 2]]) == 0
    assert mean_vote(np.array([0, 1]), nats) == 2


@dataclasses.dataclass(frozen=True)
class SinglePrompts:
    """Three prompts, and the answers of each prompt, loaded alone, to each row.

    Attributes:
      run: run whose held-out rows have labels.
      prompts: files of the prompts.
      rows: token IDs of the given texts.
      alone: model and parameters with each prompt.
      nats: nats of each label after each row, `[k, n, C]`.
      continuations: continuation of each row by each prompt.
    """

    run: Run
    prompts: list[Path]
    rows: list[list[int]]
    alone: list[tuple[PromptedModel, Parameters]]
    nats: np.ndarray
    continuations: list[list[list[int]]]


def read(files, family, folder) -> Run:
    pairs = [(f"{'ab' * n}c=", LABELS[n % 3]) for n in (1, 2, 3, 4, 5, 6)]
    arguments = files.arguments(
        folder / "run",
        getattr(files, family),
        Evaluation__labels=LABELS,
        Evaluation__exact_match=True,
        Evaluation__new_tokens=NEW_TOKENS,
        EVALUATION_FILES=str(write_pairs(folder / "data.jsonl", pairs)),
    )
    bindings = [line.removeprefix("--gin.") for line in arguments[1:]]
    return read_run(["runs/first_prompt.gin"], bindings)


@pytest.fixture(scope="module", params=["decoder", "t5"])
def single_prompts(request, files, tmp_path_factory) -> SinglePrompts:
    folder = tmp_path_factory.mktemp(request.param)
    run = read(files, request.param, folder)
    assert run.evaluation is not None
    random = np.random.default_rng(0)
    prompts = [folder / f"{name}.npy" for name in "abc"]
    for file in prompts:
        np.save(file, 3 * random.standard_normal((LENGTH, 16)).astype("f4"))
    alone = [load_tuned(run, file) for file in prompts]
    first = alone[0][0]
    examples = load_examples(run.evaluation.data, first.interface)
    rows = [given_tokens(examples[i], first) for i in range(len(examples))]
    labels = encode_labels(first, run.evaluation.data, LABELS)
    ranked = [label_nats(*one, rows, labels, add_eos=True) for one in alone]
    continuations = [
        continue_rows(*one, rows, Sampling(new_tokens=NEW_TOKENS)) for one in alone
    ]
    return SinglePrompts(run, prompts, rows, alone, np.stack(ranked), continuations)


def elected_texts(single_prompts: SinglePrompts, vote) -> list[list[int]]:
    """Returns the winning continuations, each scored by each prompt alone."""
    winners = []
    for index, row in enumerate(single_prompts.rows):
        row_answers = [answers[index] for answers in single_prompts.continuations]
        candidates = [c for i, c in enumerate(row_answers) if c not in row_answers[:i]]
        # Truncated without EOS, so that their loss does not include EOS.
        assert all(len(answer) == NEW_TOKENS for answer in row_answers)
        nats = [
            label_nats(*one, [row], candidates, add_eos=False)
            for one in single_prompts.alone
        ]
        chosen = np.array([candidates.index(answer) for answer in row_answers])
        winners.append(candidates[vote(chosen, np.concatenate(nats))])
    return winners


@pytest.mark.exhaustive
@pytest.mark.parametrize("vote", sample(1, VOTES))
def test_a_vote_equals_the_votes_of_single_prompts(single_prompts, vote, monkeypatch):
    answers = single_prompts.nats.argmin(2)
    # Prompts that always agree would not test the vote.
    assert len({tuple(row) for row in answers}) == 3
    assert any(
        len({tuple(m[i]) for m in single_prompts.continuations}) > 1 for i in range(6)
    )
    labels = [VOTES[vote](answers[:, i], single_prompts.nats[:, i]) for i in range(6)]
    texts = elected_texts(single_prompts, VOTES[vote])
    # The winner is the label, so that another choice for any row is detected.
    left = iter(texts)
    monkeypatch.setattr(ensembles, "completion_tokens", lambda *_: next(left))
    monkeypatch.setattr(ensembles, "gold_label_indices", lambda *_: labels)
    opened = open_ensemble(single_prompts.run, single_prompts.prompts)
    results = evaluate_ensemble(*opened, single_prompts.run.evaluation, vote)
    assert results["label_accuracy"].together == 1
    assert results["exact_match"].together == 1
    for index in range(3):
        agrees = np.mean(answers[index] == labels)
        assert results["label_accuracy"].alone[index] == agrees
        same = np.mean(
            [single_prompts.continuations[index][i] == texts[i] for i in range(6)]
        )
        assert results["exact_match"].alone[index] == same


@pytest.mark.slow
def test_labels_are_ranked_by_mean_nats_if_the_evaluation_sets_it(single_prompts):
    labels = [[3], [4, 5, 6]]
    model, parameters = single_prompts.alone[0]
    plain, mean = (
        label_nats(
            model,
            parameters,
            single_prompts.rows,
            labels,
            add_eos=False,
            length_normalize=asked_for,
        )
        for asked_for in (False, True)
    )
    np.testing.assert_allclose(mean, plain / [1, 3], rtol=1e-6)


@pytest.mark.slow
def test_an_ensemble_ranks_as_its_evaluation_does(single_prompts, monkeypatch):
    results = []

    def ranked(*arguments, length_normalize, **choices):
        results.append(length_normalize)
        return np.zeros((3 * len(single_prompts.rows), len(LABELS)))

    monkeypatch.setattr(ensembles.ranking, "label_nats", ranked)
    assert single_prompts.run.evaluation is not None
    for wanted in (True, False):
        evaluation = dataclasses.replace(
            single_prompts.run.evaluation, length_normalize=wanted, exact_match=False
        )
        model, parameters = open_ensemble(single_prompts.run, single_prompts.prompts)
        evaluate_ensemble(model, parameters, evaluation, "mean")
        assert results.pop() is wanted


@pytest.fixture
def saved(files, tmp_path) -> Path:
    """Writes the config of a run of the decoder for the command."""
    arguments = files.arguments(tmp_path / "run", files.decoder)
    lines = [line.removeprefix("--gin.") for line in arguments[1:]]
    config = tmp_path / "config.gin"
    config.write_text("include 'runs/first_prompt.gin'\n" + "\n".join(lines) + "\n")
    return config


def test_the_command_shows_the_vote_next_to_each_prompt(saved, files, tmp_path, capsys):
    words = write_pairs(tmp_path / "data.jsonl", [("ab=", "fe"), ("b=", "nu")])
    for name, start in (("one", 0.0), ("two", 1.0)):
        np.save(tmp_path / f"{name}.npy", np.full((LENGTH, 16), start, "f4"))
    arguments = [
        *("--gin_file", saved, "--vote", "mean"),
        *("--prompt", tmp_path / "one.npy", "--prompt", tmp_path / "two.npy"),
        f"--gin.EVALUATION_FILES={str(words)!r}",
        f"--gin.Evaluation.labels={LABELS}",
    ]
    assert main(["evaluate", *map(str, arguments)]) == 0
    printed = capsys.readouterr().out
    assert "together (mean) ┃ one" in printed and "┃ two" in printed
    (row,) = (line for line in printed.splitlines() if "label_accuracy" in line)
    assert all(float(v) in (0, 0.5, 1) for v in row.split("│")[2:5])


def test_prompts_that_cannot_vote_are_refused(saved, tmp_path, capsys):
    sizes = {"a": (LENGTH, 16), "b": (LENGTH, 16), "short": (3, 16), "wide": (4, 8)}
    for name, shape in sizes.items():
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, "f4"))

    def refused(*names, flags=()):
        prompts = [f"--prompt={tmp_path / name}.npy" for name in names]
        assert main(["evaluate", f"--gin_file={saved}", *prompts, *flags]) == 2
        return capsys.readouterr().err

    assert "prompts vote on answers" in refused("a", "b")
    assert "short.npy has a prompt of shape (3, 16)" in refused("a", "short")
    assert "prompts of the same shape" in refused("a", "wide")
    assert "--vote is among several prompts" in refused("a", flags=["--vote=mean"])
    assert "a.npy is given twice" in refused("a", "a")
    (tmp_path / "wide_too.npy").write_bytes((tmp_path / "wide.npy").read_bytes())
    assert "8 wide and the model 16" in refused("wide", "wide_too")


def test_an_ensemble_needs_prompts_in_the_input(files, tmp_path):
    run = read(files, "t5", tmp_path)
    both = dataclasses.replace(run, decoder_prompt=run.prompt)
    with pytest.raises(InputError, match="adapters or a prompt in the decoder"):
        open_ensemble(both, [])
