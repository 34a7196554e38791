"""Cases without PEFT: sweeps, ragged text and start-up."""

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
"""Batches of ragged text for each requested step, since they differ in size."""


class Text(NamedTuple):
    """Files and folders of the case with real text.

    Attributes:
      file: JSONL file with questions.
      model: folder of a small trained model.
      tokenizer: folder with the tokenizer of the random Llama.
    """

    file: str
    model: str
    tokenizer: str


def sweep(settings: Settings) -> Outcome:
    """Compares a sweep's time per member with the time of a single run."""
    settings.say(
        f"[bold]sweep[/]: {MEMBERS} prompts trained together, compared with one run"
    )
    command = [sys.executable, "-m", "scripts.bench.sweep"]
    with Worker("the sweep", command) as worker:
        measurement = worker.ask("measure", rounds=settings.steps)
    figures, measures = {}, []
    for size, limit in MOST_PER_MEMBER.items():
        answer = measurement["batches"][size]
        figures[f"batch {size}: one run, ms per step"] = 1e3 * answer["single"]
        figures[f"batch {size}: the sweep, ms per step and member"] = (
            1e3 * answer["sweep"] / MEMBERS
        )
        comparison = f"sweep: step per member / step of one run, batch {size}"
        measures.append(Measure(comparison, answer["ratio"], limit, False, "x"))
    programs, copies = measurement["programs"], measurement["weight_copies"]
    figures |= {"programs compiled": programs, "copies of the weights": copies}
    measures += [
        Measure("sweep: programs compiled for the step", programs, 1, False),
        Measure(
            "sweep: bytes of its arguments / of the weights", copies, 1.1, False, "x"
        ),
    ]
    title = f"{MEMBERS} prompts in one pass, compared with one run (Llama case)"
    return Outcome("sweep", title, figures, measures)


def ragged(settings: Settings, text: Text) -> list[Outcome]:
    """Compares our batches of real text with random batches, on two models."""
    return [
        _ragged("ragged", "GSM8K questions, Llama case", settings, "llama", text),
        _ragged(
            "ragged_small", "GSM8K questions, small model", settings, text.model, text
        ),
    ]


def _ragged(
    name: str, title: str, settings: Settings, model: str, text: Text
) -> Outcome:
    settings.say(f"[bold]{name}[/]: batches of real text")
    tokenizer = [text.tokenizer] if model == "llama" else []
    command = [sys.executable, "-m", "scripts.bench.ragged", model, text.file]
    with Worker(name, [*command, *tokenizer]) as worker:
        measurement = worker.ask("measure", rounds=RAGGED_TURNS * settings.steps)
    figures = {}
    for way, answer in measurement.items():
        figures |= {
            f"{way}: real tokens/s": answer["tokens_per_second"],
            f"{way}: fraction of real tokens": answer["real_share"],
            f"{way}: programs compiled per epoch": answer["programs"],
        }
    rates = {way: answer["tokens_per_second"] for way, answer in measurement.items()}
    alone = rates.pop("random")
    best = max(rates, key=lambda way: rates[way])
    comparison = f"{name}: real tokens/s of {best} / of random batches"
    measure = Measure(comparison, rates[best] / alone, LEAST_RAGGED, True, "x")
    return Outcome(name, title, figures, [measure])


def startup(settings: Settings) -> Outcome:
    """Times the quickstart from launch to the first line of its log, twice."""
    settings.say("[bold]startup[/]: the quickstart, twice")
    with tempfile.TemporaryDirectory() as folder:
        first, second = (seconds_to_first_log(Path(folder)) for _ in range(2))
    figures = {"first run, s": first, "second run, s": second}
    comparison = "startup: launch to the first log line, second run"
    measure = Measure(comparison, second, MOST_SECONDS, False, " s")
    title = "the quickstart, from launch to the first line of its log (step 10)"
    return Outcome("startup", title, figures, [measure])
