"""Arguments, exit codes, and the process's settings; the work is done elsewhere.

Nothing heavy is imported before the arguments are read, so that help is instant.
Exit codes: 0 done (or stopped by a signal with everything saved), 1 training came to a
loss that is not finite, or `memory` to a run that does not fit, 2 input that cannot be
used, 3 another of several processes is gone.
"""

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning import __version__
from prompt_tuning.cli import launch
from prompt_tuning.cli import memory as memory_command
from prompt_tuning.cli import prepare as prepare_command
from prompt_tuning.cli import show as show_command
from prompt_tuning.cli import token_types as token_types_command
from prompt_tuning.errors import InputError

GIN_PREFIX = "--gin."
HELP = {
    "train": "tune a prompt, or go on with a run that was stopped",
    "sweep": "tune many prompts at once over one copy of the frozen model",
    "evaluate": "measure a tuned prompt on held-out data",
    "generate": "continue texts with a tuned prompt",
    "inspect": "print the nearest tokens and the norm of each prompt vector",
    "similar": "compare prompts with each other, the most alike first",
    "recycle": "map a prompt to another model through the words that both know",
    "convert": "write what was tuned in another form, or read PEFT's",
    "memory": "tell what a run takes of a device's memory, and whether it fits",
    "prepare": "make HDF5 files of token ids and types from jsonl, text or tables",
    "token-types": "add or replace the types of an HDF5 file's tokens",
    "show": "print rows of data as text, coloured by what is learned",
}
WITHOUT_JAX = {
    "prepare": prepare_command,
    "token-types": token_types_command,
    "show": show_command,
}
"""Commands that only read and write files of data, and the modules they are in."""

OTHER_PROMPT = "a prompt file, checkpoint or PEFT folder in place of the run's best"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    plain, bindings = split_bindings(token_types_command.spelt_out(given))
    options = parser.parse_args(plain)
    options.bindings = bindings
    if options.command in WITHOUT_JAX:
        return _run_without_jax(options)
    set_up_process()
    warnings.showwarning = _show_warning
    try:
        return launch.together(options, functools.partial(_run, options))
    except InputError as problem:
        print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    """Runs a command that computes."""
    from prompt_tuning.cli import commands
    from prompt_tuning.training.loop import NotFiniteError

    try:
        return getattr(commands, options.command)(options)
    except InputError as problem:
        print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
        return 2
    except NotFiniteError as problem:
        print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
        return 1


def _run_without_jax(options: argparse.Namespace) -> int:
    """Runs a command that only reads and writes files of data."""
    module, name = WITHOUT_JAX[options.command], options.command.replace("-", "_")
    try:
        return getattr(module, name)(options)
    except InputError as problem:
        print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
        return 2


