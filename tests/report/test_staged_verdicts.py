"""The verdict and the checklist on twelve real runs that end well or badly."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.report.measurement import measure_run
from prompt_tuning.report.page import render_page
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.report.run_view import ReportedRun, RunView
from scripts import skills

WORDS = skills.splits(0, train=160, dev=60, test=1)
Pairs = Sequence[tuple[str, str]]
LABELS = ["e", "t"]


def skill(name: str, before: str = "") -> tuple[Pairs, Pairs]:
    """Training and held-out pairs of a skill."""
    train, dev = (
        [(f"{before}{word}=", skills.apply(name, word)) for word in words]
        for words in (WORDS.train, WORDS.dev)
    )
    return train, dev


def first_letters() -> tuple[Pairs, Pairs]:
    """Words with their first letter, `e` or `t`, and held-out ones with the other."""
    words = skills.splits(1, train=1600, dev=500, test=1)
    train, dev = (
        [word for word in part if word[0] in "et"] for part in (words.train, words.dev)
    )
    other = {"e": "t", "t": "e"}
    return (
        [(f"{word}=", word[0]) for word in train],
        [(f"{word}=", other[word[0]]) for word in dev[:60]],
    )


def rare_label() -> tuple[Pairs, Pairs]:
    """Words with a label that nothing tells, one of ten with another."""
    train, dev = (
        [(f"{word}=", "te"[hash_of(word) % 10 == 0]) for word in words]
        for words in (WORDS.train, WORDS.dev)
    )
    return train, dev


def unrelated() -> tuple[Pairs, Pairs]:
    """Pairs whose completions are those of other words."""
    train, dev = skill("upper")
    random = np.random.default_rng(0)

    def shuffle(pairs):
        order = random.permutation(len(pairs))
        return [
            (given, pairs[i][1]) for (given, _), i in zip(pairs, order, strict=True)
        ]

    return shuffle(train), shuffle(dev)


@dataclasses.dataclass(frozen=True)
class Staged:
    """A run, and what its page must say.

    Attributes:
      data: training and held-out pairs.
      outcome: outcomes against no prompt that are right.
      reasons: titles of the checklist of which one at least must be suspicious; none
        of the training's if it is empty.
      settings: settings of `tune`.
      prompt: the prompt; eight vectors if None.
      labels: labels to rank.
      source: settings of both data sources.
      text: text to compare with.
    """

    data: Callable[[], Sequence[Pairs]]
    outcome: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: Any = None
    labels: Sequence[str] = ()
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: str | None = None


RATE = "Learning rate and the prompt's norm"
CASES = {
    "works": Staged(lambda: skill("upper"), ("better",), settings={"steps": 120}),
    "rate too high": Staged(
        lambda: skill("upper"), ("better", "same", "worse"), (RATE,),
        {"learning_rate": 30.0, "optimizer": pt.adamw()},
    ),
    "rate too low": Staged(
        lambda: skill("upper"), ("same", "better"), (RATE,),
        {"learning_rate": 1e-6, "optimizer": pt.adamw()},
    ),
    "too few steps": Staged(
        lambda: skill("upper"), ("better",), ("Still falling at the end",),
        {"learning_rate": 0.01, "optimizer": pt.adamw(), "evaluate_every": 4},
    ),
    # The checkpoint that is kept is the one that has learned least of them.
    "labels swapped": Staged(
        first_letters, ("worse", "same"), ("Labels",), {"steps": 120}, labels=LABELS,
    ),
    "all targets truncated": Staged(
        lambda: tuple(
            [(given, 30 * wanted) for given, wanted in part] for part in skill("upper")
        ),
        ("unknown",), ("Truncated or skipped",),
        source={"on_too_long": "truncate_right"},
    ),
    "data that leaks nothing": Staged(
        unrelated, ("better", "same"), ("Fits its training data",), {"steps": 60}
    ),
    "overfitting": Staged(
        lambda: (unrelated()[0][:8], unrelated()[1]), ("better", "same", "worse"),
        ("Training against held-out",), {"steps": 150, "evaluate_every": 10},
        pt.SoftPrompt(length=30),
    ),
    "prompt ignored": Staged(
        lambda: skill("upper", "upper: "), ("same",), ("Attention on the prompt", RATE),
        {"learning_rate": 1e-6, "optimizer": pt.adamw()},
        pt.SoftPrompt(length=2, initializer=pt.uniform(1e-4)),
    ),
    "class prior learned only": Staged(
        rare_label, ("better", "same"),
        ("Labels",), labels=LABELS,
    ),
    "a prompt that equals its text": Staged(
        lambda: skill("upper"), ("better",), (RATE,),
        {
            "learning_rate": 1e-6, "optimizer": pt.adamw(),
            "prompting": pt.Prompting(placement="after_bos"),
        },
        pt.SoftPrompt(length=7, initializer=pt.from_text("upper: ")), text="upper: ",
    ),
    "worse than none": Staged(
        lambda: (skill("rot1", "upper: ")[0], skill("upper", "upper: ")[1]), ("worse",),
        ("Training against held-out",), {"steps": 80},
    ),
}  # fmt: skip


def hash_of(word: str) -> int:
    """A number that nothing in a word's letters tells."""
    return sum(ord(letter) * 7919**place for place, letter in enumerate(word)) % 1009


@pytest.fixture(scope="module")
def model() -> pt.Model:
    return pt.load("bundled:skills-decoder")


def write(file: Path, pairs: Pairs) -> str:
    lines = [json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs]
    file.write_text("".join(lines))
    return str(file)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_page_says_what_happened(model, tmp_path, name):
    case = CASES[name]
    train, dev = case.data()
    data, held_out = (
        pt.DataSource(
            files=write(tmp_path / file, pairs), batch_size=size, **case.source
        )
        for file, pairs, size in (("train.jsonl", train, 8), ("dev.jsonl", dev, 30))
    )
    settings: dict[str, Any] = {
        "steps": 40,
        "evaluate_every": 20,
        "log_every": 1,
    } | case.settings
    tuned = pt.tune(
        model,
        case.prompt or pt.SoftPrompt(length=8),
        data,
        evaluation=pt.Evaluation(data=held_out, labels=list(case.labels) or None),
        directory=tmp_path / "run",
        progress=False,
        **settings,
    )
    recorded = RecordedRun.read(tmp_path / "run")
    texts = [] if case.text is None else [case.text]
    loaded = tuned.prompted, tuned.parameters
    measured = measure_run(tuned.run, text_prompts=texts, loaded=loaded)
    run = ReportedRun(name, recorded, measured)
    found = {x.title for x in RunView.of(run, 1).findings if x.suspicious}
    print(name, run.verdict.sentence, found)
    assert run.verdict.outcome in case.outcome
    assert found & {*case.reasons} if case.reasons else not found
    if case.text is not None:
        (_, to_text, *_) = run.verdict.differences
        assert to_text.outcome == "same" and abs(to_text.gain) < 1e-3
    assert run.verdict.sentence.partition(":")[0] in render_page([run])
