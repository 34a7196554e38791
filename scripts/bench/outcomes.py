"""The cases that are ours against ours: sweeps, ragged text, starting up."""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripts.bench.first_log import seconds_to_first_log
from scripts.bench.report import Measure, Outcome
from scripts.bench.steps import Settings
from scripts.bench.workers import Worker

MEMBERS = 8
MOST_PER_MEMBER = {"16": 1.05, "4": 0.7}
LEAST_RAGGED = 1.5
MOST_SECONDS = 5.0
RAGGED_TURNS = 2
"""Batches of ragged text for each step that is asked for: they differ in size."""


class Text(NamedTuple):
    """Where real text is found.

    Attributes:
      file: jsonl with questions.
      model: a small trained model's folder.
      tokenizer: a folder with the tokenizer of the random Llama.
    """

    file: str
    model: str
    tokenizer: str


def sweep(settings: Settings) -> Outcome:
    """A sweep of prompts, for each member, against one run."""
    settings.say(f"[bold]sweep[/]: {MEMBERS} prompts at once against one run")
    command = [sys.executable, "-m", "scripts.bench.sweep"]
    with Worker("the sweep", command) as worker:
        found = worker.ask("measure", rounds=settings.steps)
    figures, measures = {}, []
    for size, limit in MOST_PER_MEMBER.items():
        answer = found["batches"][size]
        figures[f"batch {size}: one run, ms a step"] = 1e3 * answer["single"]
        figures[f"batch {size}: the sweep, ms a step and member"] = (
            1e3 * answer["sweep"] / MEMBERS
        )
        what = f"sweep: a member's step over one run's, batch {size}"
        measures.append(Measure(what, answer["ratio"], limit, False, "x"))
    programs, copies = found["programs"], found["weight_copies"]
    figures |= {"programs compiled": programs, "copies of the weights": copies}
    measures += [
        Measure("sweep: programs compiled for its step", programs, 1, False),
        Measure("sweep: bytes given to it over the weights'", copies, 1.1, False, "x"),
    ]
    title = f"{MEMBERS} prompts in one pass, against one run, the Llama case"
    return Outcome("sweep", title, figures, measures)


def ragged(settings: Settings, text: Text) -> list[Outcome]:
    """Our batches of real text against random ones, on two models."""
    return [
        _ragged("ragged", "GSM8K questions, the Llama case", settings, "llama", text),
        _ragged("ragged_small", "the same, a small model", settings, text.model, text),
    ]


def _ragged(
    name: str, title: str, settings: Settings, model: str, text: Text
) -> Outcome:
    settings.say(f"[bold]{name}[/]: batches of real text")
    tokenizer = [text.tokenizer] if model == "llama" else []
    command = [sys.executable, "-m", "scripts.bench.ragged", model, text.file]
    with Worker(name, [*command, *tokenizer]) as worker:
        found = worker.ask("measure", rounds=RAGGED_TURNS * settings.steps)
    figures = {}
    for way, answer in found.items():
        figures |= {
            f"{way}: real tokens/s": answer["tokens_per_second"],
            f"{way}: real tokens among all": answer["real_share"],
            f"{way}: programs compiled for an epoch": answer["programs"],
        }
    rates = {way: answer["tokens_per_second"] for way, answer in found.items()}
    alone = rates.pop("random")
    best = max(rates, key=lambda way: rates[way])
    what = f"{name}: real tokens/s of {best} over random batches"
    measure = Measure(what, rates[best] / alone, LEAST_RAGGED, True, "x")
    return Outcome(name, title, figures, [measure])


def startup(settings: Settings) -> Outcome:
    """The quickstart from launch to its first line of the log, twice."""
    settings.say("[bold]startup[/]: the quickstart, twice")
    with tempfile.TemporaryDirectory() as folder:
        first, second = (seconds_to_first_log(Path(folder)) for _ in range(2))
    figures = {"first run, s": first, "second run, s": second}
    what = "startup: launch to the first steps of the second run"
    measure = Measure(what, second, MOST_SECONDS, False, " s")
    title = "the quickstart, from launch to the first line of its log (step 10)"
    return Outcome("startup", title, figures, [measure])
