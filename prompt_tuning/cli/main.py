"""Arguments, exit codes, and the process's settings; the work is done elsewhere.

Nothing heavy is imported before the arguments are read, so that help is instant.
Exit codes: 0 done (or stopped by a signal with everything saved), 1 training came to a
loss that is not finite or to a disk that takes no checkpoint, or `memory` to a run that
does not fit, 2 input that cannot be used, 3 another of several processes is gone.
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
from prompt_tuning.cli import prepare as prepare_command
from prompt_tuning.cli import show as show_command
from prompt_tuning.cli import token_types as token_types_command
from prompt_tuning.cli.options import EPILOG, add_options
from prompt_tuning.core.errors import InputError, StorageError

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
    from prompt_tuning.training.finite_checks import NotFiniteError

    try:
        return getattr(commands, options.command)(options)
    except InputError as problem:
        print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
        return 2
    except (NotFiniteError, StorageError) as problem:
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
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in HELP.items():
        command = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        if name in WITHOUT_JAX:
            WITHOUT_JAX[name].add_options(command)
        else:
            add_options(name, command)
    return parser


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
