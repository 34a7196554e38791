"""The command `prompt-tuning evaluate`: from held-out files to a table."""

import argparse
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from prompt_tuning.cli.run_options import check_processes, idle_devices, read_run
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.evaluation.evaluation_settings import Evaluation
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.metric_sums import MetricSums, intervals
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.processes.group import is_first, run_on_first
from prompt_tuning.prompts.tools.similarity import short_names
from prompt_tuning.tuned.comparison import measure_all, open_systems
from prompt_tuning.tuned.ensembles import ensemble, open_ensemble

WIDE = 200
Measured = dict[str, EvaluationResult]


def evaluate(options: argparse.Namespace) -> int:
    """Measures a tuned prompt, or the model alone where `Run.prompt = None`."""
    run = read_run(options)
    if run.evaluation is None:
        raise InputError("Run.evaluation is None: name the held-out data there")
    prompts = [Path(prompt) for prompt in options.prompts]
    run_on_first(lambda: _check(options, prompts))
    check_processes(options, run)
    console = _console()
    if len(prompts) > 1:
        console.print(_vote(run, run.evaluation, prompts, options.vote or "majority"))
        return 0
    if options.predictions is not None:
        _check_tokenizer(run)
    systems = open_systems(
        run,
        run.evaluation,
        prompt_file=prompts[0] if prompts else None,
        baseline=options.baseline,
        text_prompts=options.text_prompt,
    )
    first = systems[0].evaluator
    if run.evaluation.generates:
        _warn_of_cut_answers(first, run.evaluation.new_tokens)
    found: Measured = {}
    lines: list[str] = []
    for name, evaluator, findings in measure_all(systems):
        found[name] = findings
        if options.predictions is not None:
            lines += evaluator.predictions(name, findings)
    console.print(comparison_table(found, run.evaluation))
    note = _note(first, run.evaluation.resamples)
    for text in (note, *idle_devices(run)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if options.predictions is not None and is_first():
        file = Path(options.predictions)
        write_file(file, "".join(lines).encode(), force=options.force)
        console.print(f"predictions: {file}", markup=False, highlight=False)
    return 0


def _console() -> Console:
    """Where tables go: of several processes, those of the first."""
    quiet = not is_first()
    console = Console(quiet=quiet)
    # A file or a pipe has no width, and a table is not to be cut for it.
    return console if console.is_terminal else Console(width=WIDE, quiet=quiet)


def _check(options: argparse.Namespace, prompts: Sequence[Path]) -> None:
    """Refuses options that do not go together, before anything is read."""
    if len(prompts) < 2 and options.vote is not None:
        raise InputError("--vote is among several prompts: give --prompt several times")
    compared = options.baseline or options.text_prompt
    if len(prompts) > 1 and (compared or options.predictions is not None):
        raise InputError(
            "--baseline, --text_prompt and --predictions are for one prompt; several "
            "--prompt vote: leave out the ones, or all but one of the others"
        )
    texts = options.text_prompt
    if len(set(texts)) != len(texts):
        raise InputError(f"--text_prompt names a text twice: {texts}")
    file = None if options.predictions is None else Path(options.predictions)
    if file is not None and file.exists() and not (options.force and file.is_file()):
        raise InputError(
            f"--predictions {file} already exists; --force replaces a file, or name "
            "another"
        )


def _check_tokenizer(run: Run) -> None:
    """Refuses predictions as texts without a tokenizer, before anything is measured.

    Token ids of HDF5 files are measured without one.

    Raises:
      InputError: with what to set.
    """
    open_pretrained(run.model, key=jax.random.key(run.seed)).needed_tokenizer()


def _warn_of_cut_answers(evaluator: Evaluator, new_tokens: int) -> None:
    """Says how many completions no generated text can equal, before any is generated.

    Args:
      evaluator: of any system: all have the same completions.
      new_tokens: most tokens to generate.
    """
    lengths = evaluator.completion_lengths
    cut = sum(length > new_tokens for length in lengths)
    if cut:
        warnings.warn(
            f"{cut:,} of {len(lengths):,} completions are longer than "
            f"Evaluation.new_tokens = {new_tokens}, the longest {max(lengths):,} "
            "tokens: what is generated in their place is cut off and is no exact "
            f"match; --gin.Evaluation.new_tokens={max(lengths)} lets all be generated",
            stacklevel=2,
        )


def _note(evaluator: Evaluator, resamples: int) -> str:
    """What the numbers are of."""
    parts = [f"{len(evaluator):,} examples", f"95 % of {resamples:,} bootstrap draws"]
    if evaluator.skipped:
        parts.append(f"{evaluator.skipped:,} left out because they are too long")
    if evaluator.uncounted:
        parts.append(
            f"{evaluator.uncounted:,} first tokens, which the model without a prompt "
            "has nothing to predict from, count in no column"
        )
    return "; ".join(parts)


def comparison_table(found: Measured, evaluation: Evaluation) -> Table:
    """Each metric of each system, over all examples and then by category.

    Args:
      found: by the system's name.
      evaluation: says how intervals are drawn.
    """
    table = Table("metric")
    alone = len(found) == 1
    for name in found:
        # A text prompt may be long, and may hold what rich takes for markup.
        title = "value" if alone else escape(name)
        table.add_column(title, justify="right", overflow="fold", max_width=40)
    if alone:
        table.add_column("95 %", justify="right")
    for part in next(iter(found.values())).parts:
        measured = {name: one.parts[part] for name, one in found.items()}
        if part:
            table.add_section()
            count = len(next(iter(measured.values()))["loss"].rows)
            table.add_row(Text(f"{part} ({count:,})", style="bold"))
        _add_metrics(table, measured, evaluation)
    return table


def _add_metrics(
    table: Table,
    measured: Mapping[str, Mapping[str, MetricSums]],
    evaluation: Evaluation,
) -> None:
    """One row for each metric."""
    drawn = {
        name: intervals(
            tallies, resamples=evaluation.resamples, seed=evaluation.bootstrap_seed
        )
        for name, tallies in measured.items()
    }
    for metric in next(iter(measured.values())):
        tallies = {name: own[metric] for name, own in measured.items()}
        best = _best(tallies)
        cells = []
        for name, tally in tallies.items():
            value = Text(_shown(tally.value), style="bold green" * (name in best))
            interval = Text("–".join(map(_shown, drawn[name][metric])), style="dim")
            cells += (
                [value, interval]
                if len(tallies) == 1
                else [Text.assemble(value, " ", interval)]
            )
        table.add_row(Text(metric), *cells)


def _best(tallies: Mapping[str, MetricSums]) -> list[str]:
    """The systems of which none is better, unless all are alike."""
    values = {n: tally.value for n, tally in tallies.items()}
    real = {name: value for name, value in values.items() if not math.isnan(value)}
    if len(set(real.values())) < 2:
        return []
    lower = next(iter(tallies.values())).lower_is_better
    best = min(real.values()) if lower else max(real.values())
    return [name for name, value in real.items() if value == best]


def _shown(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def _vote(
    run: Run, evaluation: Evaluation, prompts: Sequence[Path], vote: str
) -> Table:
    """What prompts are worth together, and each alone."""
    names = short_names(prompts)
    model, parameters = open_ensemble(run, prompts)
    table = Table("metric", f"together ({vote})", *map(escape, names))
    for name, outcome in ensemble(model, parameters, evaluation, vote).items():
        values = (outcome.together, *outcome.alone)
        table.add_row(name, *(f"{value:.4f}" for value in values))
    return table
