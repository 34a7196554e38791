"""Compares our training step with PEFT's on the same models, batches and labels.

    python -m scripts.bench                      # everything
    python -m scripts.bench llama t5 --steps 40
    python -m scripts.bench --json results.json --html results.html
    python -m scripts.bench ragged --text train.jsonl --model DIR --tokenizer DIR
    python -m scripts.bench evaluation --model DIR --questions train_5500.label

Both sides run at the same time, each in its own process, and take turns step by step.
Their results must agree before anything is timed. `growth` is three cases in one
rotation; `evaluation` compares exact match, ranking and loss. Requires the `bench`
extra (torch, transformers, PEFT), or `--peft_python` with an interpreter that has it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scripts.bench.cases import CASES, GROWTH, HYBRIDS
from scripts.bench.evaluation import evaluation
from scripts.bench.machine import describe_machine, measure_rates
from scripts.bench.outcomes import Text, fixed, long, ragged, startup, sweep
from scripts.bench.page import page
from scripts.bench.report import Outcome, Results, as_json
from scripts.bench.steps import DisagreementError, Settings, StepResult, run_cases
from scripts.bench.tables import markdown, show
from scripts.bench.workers import WorkerError

OURS_ALONE = {"sweep": sweep, "long": long, "fixed": fixed, "startup": startup}
RAGGED, EVALUATION = "ragged", "evaluation"
NEEDS = {
    RAGGED: "--text, --model, --tokenizer",
    EVALUATION: "--model, --questions",
}
"""Options with real text, by the case that needs them."""

EVERYTHING = ("growth", "gpt2", "t5", "tiny", *HYBRIDS, *NEEDS, *OURS_ALONE)
KNOWN = ("growth", *CASES, *NEEDS, *OURS_ALONE)


def main() -> int:
    """Measures the requested cases; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args()
    prompted = {name for name, case in CASES.items() if case.prompt}
    if options.devices > 1 and (
        options.ideal_rounds or not options.cases or set(options.cases) - prompted
    ):
        parser.error(
            f"--devices {options.devices} needs --ideal_rounds 0 and cases with a "
            f"prompt: {', '.join(sorted(prompted))}"
        )
    console = Console()
    settings = Settings(
        steps=options.steps,
        warm_up=options.warm_up,
        ideal_rounds=options.ideal_rounds,
        devices=options.devices,
        peft_python=options.peft_python,
        say=console.print,
    )
    try:
        results = run(
            settings,
            options.cases,
            Text(**{name: getattr(options, name) for name in Text._fields}),
        )
    except (DisagreementError, WorkerError) as problem:
        console.print(f"bench: {problem}", style="red", markup=False)
        return 1
    show(results, console)
    write(results, options.json, options.html)
    return 0


def run(settings: Settings, names: Sequence[str], text: Text) -> Results:
    """Measures the named cases, or all of them if `names` is empty.

    Raises:
      DisagreementError: if the two sides' results differ.
      WorkerError: if a process ends early.
    """
    steps: list[StepResult] = []
    outcomes: list[Outcome] = []
    versions: dict[str, str] = {}
    rates = measure_rates(settings) if settings.ideal_rounds else None
    for name in names or EVERYTHING:
        if name in OURS_ALONE:
            outcomes.append(OURS_ALONE[name](settings))
        elif name == RAGGED and text.text and text.model and text.tokenizer:
            outcomes += ragged(settings, text.model, text.text, text.tokenizer)
        elif name == EVALUATION and text.model and text.questions:
            outcome, outcome_versions = evaluation(settings, text.model, text.questions)
            outcomes.append(outcome)
            versions |= outcome_versions
        elif name in NEEDS:
            settings.say(f"{name} is skipped: it needs {NEEDS[name]}")
        else:
            with tempfile.TemporaryDirectory() as folder:
                cases = GROWTH if name == "growth" else (name,)
                case_steps, case_versions = run_cases(cases, Path(folder), settings)
            steps += case_steps
            versions |= case_versions
    machine = describe_machine(settings, versions, rates)
    return Results(machine, steps, outcomes, rates)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser, which rejects unknown options and cases."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=str(__doc__).partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "cases",
        nargs="*",
        type=known_case,
        metavar="CASE",
        help=f"any of {', '.join(KNOWN)} (default: {', '.join(EVERYTHING)})",
    )
    defaults = Settings()
    for name, text in (
        ("steps", "measured turns of each side"),
        ("warm_up", "turns before the measured ones"),
        ("ideal_rounds", "timings of each matrix product alone; 0 for none"),
        ("devices", "devices of the CPU that split our batches"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=getattr(defaults, name),
            help=f"{text} (%(default)s)",
        )
    for name, metavar, text in (
        ("text", "FILE", "ragged: GSM8K's train.jsonl"),
        ("model", "DIR", "ragged, evaluation: a small trained model (stories260k)"),
        ("tokenizer", "DIR", "ragged: the random Llama's tokenizer, such as GPT-2's"),
        ("questions", "FILE", "evaluation: TREC's train_5500.label"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--peft_python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter with torch, transformers and peft (default: this one)",
    )
    for name, text in (
        ("json", "write all results to this file, and a Markdown file next to it"),
        ("html", "write a page with tables and charts to this file"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    return parser


def known_case(name: str) -> str:
    """Returns the name of a case.

    Raises:
      ArgumentTypeError: if the case does not exist.
    """
    if name not in KNOWN:
        raise argparse.ArgumentTypeError(
            f"{name!r}: expected one of {', '.join(KNOWN)}"
        )
    return name


def write(results: Results, json_file: Path | None, html_file: Path | None) -> None:
    """Writes the requested files."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_json(results), indent=1) + "\n")
        json_file.with_suffix(".md").write_text(markdown(results))
    if html_file is not None:
        html_file.parent.mkdir(parents=True, exist_ok=True)
        html_file.write_text(page(results))


if __name__ == "__main__":
    sys.exit(main())
