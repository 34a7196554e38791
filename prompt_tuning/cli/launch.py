"""The options by which a command becomes one of several processes."""

import argparse
from collections.abc import Callable

from prompt_tuning.core.errors import InputError

FLAGS = ("coordinator", "processes", "process")


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds them to a command."""
    group = command.add_argument_group(
        "several processes", "each started with the same command"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 is to be reached"
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument(
        "--process", type=int, metavar="I", help="the number of this one, from 0"
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="find these out from SLURM, Open MPI, Kubernetes or a TPU pod",
    )
    group.add_argument(
        "--silence",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="after which a process that is not heard of is taken for dead (25)",
    )


def together(options: argparse.Namespace, command: Callable[[], int]) -> int:
    """Runs a command, as one of several processes if its options say so.

    Args:
      options: of any command, with or without those above.
      command: gives the exit code.

    Raises:
      InputError: if the options do not go together, or the processes do not find each
        other.
    """
    given = {name: getattr(options, name, None) for name in FLAGS}
    alone = all(value is None for value in given.values())
    automatic = getattr(options, "distributed", False)
    if alone and not automatic:
        return command()
    if not alone and automatic:
        raise InputError(
            "--distributed finds out what --coordinator, --processes and --process "
            "say: leave it out, or them"
        )
    from prompt_tuning.processes.group import Launch, run_together

    trains = options.command == "train"
    again = "; the same command goes on from its last checkpoint" if trains else ""
    return run_together(
        Launch(**given, silence=options.silence),
        command,
        advice=f"start all processes again{again}",
        ends_on_sigterm=not trains,
    )
