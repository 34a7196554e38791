"""Evaluation and ranking compared with PEFT: exact match, labels, mean loss.

Both sides have the same model, prompt and token ids, and their metrics must agree
before anything is timed. Half of the completions that generated texts are compared with
are what PEFT's side generates.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from prompt_tuning.data.text.tokenizers import encode_prompt, load_tokenizer
from scripts.bench.evaluation_tasks import (
    EXACT_MATCH,
    LOSS,
    METRICS,
    RANKING,
    TASKS,
    Task,
    read_task,
    write_task,
)
from scripts.bench.report import Measure, Outcome
from scripts.bench.steps import (
    OURS,
    PEFT,
    DisagreementError,
    Settings,
    median_ratio,
)
from scripts.bench.trec import read_questions
from scripts.bench.workers import PAUSE, Worker

PROMPT = 20
LABELS = {
    " big": " abbreviation",
    " was": " description",
    " it": " entity",
    " she": " person",
    " there": " location",
    " time": " number",
}
"""A name of several tokens for each class, by the word that `trec` gives it."""

RANKED, COMPARED, READ = 500, 500, 1000
"""Rows of the tasks: ranking, exact match, loss."""

AGREEMENT = {EXACT_MATCH: 0.01, RANKING: 0.01, LOSS: 1e-3}
"""Maximum difference of the metrics. A share of rows may differ where two tokens or
labels have the same score but for rounding."""

OTHER_ANSWER = [3]
"""Completion where nothing is generated."""

LEAST_SPEEDUP = 2.0
STEPS_PER_TURN = 4
"""Training steps that count as one turn, in which a side evaluates all rows."""


def evaluation(
    settings: Settings, model: str, questions: str
) -> tuple[Outcome, dict[str, str]]:
    """Measures both sides; returns the outcome and the versions of PEFT's packages.

    Args:
      settings: settings of the measurement.
      model: folder of a small trained model with its tokenizer.
      questions: TREC's file of labelled questions.

    Raises:
      DisagreementError: if the two sides' metrics differ.
      WorkerError: if a process ends early.
    """
    settings.say("[bold]evaluation[/]: exact match, ranking and loss")
    turns = max(1, settings.steps // STEPS_PER_TURN)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_inputs(folder, Path(model), Path(questions))
        commands = {
            OURS: [sys.executable, "-m", "scripts.bench.our_evaluation", name],
            PEFT: [settings.peft_python, "-m", "scripts.bench.peft_evaluation", name],
        }
        sides = {
            side: stack.enter_context(Worker(f"{side} of evaluation", command))
            for side, command in commands.items()
        }
        versions = sides[PEFT].ask("start")["versions"]
        choose_completions(sides[PEFT], folder)
        figures: dict[str, float] = {}
        measures = []
        for task in TASKS:
            settings.say(f"  {task}: {turns} turns")
            seconds, task_figures = measure_task(sides, task, turns)
            figures |= task_figures
            speedup = median_ratio(seconds[PEFT], seconds[OURS])
            comparison = f"evaluation, {task}: PEFT's time / ours"
            measures.append(Measure(comparison, speedup, LEAST_SPEEDUP, True, "x"))
    title = (
        f"exact match of {COMPARED} texts, {len(LABELS)} labels of {RANKED} rows, "
        f"loss of {READ:,} rows"
    )
    return Outcome("evaluation", title, figures, measures), versions


def write_inputs(folder: Path, model: Path, questions: Path) -> None:
    """Writes the tasks and a prompt of random tokens' vectors; links the model."""
    (folder / "model").symlink_to(model.resolve())
    weights = load_file(model / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    chosen = np.random.default_rng(0).integers(3, len(table), PROMPT)
    np.save(folder / "prompt.npy", table[chosen].astype(np.float32))
    tokenizer = load_tokenizer(str(model))
    pairs = read_questions(questions)
    given = [encode_prompt(tokenizer, pair["prompt"]) for pair in pairs[:READ]]
    labels = {word: tokenizer.encode_continuation(x) for word, x in LABELS.items()}
    answers = [labels[pair["completion"]] for pair in pairs[:RANKED]]
    texts = list(LABELS.values())
    ranking = Task(given[:RANKED], answers, list(labels.values()), texts)
    write_task(ranking, folder, RANKING)
    write_task(Task([x[:1] for x in given], [x[1:] for x in given]), folder, LOSS)
    write_task(Task(given[:COMPARED], []), folder, EXACT_MATCH)


def choose_completions(peft: Worker, folder: Path) -> None:
    """Writes completions: what PEFT's side generates, half of it cut.

    A completion has at least one token.
    """
    peft.ask("open", name=EXACT_MATCH)
    generated = peft.ask("continue", name=EXACT_MATCH)["generated"]
    answers = [
        row[:-1] if i % 2 and len(row) > 1 else row or OTHER_ANSWER
        for i, row in enumerate(generated)
    ]
    given = read_task(folder, EXACT_MATCH).given
    write_task(Task(given, answers), folder, EXACT_MATCH)


def measure_task(
    sides: Mapping[str, Worker], task: str, turns: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Checks that the sides agree on a task, and times it.

    Returns:
      the seconds of each side's turns, and figures for the table.
    """
    for side in sides.values():
        side.ask("open", name=task)
    first = {name: side.ask("run", name=task) for name, side in sides.items()}
    check_agreement(task, {name: answer["metric"] for name, answer in first.items()})
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            time.sleep(PAUSE)
            seconds[name].append(side.ask("run", name=task)["seconds"])
    figures = {
        f"{task}: {METRICS[task]}, ours": first[OURS]["metric"],
        f"{task}: {METRICS[task]}, PEFT": first[PEFT]["metric"],
        f"{task}: ours, s": statistics.median(seconds[OURS]),
        f"{task}: ours with compilation, s": first[OURS]["seconds"],
        f"{task}: PEFT, s": statistics.median(seconds[PEFT]),
    }
    return seconds, figures


def check_agreement(task: str, metrics: Mapping[str, float]) -> None:
    """Checks that the sides' metrics agree.

    Raises:
      DisagreementError: if they differ by more than `AGREEMENT`.
    """
    ours, peft = metrics[OURS], metrics[PEFT]
    if not abs(ours - peft) <= AGREEMENT[task]:
        raise DisagreementError(
            f"evaluation, {task}: our {METRICS[task]} is {ours:.6f} and PEFT's "
            f"{peft:.6f}; they must agree to {AGREEMENT[task]:g}, or the sides do not "
            "do the same work"
        )
