"""`prompt-tuning evaluate`: measures tuned prompts on held-out data."""

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli import shared_options
from prompt_tuning.cli.run_options import EVALUATES, add_run_options, check_options
from prompt_tuning.core.atomic_files import check_replaceable, write_file
from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from prompt_tuning.config.run import Run
    from prompt_tuning.evaluation.evaluator import Evaluator
    from prompt_tuning.settings.evaluation_settings import Evaluation

HELP = "measure a tuned prompt on held-out data"
USES_JAX = True
SEVERAL_PROCESSES = True
USAGE = """
  prompt-tuning evaluate --run DIRECTORY [OPTION ...]
  prompt-tuning evaluate --model PATH --eval FILE [--prompt PATH] [OPTION ...]
  prompt-tuning evaluate --gin_file FILE [--gin.NAME=VALUE ...] [OPTION ...]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    shared_options.add_config_option(parser)
    shared_options.add_print_config_option(parser)
    shared_options.add_run_option(parser)
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help=f"{shared_options.OTHER_PROMPT}; given several times, the prompts vote on "
        "each answer",
    )
    parser.add_argument(
        "--vote",
        choices=("majority", "mean"),
        help="how several prompts vote: majority takes the answer of most prompts, and "
        "the likelier one of a tie; mean takes the answer with the greatest mean "
        "log-probability (default: majority)",
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="also measure the frozen model without a prompt",
    )
    parser.add_argument(
        "--text_prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="also measure the frozen model with this text before each input; may be "
        "repeated",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="compare the memory of a `remember` run with its document: answers to "
        "held-out rows with no context, with the memory, with the whole document, and "
        "with as many of its tokens as the memory has slots (the first ones, "
        "retrieved ones, or a summary)",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="write each example's input, target, generated text and scores as jsonl",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing predictions file"
    )
    add_run_options(parser, EVALUATES)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    check_options(options, trains=False)


def run(options: argparse.Namespace) -> int:
    """Measures a run, or the frozen model alone if `Run.prompt = None`."""
    from rich.console import Console

    from prompt_tuning.cli.selected_run import check_processes, print_config, read_run
    from prompt_tuning.processes.group import is_first, run_on_first

    run = read_run(options)
    if options.print_config:
        print_config()
        return 0
    if run.evaluation is None:
        raise InputError("there is no held-out data: give it by --eval FILE")
    run_on_first(lambda: _check_options(options))
    check_processes(options, run)
    console = Console(quiet=not is_first())
    if options.memory:
        from prompt_tuning.cli.console import print_table
        from prompt_tuning.texts.memory_comparison import measure_memory
        from prompt_tuning.texts.memory_tables import memory_tables

        for table in memory_tables(measure_memory(run, run.evaluation)):
            print_table(console, table)
    elif len(options.prompts) > 1:
        _vote(run, run.evaluation, options, console)
    else:
        _compare(run, run.evaluation, options, console)
    return 0


def _vote(
    run: "Run",
    evaluation: "Evaluation",
    options: argparse.Namespace,
    console: "Console",
) -> None:
    """Prints the metrics of prompts together and alone."""
    from prompt_tuning.cli.console import print_table
    from prompt_tuning.cli.evaluation_table import vote_table
    from prompt_tuning.prompts.tools.similarity import short_names
    from prompt_tuning.tuned.ensembles import evaluate_ensemble, open_ensemble

    vote = options.vote or "majority"
    names = short_names(options.prompts)
    model, parameters = open_ensemble(run, options.prompts)
    results = evaluate_ensemble(model, parameters, evaluation, vote)
    print_table(console, vote_table(results, names, vote))


def _compare(
    run: "Run",
    evaluation: "Evaluation",
    options: argparse.Namespace,
    console: "Console",
) -> None:
    """Prints the metrics of one prompt and, if requested, the frozen model."""
    from prompt_tuning.cli.console import print_lines, print_table
    from prompt_tuning.cli.evaluation_table import comparison_table
    from prompt_tuning.cli.selected_run import report_idle_devices
    from prompt_tuning.evaluation.example_description import describe_examples
    from prompt_tuning.processes.group import is_first
    from prompt_tuning.tuned.comparison import measure_each, open_comparison

    if options.predictions is not None:
        _check_tokenizer(run)
    systems = open_comparison(
        run,
        evaluation,
        prompt_file=options.prompts[0] if options.prompts else None,
        baseline=options.baseline,
        text_prompts=options.text_prompt,
    )
    first = systems[0].evaluator
    if evaluation.generates:
        _warn_of_cut_answers(first, evaluation.new_tokens)
    results = {}
    predictions: list[str] = []
    with_texts = options.predictions is not None
    for name, evaluator, result in measure_each(systems, with_texts=with_texts):
        results[name] = result
        if with_texts:
            predictions += evaluator.predictions(name, result)
    print_table(console, comparison_table(results, evaluation))
    description = describe_examples(first, evaluation.resamples)
    print_lines(console, description, *report_idle_devices(run.mesh))
    if options.predictions is not None and is_first():
        content = "".join(predictions).encode()
        write_file(options.predictions, content, force=options.force)
        print_lines(console, f"predictions: {options.predictions}")


def _check_options(options: argparse.Namespace) -> None:
    several = len(options.prompts) > 1
    if options.memory and (
        options.prompts
        or options.baseline
        or options.text_prompt
        or options.predictions is not None
    ):
        raise InputError(
            "--memory compares a run's own memory with its document: leave out "
            "--prompt, --baseline, --text_prompt and --predictions"
        )
    if not several and options.vote is not None:
        raise InputError("--vote is among several prompts: give --prompt several times")
    compared = options.baseline or options.text_prompt
    if several and (compared or options.predictions is not None):
        raise InputError(
            "--baseline, --text_prompt and --predictions need a single --prompt, and "
            f"{len(options.prompts)} were given, which vote: give one --prompt, or "
            "leave those options out"
        )
    texts = options.text_prompt
    if len(set(texts)) != len(texts):
        raise InputError(f"--text_prompt names a text twice: {texts}")
    file = options.predictions
    if file is not None:
        check_replaceable(file, force=options.force)


def _check_tokenizer(run: "Run") -> None:
    """Checks before measuring that predictions have a tokenizer.

    HDF5 files of token ids can be measured without one.
    """
    import jax

    from prompt_tuning.pretrained.prompted_model import open_pretrained

    open_pretrained(run.model, key=jax.random.key(run.seed)).needed_tokenizer()


def _warn_of_cut_answers(evaluator: "Evaluator", new_tokens: int) -> None:
    """Warns of completions that are too long to be generated.

    All systems have the same completions, so `evaluator` can be any system's.
    """
    lengths = evaluator.completion_lengths
    longer = sum(length > new_tokens for length in lengths)
    if longer:
        warnings.warn(
            f"{longer:,} of {len(lengths):,} completions are longer than "
            f"Evaluation.new_tokens = {new_tokens} (the longest has {max(lengths):,} "
            "tokens), so the generated text is cut off and cannot match them exactly; "
            f"--gin.Evaluation.new_tokens={max(lengths)} generates all of them",
            stacklevel=2,
        )
