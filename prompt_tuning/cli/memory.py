"""The command `prompt-tuning memory`: what a run takes, and whether it fits.

What says which options there are imports nothing heavy, so that help is instant.
"""

import argparse
import os
import re
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.core.rematerialization import Rematerialization
    from prompt_tuning.training.memory_estimate import (
        ArgumentBytes,
        MemoryEstimate,
        StepBytes,
    )

DESCRIPTION = (
    "Compiles the step of a run for its largest batch, under several policies of "
    "rematerialisation, and prints what each device has to hold: frozen and trained "
    "parameters, optimiser state, and activations as the compiler counts them. Nothing "
    "is run unless --time is given. Exits with 1 if the run as it is configured does "
    "not fit."
)
OFFLOAD = "+offload"
KINDS = ("none", "dots", "attention", "nothing")
POLICIES = (*KINDS, *(f"{kind}{OFFLOAD}" for kind in KINDS))
SHOWN = (*KINDS, f"nothing{OFFLOAD}")
UNITS = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", 1)
    for binary in ("", "i")
}
UNUSED = "memory"
"""In the place of the run's directory, which is neither read nor written."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="CONFIG",
        help="gin files, as --gin_file; a run's own is DIRECTORY/config.gin",
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="memory of each device, such as 80GB or 16GiB; by default what the device "
        "says it has, and on a CPU the machine's",
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        action="append",
        choices=POLICIES,
        help="show this one alone, and the run's own; may be repeated. By default "
        f"{', '.join(SHOWN)}",
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help="also read the model, and time steps under each policy",
    )


def memory(options: argparse.Namespace) -> int:
    """Prints the table; 1 if the run does not fit as it is configured."""
    from rich.console import Console
    from rich.table import Table

    from prompt_tuning.config import gin_files
    from prompt_tuning.training.memory_estimate import MemoryEstimate, StepTimer

    given = None if options.limit is None else parse_size(options.limit)
    files = [*options.gin_file, *options.configs]
    prospect = MemoryEstimate.open(gin_files.read_run(files, options.bindings, UNUSED))
    limit = given or device_limit(prospect.devices)
    console = Console()
    for line in report(prospect, prospect.argument_bytes(), limit):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    timer = StepTimer(prospect) if options.time else None
    table = Table("policy", caption="* as the run is configured")
    columns = ["activations", "on the host", "in all", "fits"]
    for name in columns + ["step"] * options.time:
        table.add_column(name, justify="right")
    totals = []
    for name, how in rows(prospect, options.policies or SHOWN):
        needed = prospect.step_bytes(how)
        row = cells(needed, limit)
        if timer is not None:
            row.append(f"{1000 * timer.seconds(how):,.0f} ms")
        table.add_row(name, *row)
        totals.append(needed.total)
    console.print(table)
    # The run as it is configured comes first.
    return 0 if limit is None or totals[0] <= limit else 1


def rows(
    prospect: "MemoryEstimate", names: "tuple[str, ...] | list[str]"
) -> "list[tuple[str, Rematerialization | None]]":
    """The policies to show, by what they are called; the run's own first, as None."""
    from prompt_tuning.core.rematerialization import Rematerialization

    config = prospect.opened.model.config
    asked = config.rematerialization
    own = described(asked)
    if config.encoder_rematerialization is not None:
        own = f"{own}; encoder {described(config.encoder_rematerialization)}"
    found: list[tuple[str, Rematerialization | None]] = [(f"{own} *", None)]
    for name in names:
        if name != own:
            policy, offload = name.removesuffix(OFFLOAD), name.endswith(OFFLOAD)
            found.append((name, Rematerialization(policy=policy, offload=offload)))
    return found


def described(how: "Rematerialization") -> str:
    """A policy and what goes with it, in a few words."""
    words = how.policy + (OFFLOAD if how.offload else "")
    if how.names:
        words += f" {', '.join(how.names)}"
    if how.skipped_blocks:
        words += f", without {how.skip_first} first and {how.skip_last} last"
    return words


def report(
    prospect: "MemoryEstimate", held: "ArgumentBytes", limit: int | None
) -> list[str]:
    """What the table does not say, line by line."""
    import jax

    platform = jax.devices()[0].platform
    devices = "one device" if prospect.devices == 1 else f"{prospect.devices} devices"
    has = "unknown" if limit is None else size(limit)
    return [
        f"largest batch: {prospect.shape}; step compiled for {devices} ({platform})",
        f"frozen parameters   {size(held.frozen):>10}",
        f"trained parameters  {size(held.trained):>10}",
        f"optimiser state     {size(held.optimizer):>10}",
        f"batch               {size(held.batch):>10}",
        f"memory of a device  {has:>10}",
    ]


def cells(needed: "StepBytes", limit: int | None) -> list[str]:
    """A row of the table, after its name and before its time."""
    fits = "?"
    if limit is not None:
        fits = f"{needed.total / limit:.0%}" if needed.total <= limit else "no"
    return [
        size(needed.activations),
        size(needed.host),
        size(needed.total),
        fits,
    ]


def size(count: int) -> str:
    """Bytes, in the largest unit of which there is one."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        if count >= 1000**power:
            return f"{count / 1000**power:,.2f} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Bytes from a text such as 80GB (of 1000) or 16GiB (of 1024).

    Raises:
      InputError: with the units.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = found and {name.lower(): n for name, n in UNITS.items()}.get(
        found[2].lower()
    )
    if not found or not unit or not float(found[1]):
        raise InputError(
            f"--limit is {text!r}, expected a number above 0 with one of the units "
            f"{', '.join(filter(None, UNITS))}, such as 80GB"
        )
    return int(float(found[1]) * unit)


def device_limit(devices: int) -> int | None:
    """What a device says that it may use; a CPU's share of the machine's memory.

    Args:
      devices: that share the machine's memory, if they are a CPU's.
    """
    import jax

    device = jax.local_devices()[0]
    said = (device.memory_stats() or {}).get("bytes_limit")
    if said:
        return int(said)
    if device.platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
