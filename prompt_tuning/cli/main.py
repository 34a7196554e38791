"""Entry point of the command: parses the arguments and runs a subcommand.

Imports nothing heavy before the arguments are parsed, so that help is instant.

Exit codes: 0 done (or stopped by SIGTERM with everything saved); 1 training reached a
loss that is not finite or could not write a checkpoint, the disk or the memory is full,
`memory` found that the run does not fit, or `diff` found differences; 2 input that
cannot be used; 3 another of several processes is gone; 130 interrupted by Ctrl-C.
"""

import argparse
import functools
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from prompt_tuning.cli import COMMANDS, completion, environment, launch
from prompt_tuning.cli.option_types import OptionParser, find_subparsers, state_defaults
from prompt_tuning.cli.unknown_options import GIN_PREFIX, describe_unknown
from prompt_tuning.config.option_hints import as_option
from prompt_tuning.core import errors
from prompt_tuning.core.interrupts import is_output_closed
from prompt_tuning.core.progress_display import shown_activity
from prompt_tuning.core.setting_hints import speak_with
from prompt_tuning.core.version import __version__

USAGE = "prompt-tuning COMMAND [OPTION ...]"
DESCRIPTION = "Tunes prompts and adapters in front of frozen language models."
NEXT_STEP = """\
Start with: prompt-tuning train --model PATH --train FILE --eval FILE
`prompt-tuning COMMAND --help` lists the options of a command.
"""


@runtime_checkable
class Command(Protocol):
    """Contents of a command's module; see `prompt_tuning.cli`.

    Optional attributes: `SEVERAL_PROCESSES = True` if it can be started as several
    processes; `RESUMES = True` if it continues an interrupted run; `ALIAS =
    (command, flag)` if it has a second spelling; `check(options)` if it can check
    options before JAX is imported; `PRINTS_STAGES = True` if users wait for it even
    where the output is not a terminal.
    """

    HELP: str
    USES_JAX: bool

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Runs the command and returns the exit code."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    speak_with(as_option)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = load_commands()
    if arguments:
        arguments = _resolve_alias(arguments, commands)
    shell_asks = completion.REQUESTED in os.environ
    parser = build_parser(commands, None if shell_asks else "".join(arguments[:1]))
    completion.complete(parser)
    if any("\0" in argument for argument in arguments):
        parser.error("an argument has a zero byte, which no name or text can have")
    _print_any_text()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    plain, bindings = split_bindings(arguments)
    options, unknown = parser.parse_known_args(plain)
    options.bindings = bindings
    command = commands[options.command]
    if unknown:
        subparser = find_subparsers(parser)[options.command]
        subparser.error(describe_unknown(unknown, subparser))
    check = getattr(command, "check", None)
    if check is not None:
        code = _run(command, options, lambda: check(options))
        if code != 0:
            return code
    run = functools.partial(_run, command, options, lambda: command.run(options))
    if not command.USES_JAX:
        return run()
    with shown_activity(lines=getattr(command, "PRINTS_STAGES", False)):
        set_up_process()
        warnings.showwarning = _show_warning
        resumes = getattr(command, "RESUMES", False)
        if not launch.is_one_of_several(options):
            return run()
        try:
            return launch.run_in_processes(options, run, resumes=resumes)
        except errors.InputError as problem:
            return _print_problem(options, problem, 2)


def _run(
    command: Command, options: argparse.Namespace, function: Callable[[], int | None]
) -> int:
    """Calls a function; turns an expected error into a message and an exit code."""
    try:
        return function() or 0
    except errors.InputError as problem:
        return _print_problem(options, problem, 2)
    except (errors.NotFiniteError, errors.StorageError) as problem:
        return _print_problem(options, problem, 1)
    # The machine causes these errors, whichever command meets them.
    except OSError as problem:
        if isinstance(problem, BrokenPipeError) and is_output_closed():
            raise
        code = 1 if problem.errno in environment.EXHAUSTED else 2
        return _print_problem(options, environment.describe(problem), code)
    except MemoryError as problem:
        text = f"the memory does not suffice: {errors.shortened(str(problem))}"
        return _print_problem(options, text, 1)
    except (RuntimeError, AssertionError) as problem:
        explanation = environment.explain_jax(problem) if command.USES_JAX else None
        if explanation is None:
            raise
        return _print_problem(options, *explanation)


