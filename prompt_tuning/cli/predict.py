"""`prompt-tuning predict`: answers inputs without targets."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.cli import shared_options
from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.core.atomic_files import check_replaceable, write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    RowCount,
)
from prompt_tuning.core.progress_display import progress_bar
from prompt_tuning.core.status_line import clear_status
from prompt_tuning.settings.rollout_settings import NEW_TOKENS

if TYPE_CHECKING:
    from prompt_tuning.config.run import Run
    from prompt_tuning.data.rows.jsonl import JsonLine
    from prompt_tuning.settings.data_source import DataSource

HELP = "label new inputs with a tuned prompt, with probabilities"
USES_JAX = True
SEVERAL_PROCESSES = True
USAGE = """
  prompt-tuning predict [FILE|TEXT ...] --run DIRECTORY [OPTION ...]
  prompt-tuning predict [FILE|TEXT ...] --model PATH --labels LABEL ... [OPTION ...]
  prompt-tuning predict [FILE|TEXT ...] --gin_file FILE [--gin.NAME=VALUE ...]"""

PREDICTING = "predicting"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="FILE|TEXT",
        help="a file of records with the run's prompt key (.jsonl, .json, .csv, .tsv, "
        ".parquet), a .txt file with an input on each line, - for standard input, or "
        "an input itself (default: -)",
    )
    shared_options.add_config_option(parser)
    shared_options.add_print_config_option(parser)
    shared_options.add_run_option(parser)
    shared_options.add_prompt_option(parser)
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="labels to choose from, written as in the completions (default: those of "
        "the run; without any, generated text is written)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the predictions to a file instead of standard output",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing output file"
    )
    parser.add_argument(
        "--new_tokens",
        type=numeric(PositiveInteger),
        metavar="N",
        help=f"maximum number of new tokens of generated text (default: {NEW_TOKENS})",
    )
    parser.add_argument(
        "--batch_size",
        type=numeric(RowCount),
        metavar="N",
        help="rows per batch; there is a row for each input and label (default: the "
        "batch size of the run's data)",
    )
    parser.add_argument(
        "--prompt_id",
        type=numeric(NonnegativeInteger),
        metavar="N",
        help="number of the prompt for all inputs, from 0, of a run with several "
        "prompts (default: each line selects its own)",
    )
    add_run_options(parser, GENERATES)


def check(options: argparse.Namespace) -> None:
    """Checks options before JAX is imported."""
    check_options(options, trains=False)
    _check_options(options)


def run(options: argparse.Namespace) -> int:
    """Writes a line of JSON per input."""
    from prompt_tuning.cli.selected_run import check_processes, print_config, read_run
    from prompt_tuning.data.rows.jsonl import JsonLine
    from prompt_tuning.processes.group import is_first, run_on_first
    from prompt_tuning.tuned.prediction import label_settings

    run = read_run(options)
    if options.print_config:
        print_config()
        return 0
    evaluation = label_settings(run, options.labels)
    source = run.source if evaluation is None else evaluation.data
    if evaluation is not None and options.new_tokens is not None:
        raise InputError(
            "--new_tokens is for generated text, but the run has labels: leave it out, "
            "or use prompt-tuning generate"
        )
    # Process 0 sends its input to the other processes as JSON.
    parts = run_on_first(lambda: _read_inputs(options, source))
    lines = [JsonLine(Path(path), number, content) for path, number, content in parts]
    check_processes(options, run)
    predictions = _predict(run, options, lines)
    if not is_first():
        return 0
    content = "".join(
        json.dumps(line, ensure_ascii=False) + "\n" for line in predictions
    )
    if options.output is None:
        print(content, end="")
    else:
        write_file(options.output, content, force=options.force)
        print(f"{len(lines):,} predictions: {options.output}")
    return 0


def _check_options(options: argparse.Namespace) -> None:
    from prompt_tuning.data.rows.text_records import is_input_file

    files = [label for label in options.labels or () if is_input_file(label)]
    if files:
        raise InputError(
            f"--labels takes all that follows, and {files[0]} is a file: name files "
            "and texts before --labels"
        )
    if options.output is not None:
        check_replaceable(options.output, force=options.force)


def _read_inputs(options: argparse.Namespace, source: "DataSource") -> list[Any]:
    """Reads the inputs; each line is a list of its parts."""
    from prompt_tuning.data.rows.text_records import (
        STANDARD_INPUT,
        has_plain_texts,
        read_inputs,
    )
    from prompt_tuning.tuned.input_encoding import PROMPT_KEY, text_key

    if not options.inputs and sys.stdin.isatty():
        raise InputError("no input was given: name files, texts, or - to type texts")
    inputs = options.inputs or [STANDARD_INPUT]
    key = text_key(source) if has_plain_texts(inputs) else PROMPT_KEY
    # Nothing is drawn while texts are typed.
    clear_status()
    lines = read_inputs(inputs, key, lambda: sys.stdin.buffer.read())
    return [[str(line.path), line.number, line.content] for line in lines]


def _predict(
    run: "Run", options: argparse.Namespace, lines: "Sequence[JsonLine]"
) -> list[dict[str, Any]]:
    """Returns the output of each line: the input, its answer, and other keys."""
    from prompt_tuning.processes.group import is_first
    from prompt_tuning.tuned.input_encoding import encode_inputs
    from prompt_tuning.tuned.load_tuned import load_tuned
    from prompt_tuning.tuned.prediction import (
        generate_outputs,
        label_settings,
        predict_labels,
        predict_tags,
    )

    model, parameters = load_tuned(run, options.prompt)
    of_head = model.config.labels
    evaluation = label_settings(run, options.labels, options.batch_size, of_head)
    source = run.source if evaluation is None else evaluation.data
    if model.config.problem == "tokens":
        arguments = lines, options.labels, options.prompt_id
        tagged = predict_tags(model, parameters, source, *arguments)
        return [{"input": " ".join(each.words), **each._asdict()} for each in tagged]
    inputs = encode_inputs(model, source, lines, options.prompt_id)
    if evaluation is None:
        new_tokens = NEW_TOKENS if options.new_tokens is None else options.new_tokens
        with progress_bar(PREDICTING, len(lines), shown=is_first()) as advance:
            outputs = generate_outputs(
                model,
                parameters,
                source,
                inputs,
                new_tokens=new_tokens,
                batch_size=options.batch_size,
                on_batch=advance,
            )
        answers = [{"output": output} for output in outputs]
    else:
        count = len(lines) * len(evaluation.labels or of_head)
        with progress_bar(PREDICTING, count, shown=is_first()) as advance:
            predictions = predict_labels(model, parameters, evaluation, inputs, advance)
        answers = [prediction._asdict() for prediction in predictions]
    written = zip(inputs.texts, answers, inputs.records, strict=True)
    return [
        {"input": text, **answer} | ({"record": record} if record else {})
        for text, answer, record in written
    ]
