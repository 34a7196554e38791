"""Results of the benchmark: tables for the terminal and for Markdown, and JSON."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prompt_tuning.data.preparation.worker_pool import available_cores
from scripts.bench.cases import CASES, GROWTH, MOST_GROWTH
from scripts.bench.steps import OURS, SIDES, Settings, StepResult, median_ratio

MEGABYTE = 1e6
PACKAGES = ("jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measured number and its limit.

    Attributes:
      name: description of the number.
      value: measured value.
      limit: bound on the value.
      at_least: whether the limit is a lower bound, or else an upper bound.
      unit: unit after the numbers.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a case without PEFT.

    Attributes:
      name: name of the case.
      title: description of the comparison.
      figures: measured numbers by description.
      measures: numbers with limits.
    """

    name: str
    title: str
    figures: Mapping[str, float]
    measures: Sequence[Measure]


@dataclasses.dataclass(frozen=True)
class Results:
    """All results of one run of the benchmark."""

    machine: Mapping[str, str]
    steps: Sequence[StepResult]
    outcomes: Sequence[Outcome]

    def growth(self) -> dict[str, dict[str, float]]:
        """Step time divided by the time without a prompt, by side and case.

        Empty unless the cases of `GROWTH` were measured in one rotation.
        """
        steps = {step.case: step for step in self.steps}
        if not set(GROWTH) <= steps.keys():
            return {}
        bare = steps[GROWTH[0]]
        return {
            side: {
                name: median_ratio(steps[name].seconds[side], bare.seconds[side])
                for name in GROWTH[1:]
            }
            for side in SIDES
        }

    def measures(self) -> list[Measure]:
        """Returns all measured numbers that have limits."""
        return [
            *(measure for step in self.steps for measure in step_measures(step)),
            *(
                Measure(
                    f"{name}: our step / our step with P = 0", ratio, limit, False, "x"
                )
                for name, limit in MOST_GROWTH.items()
                if (ratio := self.growth().get(OURS, {}).get(name)) is not None
            ),
            *(measure for outcome in self.outcomes for measure in outcome.measures),
        ]


def step_measures(step: StepResult) -> list[Measure]:
    """Returns the measured numbers for which a case sets limits."""
    case = CASES[step.case]
    rows = (
        ("PEFT's step / our step", step.speedup, case.least_speedup, True, "x"),
        ("our peak memory / PEFT's", step.memory, case.most_memory, False, "x"),
        ("ideal time / our step", step.share, case.least_share, True, ""),
    )
    return [
        Measure(f"{step.case}: {name}", value, limit, at_least, unit)
        for name, value, limit, at_least, unit in rows
        if limit is not None and value is not None
    ]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table of text: a title, a heading for each column, and rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheets(results: Results) -> list[Sheet]:
    """Returns the tables that are not empty."""
    growth = results.growth()
    tables = [
        Sheet(
            "cases: batch x (prompt vectors + tokens)",
            ("case",),
            [(f"{step.case}: {CASES[step.case].title}",) for step in results.steps],
        ),
        Sheet(
            "one training step, medians",
            ("case", "ours", "PEFT", "PEFT / ours", "real tokens/s", "PEFT's"),
            [step_row(step) for step in results.steps],
        ),
        Sheet(
            "peak memory of each process, weights included",
            ("case", "ours", "PEFT", "ours / PEFT"),
            [memory_row(step) for step in results.steps],
        ),
        Sheet(
            "our step and its matrix products alone",
            ("case", "step", "matrices", "batched (attention)", "ideal / step"),
            [ideal_row(step) for step in results.steps if step.ideal is not None],
        ),
        Sheet(
            "step relative to the step without a prompt",
            ("prompt", "ours", "PEFT"),
            [
                (
                    f"P = {CASES[name].prompt}",
                    *(f"{growth[side][name]:.2f}x" for side in SIDES),
                )
                for name in (GROWTH[1:] if growth else ())
            ],
        ),
        *(
            Sheet(
                outcome.title,
                (outcome.name, ""),
                [(name, f"{figure:,.4g}") for name, figure in outcome.figures.items()],
            )
            for outcome in results.outcomes
        ),
        Sheet(
            "limits",
            ("measure", "limit", "value", "met"),
            [measure_row(measure) for measure in results.measures()],
        ),
    ]
    return [sheet for sheet in tables if sheet.rows]