def _print_any_text() -> None:
    """Lets standard output escape characters that its encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_problem(
    options: argparse.Namespace, problem: Exception | str, code: int
) -> int:
    print(f"prompt-tuning {options.command}: {problem}", file=sys.stderr)
    return code


def load_commands() -> dict[str, Command]:
    """Imports the modules of all commands, by command name."""
    return {
        _command_name(module): cast(
            Command, importlib.import_module(f"prompt_tuning.cli.{module}")
        )
        for modules in COMMANDS.values()
        for module in modules
    }


def _command_name(module: str) -> str:
    return module.replace("_", "-")


def _resolve_alias(
    arguments: Sequence[str], commands: Mapping[str, Command]
) -> list[str]:
    """Replaces an alias (a command and flag) by the command that it stands for."""
    for name, command in commands.items():
        spelling, flag = getattr(command, "ALIAS", ("", ""))
        if arguments[0] == spelling and flag in arguments:
            return [name, *(x for x in arguments[1:] if x != flag)]
    return list(arguments)


def split_bindings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--gin.NAME=value` from the other arguments.

    Returns the other arguments, and the bindings in gin's form, `NAME = value`.
    """
    plain, bindings = [], []
    for argument in arguments:
        name, equals, value = argument.removeprefix(GIN_PREFIX).partition("=")
        if argument.startswith(GIN_PREFIX) and equals:
            bindings.append(f"{name} = {value}")
        else:
            plain.append(argument)
    return plain, bindings


def build_parser(
    commands: Mapping[str, Command] | None = None, chosen: str | None = None
) -> argparse.ArgumentParser:
    """Builds the parser of all commands; unknown flags are errors.

    With `chosen`, only that command gets its options, which saves time.
    """
    commands = load_commands() if commands is None else commands
    parser = OptionParser(
        prog="prompt-tuning",
        usage=USAGE,
        description=f"{DESCRIPTION}\n\n{_list_commands(commands)}",
        epilog=NEXT_STEP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    # argparse cannot group subcommands; the description lists them instead.
    subparsers = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="prompt-tuning",
        help=argparse.SUPPRESS,
    )
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name, description=_sentence(command.HELP), allow_abbrev=False
        )
        if chosen not in (None, name):
            continue
        command.add_options(subparser)
        if getattr(command, "SEVERAL_PROCESSES", False):
            launch.add_options(subparser)
        state_defaults(subparser)
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _list_commands(commands: Mapping[str, Command]) -> str:
    """Lists the commands under their headings, one line each."""
    width = max(map(len, commands))
    lines = []
    for heading, modules in COMMANDS.items():
        lines += ["", f"{heading}:"]
        for name in map(_command_name, modules):
            lines.append(f"  {name:{width}}  {commands[name].HELP}")
    return "\n".join(lines).strip()


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Prints a warning as one line, without the source line that Python adds."""
    print(f"warning: {message}", file=sys.stderr)


def set_up_process() -> None:
    """Selects deterministic kernels and a compilation cache; call it before JAX runs.

    Environment variables of JAX's cache (`JAX_COMPILATION_CACHE_DIR`,
    `JAX_ENABLE_COMPILATION_CACHE`, ...) take precedence.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    cache = _cache_folder()
    if jax.config.values["jax_compilation_cache_dir"] is None and cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
    minimum = "jax_persistent_cache_min_compile_time_secs"
    if minimum.upper() not in os.environ:
        # Cache small programs too: a start compiles dozens, at 10 to 80 ms each.
        jax.config.update(minimum, 0.0)


def _cache_folder() -> Path | None:
    """Returns the folder for compiled programs; None if it is not writable.

    It is in the home directory, which may be missing or read-only.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    folder = Path(home) / "prompt_tuning" / "jax"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usable = folder.is_absolute() and os.access(existing, os.W_OK | os.X_OK)
    return folder if usable else None


if __name__ == "__main__":
    sys.exit(main())
