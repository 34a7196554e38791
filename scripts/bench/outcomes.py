"""Cases without PEFT: sweeps, ragged text, long rows, start-up and fixed cost."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.bench.first_log import seconds_to_first_log
from scripts.bench.report import Measure, Outcome
from scripts.bench.steps import Settings
from scripts.bench.tables import MEGABYTE
from scripts.bench.workers import Worker

MEMBERS = 8
MOST_PER_MEMBER = {"16": 0.75, "4": 0.55}
LEAST_RAGGED = 1.5
MOST_SECONDS = 5.0
LENGTHS = (1024, 2048)
MOST_GROWTH_OF_MEMORY = 2.2
MOST_FIXED_MILLISECONDS = 0.3
RAGGED_TURNS = 2
"""Batches of ragged text for each requested step, since they differ in size."""


class Text(NamedTuple):
    """Files and folders of the cases with real text; None for those not given.

    Attributes:
      text: `ragged`: JSONL file with questions.
      model: folder of a small trained model.
      tokenizer: `ragged`: folder with the tokenizer of the random Llama.
      questions: `evaluation`: TREC's file of questions.
    """

    text: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    questions: str | None = None


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


def ragged(settings: Settings, model: str, text: str, tokenizer: str) -> list[Outcome]:
    """Compares our batches of real text with random batches, on two models."""
    llama, small = ["llama", text, tokenizer], [model, text]
    return [
        _ragged("ragged", "GSM8K questions, Llama case", settings, llama),
        _ragged("ragged_small", "GSM8K questions, small model", settings, small),
    ]


def _ragged(
    name: str, title: str, settings: Settings, arguments: Sequence[str]
) -> Outcome:
    settings.say(f"[bold]{name}[/]: batches of real text")
    command = [sys.executable, "-m", "scripts.bench.ragged", *arguments]
    with Worker(name, command) as worker:
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


def long(settings: Settings) -> Outcome:
    """Compares the memory of a step of long rows with that of rows half as long."""
    settings.say("[bold]long[/]: memory of a step of long rows")
    figures, temporary = {}, []
    for length in LENGTHS:
        command = [sys.executable, "-m", "scripts.bench.long_rows", str(length)]
        with Worker(f"rows of {length}", command) as worker:
            memory = worker.ask("measure")
        temporary.append(memory["temporary"])
        figures |= {
            f"T {length:,}: the step's own arrays, MB": memory["temporary"] / MEGABYTE,
            f"T {length:,}: its arguments, MB": memory["arguments"] / MEGABYTE,
            f"T {length:,}: peak of the process, MB": memory["process"] / MEGABYTE,
        }
    short, double = LENGTHS
    comparison = f"long: memory of a step's own arrays, T {double:,} / T {short:,}"
    growth = temporary[1] / temporary[0]
    measure = Measure(comparison, growth, MOST_GROWTH_OF_MEMORY, False, "x")
    title = "memory of long rows: Llama 4 layers, width 512, 2 x (100 + T)"
    return Outcome("long", title, figures, [measure])


def fixed(settings: Settings) -> Outcome:
    """Times the step of a trivially small model: from Python to the device and back."""
    settings.say("[bold]fixed[/]: the step of a trivially small model")
    with Worker("fixed", [sys.executable, "-m", "scripts.bench.fixed_cost"]) as worker:
        milliseconds = 1e3 * worker.ask("measure", rounds=settings.steps)["seconds"]
    comparison = "fixed: step of a trivially small model"
    limit = MOST_FIXED_MILLISECONDS
    measure = Measure(comparison, milliseconds, limit, False, " ms")
    title = "fixed cost of a step: Llama 2 layers, width 8, 1 x (1 + 2)"
    return Outcome("fixed", title, {"step, ms": milliseconds}, [measure])


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
