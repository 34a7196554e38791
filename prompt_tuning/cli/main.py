"""Arguments, exit codes, and the process's settings; the work is done elsewhere.

Nothing heavy is imported before the arguments are read, so that help is instant.
Exit codes: 0 done (or stopped by a signal with everything saved), 1 training came to a
loss that is not finite, 2 input that cannot be used.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning import __version__
from prompt_tuning.errors import InputError

GIN_PREFIX = "--gin."
HELP = {
    "train": "tune a prompt, or go on with a run that was stopped",
    "sweep": "tune many prompts at once over one copy of the frozen model",
    "evaluate": "measure a tuned prompt on held-out data",
    "generate": "continue texts with a tuned prompt",
    "inspect": "print the nearest tokens and the norm of each prompt vector",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    plain, bindings = split_bindings(given)
    options = parser.parse_args(plain)
    options.bindings = bindings
    set_up_process()
    warnings.showwarning = _show_warning
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
    train, sweep, evaluate, generate, inspect = (
        commands.add_parser(name, help=text, description=text)
        for name, text in HELP.items()
    )
    for command in (train, sweep, evaluate, generate, inspect):
        command.allow_abbrev = False
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
    _add_sweep_options(sweep)
    _add_generation_options(generate)
    inspect.add_argument(
        "--nearest", type=int, default=5, help="tokens shown for each vector"
    )
    return parser


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
    command.add_argument(
        "--prompt",
        metavar="PATH",
        help="a prompt file, checkpoint or PEFT folder in place of the run's best",
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
