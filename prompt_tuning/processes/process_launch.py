"""How the processes of a command find each other."""

import dataclasses
import re

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import (
    MAXIMUM_PORT,
    NonnegativeInteger,
    PositiveInteger,
    Silence,
)

SILENCE = 25.0
"""Seconds without a heartbeat after which a process is considered dead."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the processes of a command find each other.

    Attributes:
      coordinator: HOST:PORT that process 0 listens on; None, together with the next
        two, to use the environment of SLURM, Open MPI, Kubernetes or a TPU pod.
      processes: number of processes.
      process: rank of this process, from 0.
      silence: seconds without a heartbeat after which a process is considered dead.

    Raises:
      InputError: if only some of the first three are given, or a value is out of range.
    """

    coordinator: str | None = None
    processes: PositiveInteger | None = None
    process: NonnegativeInteger | None = None
    silence: Silence = SILENCE

    def __post_init__(self):
        check_fields(self, prefix="--")
        settings = (self.coordinator, self.processes, self.process)
        missing = [
            flag
            for flag, value in zip(
                ("--coordinator", "--processes", "--process"), settings, strict=True
            )
            if value is None
        ]
        if len(missing) == 3:
            return
        if missing:
            raise InputError(
                f"{' and '.join(missing)} must be given with the others: "
                "--coordinator HOST:PORT --processes N --process I, or --distributed "
                "instead of them under SLURM, Open MPI, Kubernetes or on a TPU pod"
            )
        assert self.coordinator is not None and self.processes is not None
        assert self.process is not None
        host, _, port = self.coordinator.rpartition(":")
        if (
            not host
            or not re.fullmatch("[0-9]{1,5}", port)
            or not 0 < int(port) <= MAXIMUM_PORT
        ):
            raise InputError(
                f"--coordinator is {shown(self.coordinator)}, expected the HOST:PORT "
                f"on which process 0 listens, with a port from 1 to {MAXIMUM_PORT:,}"
            )
        if self.process >= self.processes:
            raise InputError(
                f"--process is {self.process} of --processes {self.processes}, "
                "expected a number from 0 to one less than --processes"
            )
