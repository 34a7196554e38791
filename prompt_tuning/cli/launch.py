"""Options that start a command as one of multiple processes."""

import argparse
from collections.abc import Callable

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    Silence,
)

FLAGS = ("coordinator", "processes", "process")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    group = parser.add_argument_group(
        "several processes", "each started with the same command"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0"
    )
    group.add_argument(
        "--processes",
        type=numeric(PositiveInteger),
        metavar="N",
        help="number of processes",
    )
    group.add_argument(
        "--process",
        type=numeric(NonnegativeInteger),
        metavar="I",
        help="number of this process, from 0",
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="detect all three from SLURM, Open MPI, Kubernetes or a TPU pod",
    )
    group.add_argument(
        "--silence",
        type=numeric(Silence),
        default=25.0,
        metavar="SECONDS",
        help="time without a heartbeat after which a process counts as dead",
    )


def is_one_of_several(options: argparse.Namespace) -> bool:
    """Whether the options request more than one process."""
    explicit = any(getattr(options, name, None) is not None for name in FLAGS)
    return explicit or getattr(options, "distributed", False)


def run_in_processes(
    options: argparse.Namespace, command: Callable[[], int], *, resumes: bool
) -> int:
    """Runs a command as one of multiple processes; see `is_one_of_several`.

    Args:
      options: options of a command with those above.
      command: returns the exit code.
      resumes: whether the command saves its state on SIGTERM and continues from it when
        restarted.

    Raises:
      InputError: if the options contradict each other, or the processes cannot connect.
    """
    values = {name: getattr(options, name) for name in FLAGS}
    explicit = any(value is not None for value in values.values())
    automatic = options.distributed
    if explicit and automatic:
        raise InputError(
            "--distributed detects what --coordinator, --processes and --process set: "
            "give either --distributed or these three"
        )
    from prompt_tuning.processes.group import Launch, run_together

    advice = "start all processes again"
    if resumes:
        advice += "; the same command continues from its last checkpoint"
    return run_together(
        Launch(**values, silence=options.silence),
        command,
        advice=advice,
        ends_on_sigterm=not resumes,
    )
