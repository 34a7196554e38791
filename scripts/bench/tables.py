"""Tables of the results, for the terminal and for Markdown."""

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from scripts.bench.cases import CASES, GROWTH
from scripts.bench.machine import LIBRARIES, caption
from scripts.bench.markdown import markdown_table
from scripts.bench.report import Measure, Results, Roofline
from scripts.bench.steps import SIDES, StepResult

MEGABYTE = 1e6
PRODUCTS = {"plain": "matrices", "batched": "batched (attention)"}


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table of text: a title, a heading for each column, and rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheets(results: Results) -> list[Sheet]:
    """Returns the tables that are not empty."""
    growth = results.growth()
    timed = [step for step in results.steps if step.ideal is not None]
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
            "our step and its matrix products alone, by the fastest library",
            ("case", "step", "matrices", "batched (attention)", "ideal / step"),
            [ideal_row(step) for step in timed],
        ),
        Sheet(
            "rates of the products alone, GFLOP/s",
            ("case, products", "in the step", *LIBRARIES.values(), "step / torch"),
            [
                rate_row(step, kind, title)
                for step in timed
                for kind, title in PRODUCTS.items()
                if step.ideal and kind in step.ideal["libraries"]["step"]
            ],
        ),
        Sheet(
            "roofline: what a step's time is",
            ("case", "step", "products", "other traffic", "its time", "rest"),
            [
                roofline_row(step.case, parts)
                for step in timed
                if (parts := results.roofline(step)) is not None
            ],
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


def rate_row(step: StepResult, kind: str, title: str) -> tuple[str, ...]:
    """Returns the rates of one kind of product, in the step's layout and the best."""
    assert step.ideal is not None
    libraries = step.ideal["libraries"]
    rates = {
        name: libraries[name][kind]["flops_per_second"] / 1e9
        for name in ("step", *LIBRARIES)
        if kind in libraries.get(name, {})
    }
    texts = [
        f"{rates[name]:,.0f}" if name in rates else "" for name in ("step", *LIBRARIES)
    ]
    share = f"{rates['step'] / rates['torch']:.2f}" if "torch" in rates else ""
    return (f"{step.case}, {title}", *texts, share)


def roofline_row(case: str, parts: Roofline) -> tuple[str, ...]:
    """Returns the parts of a step's time."""
    times = [f"{1e3 * x:,.1f} ms" for x in (parts.step, parts.products)]
    traffic = f"{parts.traffic_bytes / MEGABYTE:,.0f} MB"
    rests = [f"{1e3 * x:,.1f} ms" for x in (parts.traffic, parts.rest)]
    return (case, *times, traffic, *rests)


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
        console.print(caption(results.machine), style="dim", markup=False)


def markdown(results: Results) -> str:
    """Returns the machine and all tables as Markdown."""
    lines = ["# Benchmark", ""]
    lines += [f"- {name}: {value}" for name, value in results.machine.items()]
    for sheet in sheets(results):
        lines += ["", f"## {sheet.title[:1].upper()}{sheet.title[1:]}", ""]
        lines += markdown_table(sheet.headings, sheet.rows)
        lines += ["", caption(results.machine)]
    return "\n".join(lines) + "\n"