def step_row(step: StepResult) -> tuple[str, ...]:
    """Returns the row of a case's times."""
    tokens = CASES[step.case].real_tokens
    return (
        step.case,
        *(f"{1e3 * step.median(side):,.1f} ms" for side in SIDES),
        f"{step.speedup:.2f}x",
        *(f"{tokens / step.median(side):,.0f}" for side in SIDES),
    )


def memory_row(step: StepResult) -> tuple[str, ...]:
    """Returns the row of a case's memory."""
    sizes = (f"{step.peak_bytes[side] / MEGABYTE:,.0f} MB" for side in SIDES)
    return (step.case, *sizes, f"{step.memory:.2f}x")


def ideal_row(step: StepResult) -> tuple[str, ...]:
    """Returns the row of a case's ideal time; the step was timed with its products."""
    assert step.ideal is not None and step.share is not None
    times = (f"{1e3 * step.ideal[k]:,.1f} ms" for k in ("step", "plain", "batched"))
    return (step.case, *times, f"{step.share:.1%}")


def measure_row(measure: Measure) -> tuple[str, ...]:
    """Returns the row of a number with a limit, and whether it meets the limit."""
    sign = "≥" if measure.at_least else "≤"
    return (
        measure.name,
        f"{sign} {measure.limit:g}{measure.unit}",
        f"{measure.value:.3g}{measure.unit}",
        "yes" if measure.met else "NO",
    )


def show(results: Results, console: Console) -> None:
    """Prints all tables."""
    for sheet in sheets(results):
        table = Table(title=sheet.title, title_justify="left")
        for i, heading in enumerate(sheet.headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)


def markdown(results: Results) -> str:
    """Returns the machine and all tables as Markdown."""
    lines = ["# Benchmark", ""]
    lines += [f"- {name}: {value}" for name, value in results.machine.items()]
    for sheet in sheets(results):
        lines += ["", f"## {sheet.title[:1].upper()}{sheet.title[1:]}", ""]
        lines.append("| " + " | ".join(sheet.headings) + " |")
        lines.append(
            "|" + "|".join(["---", *["---:"] * (len(sheet.headings) - 1)]) + "|"
        )
        lines += ["| " + " | ".join(row) + " |" for row in sheet.rows]
    return "\n".join(lines) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """Returns all results and derived values as plain data."""
    steps = [
        dataclasses.asdict(step)
        | {
            "title": CASES[step.case].title,
            "medians": {side: step.median(side) for side in SIDES},
            "speedup": step.speedup,
            "memory": step.memory,
            "share": step.share,
        }
        for step in results.steps
    ]
    return {
        "machine": dict(results.machine),
        "steps": steps,
        "growth": results.growth(),
        "outcomes": [dataclasses.asdict(outcome) for outcome in results.outcomes],
        "measures": [
            dataclasses.asdict(measure) | {"met": measure.met}
            for measure in results.measures()
        ],
    }


def describe_machine(settings: Settings, versions: Mapping[str, str]) -> dict[str, str]:
    """Describes the machine, the versions and the settings."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    packages = installed | dict(versions)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": str(available_cores()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{k} {v}" for k, v in sorted(packages.items())),
        "measured": f"{settings.steps} turns of each side, after {settings.warm_up} "
        "turns of warm-up and 3 turns that compare the losses, float32",
    }


def processor() -> str:
    """Returns the processor's model, from the kernel if possible."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