def split_bindings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--gin.NAME=value` out of the arguments, as `NAME = value`."""
    plain, bindings = [], []
    for argument in arguments:
        name, equals, value = argument.removeprefix(GIN_PREFIX).partition("=")
        if argument.startswith(GIN_PREFIX) and equals:
            bindings.append(f"{name} = {value}")
        else:
            plain.append(argument)
    return plain, bindings


def build_parser() -> argparse.ArgumentParser:
    """The parser; an unknown flag is an error."""
    parser = argparse.ArgumentParser(
        prog="prompt-tuning",
        description="Tunes prompts in front of frozen language models.",
        epilog="Any value of a config is overridden by --gin.NAME=value, for example "
        "--gin.STEPS=200 or --gin.MODEL='\"folder\"'.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    made = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in HELP.items()
    }
    train, sweep, evaluate, generate, inspect, similar, recycle, convert, memory = (
        command for name, command in made.items() if name not in WITHOUT_JAX
    )
    for command in (train, sweep, evaluate, generate, inspect, memory):
        command.add_argument(
            "--gin_file",
            action="append",
            default=[],
            metavar="FILE",
            help="a gin file, by path or by name below configs/; may be repeated",
        )
        command.epilog = parser.epilog
    for command in (evaluate, generate, inspect):
        _add_run_options(command)
    for command in (train, evaluate, generate):
        launch.add_options(command)
    _add_voting_options(evaluate)
    _add_comparison_options(evaluate)
    for command in (generate, inspect):
        _add_prompt_option(command)
    _add_sweep_options(sweep)
    _add_generation_options(generate)
    inspect.add_argument(
        "--nearest", type=int, default=5, help="tokens shown for each vector"
    )
    _add_similarity_options(similar)
    _add_recycling_options(recycle)
    _add_conversion_options(convert)
    memory_command.add_options(memory)
    for name, module in WITHOUT_JAX.items():
        module.add_options(made[name])
    return parser


def _add_similarity_options(similar: argparse.ArgumentParser) -> None:
    similar.add_argument(
        "prompts",
        nargs="+",
        metavar="PROMPT",
        help="a prompt file, run directory, checkpoint or PEFT folder",
    )
    similar.add_argument(
        "--query", metavar="PROMPT", help="the prompt to compare the others with"
    )
    similar.add_argument(
        "--average",
        action="store_true",
        help="rank by the cosine similarity of mean vectors, not by the mean "
        "similarity of all pairs of vectors",
    )
    similar.add_argument(
        "--nearest", type=int, default=5, help="prompts shown for each, without --query"
    )
    similar.add_argument("--picture", metavar="FILE", help="a heat map, as PNG")


def _add_recycling_options(recycle: argparse.ArgumentParser) -> None:
    recycle.add_argument(
        "prompt",
        metavar="PROMPT",
        help="a prompt file, run directory, checkpoint or PEFT folder",
    )
    for flag, name, whose in (
        ("--from", "source", "it was trained on"),
        ("--to", "target", "it is to serve"),
    ):
        recycle.add_argument(
            flag,
            dest=name,
            required=True,
            metavar="MODEL",
            help=f"the model that {whose}: a Hugging Face folder, or bundled:NAME",
        )
    recycle.add_argument(
        "--out", required=True, metavar="FILE", help="a NumPy file to write"
    )
    recycle.add_argument(
        "--method",
        choices=("v2v_linear", "v2v_mlp", "linear_combination"),
        default="v2v_linear",
        help="a linear map of embeddings by least squares (the default), a network, or "
        "each vector as a combination of tokens",
    )
    recycle.add_argument(
        "--skip_first", type=int, default=1000, help="of the shared tokens"
    )
    recycle.add_argument(
        "--words",
        type=int,
        default=4000,
        help="shared tokens used, after those skipped",
    )


def _add_conversion_options(convert: argparse.ArgumentParser) -> None:
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="a run's directory (its best checkpoint), a checkpoint, a PEFT folder, or "
        "a file of one array",
    )
    convert.add_argument("target", metavar="TARGET", help="a folder or file to write")
    convert.add_argument(
        "--to",
        choices=("peft", "checkpoint", "npy", "safetensors", "t5x"),
        help="the form; by default what TARGET's name ends with, else a checkpoint to "
        "start runs from for PEFT's, and a PEFT folder for ours. npy and safetensors "
        "hold one array, t5x is a folder with google-research/prompt-tuning's names",
    )
    convert.add_argument(
        "--merge",
        action="store_true",
        help="write the frozen model, as a Hugging Face folder, with LoRA and IA3 "
        "multiplied into its weights",
    )
    convert.add_argument(
        "--base_model",
        metavar="PATH",
        help="the frozen model of a SOURCE that is no run: a Hugging Face folder or "
        "bundled:NAME; it is also noted in a PEFT folder",
    )
    convert.add_argument(
        "--task_type",
        choices=("CAUSAL_LM", "SEQ_2_SEQ_LM"),
        help="noted in a PEFT folder; by default by the model",
    )
    convert.add_argument(
        "--only",
        action="append",
        choices=(
            "PROMPT_TUNING",
            "PREFIX_TUNING",
            "MULTITASK_PROMPT_TUNING",
            "DEEP_PROMPT",
            "ADDED_DEEP_PROMPT",
            "LORA",
            "IA3",
        ),
        help="of a run that tuned several things, those to write; may be repeated",
    )
    convert.add_argument(
        "--force", action="store_true", help="replace what such a command wrote before"
    )


def _add_sweep_options(sweep: argparse.ArgumentParser) -> None:
    sweep.description = (
        "Tunes K prompts at once over one copy of the frozen model: one compiled step, "
        "each member an ordinary run in a directory of its own below RUN_DIRECTORY, "
        "then a table, sweep.json and curves.png. The frozen model takes the memory of "
        "one run, activations that of the members computed at once. Members whose "
        "Run.data_seed is the same share each batch. Started again, a sweep that was "
        "stopped goes on."
    )
    sweep.add_argument(
        "--at_once",
        type=int,
        metavar="N",
        help="members whose gradients are computed at once, group after group; by "
        "default all on an accelerator, and on a CPU as many as its caches hold",
    )
    sweep.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="what tells the members apart: the prompt (PROMPT_LENGTH=5,20), its "
        "initialiser, the optimiser (adafactor.learning_rate=0.1,0.3), the seed "
        "(Run.seed=0,1,2); several --vary give every combination, and "
        "--vary NAME,NAME=(VALUE,VALUE),(VALUE,VALUE) changes values together",
    )


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run",
        metavar="DIRECTORY",
        help="a run's directory: short for --gin_file DIRECTORY/config.gin; a sweep's "
        "stands for its best member",
    )


def _add_prompt_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", metavar="PATH", help=OTHER_PROMPT)


def _add_voting_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="PATH",
        help=f"{OTHER_PROMPT}; given several times, the prompts answer together",
    )
    evaluate.add_argument(
        "--vote",
        choices=("majority", "mean"),
        help="how several prompts come to an answer: that of most of them, and of tied "
        "ones the likelier (the default), or that of the greatest mean log-probability",
    )


def _add_comparison_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "--baseline",
        action="store_true",
        help="measure the frozen model without a prompt too, side by side",
    )
    evaluate.add_argument(
        "--text_prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure the frozen model with this text before what it is given, too; "
        "may be repeated",
    )
    evaluate.add_argument(
        "--predictions",
        metavar="FILE",
        help="write what was given, wanted and made, and each example's scores, as "
        "jsonl",
    )
    evaluate.add_argument(
        "--force", action="store_true", help="replace the file of predictions"
    )


def _add_generation_options(generate: argparse.ArgumentParser) -> None:
    generate.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts to continue; lines of standard input if none is given",
    )
    generate.add_argument("--new_tokens", type=int, default=64, help="at most so many")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (the default)"
    )
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    generate.add_argument("--batch_size", type=int, default=32)
    generate.add_argument(
        "--prompt_id",
        type=int,
        metavar="N",
        help="which prompt of a multi-task run continues the texts, from 0",
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the source code that Python adds."""
    print(f"warning: {message}", file=sys.stderr)


def set_up_process() -> None:
    """Deterministic kernels and a compilation cache; call it before JAX computes.

    What the environment says of JAX's cache (`JAX_COMPILATION_CACHE_DIR`,
    `JAX_ENABLE_COMPILATION_CACHE`, ...) goes first.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update(
            "jax_compilation_cache_dir", str(cache / "prompt_tuning" / "jax")
        )
    least = "jax_persistent_cache_min_compile_time_secs"
    if least.upper() not in os.environ:
        # Small programs too: a start compiles dozens, at 10 to 80 ms each.
        jax.config.update(least, 0.0)


if __name__ == "__main__":
    sys.exit(main())
