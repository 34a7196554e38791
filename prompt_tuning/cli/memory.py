"""`prompt-tuning memory`: reports the memory that a run needs, and whether it fits."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.byte_sizes import format_size, parse_size
from prompt_tuning.cli.run_options import add_run_options, check_options
from prompt_tuning.cli.shared_options import add_config_option, check_folder
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.stores import PARAMETER_DTYPES
from prompt_tuning.core.rematerialization import SavedActivations
from prompt_tuning.core.status_line import status

if TYPE_CHECKING:
    from prompt_tuning.core.rematerialization import Rematerialization
    from prompt_tuning.training.memory_estimate import (
        ArgumentBytes,
        MemoryEstimate,
        StepBytes,
    )

HELP = "report the device memory that a run needs, and whether it fits"
USES_JAX = True
DESCRIPTION = (
    "Compile the step of a run for its largest batch, under several rematerialization "
    "policies, the configured one first, and print what each device has to hold: "
    "frozen and trained parameters, optimizer state, and activations as the compiler "
    "counts them. Nothing is run unless --time is given. The exit code is 1 if the run "
    "does not fit as it is configured."
)
USAGE = """
  prompt-tuning memory --model PATH --train FILE [OPTION ...]
  prompt-tuning memory CONFIG [CONFIG ...] [--gin.NAME=VALUE ...] [OPTION ...]"""
OFFLOAD = "+offload"
KINDS: tuple[SavedActivations, ...] = ("none", "dots", "attention", "nothing")
POLICIES: dict[str, tuple[SavedActivations, bool]] = {
    f"{kind}{OFFLOAD * offloads}": (kind, offloads)
    for offloads in (False, True)
    for kind in KINDS
}
"""Saved activations, and whether they are offloaded, by policy name."""
SHOWN = (*KINDS, f"nothing{OFFLOAD}")
COLUMNS = ("activations", "host memory", "total", "fits")
UNUSED = "memory"
"""Placeholder for the run directory, which is neither read nor written."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.usage = USAGE
    add_config_option(parser)
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="CONFIG",
        help="gin files, as with --gin_file; the config of a run is "
        "DIRECTORY/config.gin",
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="memory of each device, such as 80GB or 16GiB (default: what the device "
        "reports, and on a CPU the machine's)",
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        action="append",
        choices=POLICIES,
        help="show only the configured policy and this one; may be repeated "
        f"(default: {', '.join(SHOWN)})",
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help="also read the model and time steps under each policy",
    )
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="instead describe how the stages of a pipeline share a step: their "
        "blocks, their micro-batches in memory, and the timeline",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="with --pipeline, also draw the timeline as SVG",
    )
    add_run_options(parser)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    options.gin_file = [*options.gin_file, *options.configs]
    check_picture(options)
    check_options(options, trains=True)


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 1 if the run does not fit as it is configured."""
    from rich.console import Console

    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.cli.pipeline_report import print_pipeline
    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.training.memory_estimate import MemoryEstimate, StepTimer

    limit = None if options.limit is None else parse_size(options.limit)
    run = read_run(options, directory=UNUSED, trains=True)
    if options.pipeline:
        print_pipeline(run, options.picture)
        return 0
    estimate = MemoryEstimate.open(run)
    limit = limit or device_limit(estimate.devices)
    console = Console()
    held = estimate.argument_bytes()
    print_lines(console, *describe(estimate, held, limit))
    timer = StepTimer(estimate) if options.time else None
    heading = table_row("policy", *COLUMNS, *["step"] * options.time)
    print_lines(console, "", heading.replace("│", "┃"))
    totals = []
    for name, policy in policies_to_show(estimate, options.policies or SHOWN):
        with status(f"compiling the step with policy {name.removesuffix(' *')}"):
            needed = estimate.step_bytes(policy)
            row = cells(needed, limit)
            if timer is not None:
                row.append(f"{1000 * timer.seconds(policy):,.0f} ms")
        print_lines(console, table_row(name, *row))
        totals.append(needed.total)
    print_lines(console, "* as the run is configured")
    if estimate.devices == 1:
        rest = totals[0] - held.frozen
        print_lines(console, *describe_types(estimate, rest, limit))
    # The configured policy comes first.
    return 0 if limit is None or totals[0] <= limit else 1


def check_picture(options: argparse.Namespace) -> None:
    """Checks that a picture has a timeline to show and an existing folder."""
    if options.picture is None:
        return
    if not options.pipeline:
        raise InputError("--picture draws the timeline of --pipeline: give both")
    check_folder("--picture", options.picture)


def table_row(name: str, *cells: str) -> str:
    """Formats a row with a fixed width."""
    return " │ ".join([f"│ {name:<20}", *(f"{cell:>11}" for cell in cells)]) + " │"


def policies_to_show(
    estimate: "MemoryEstimate", names: Sequence[str]
) -> "list[tuple[str, Rematerialization | None]]":
    """Returns the policies by name; the configured one comes first, as None."""
    from prompt_tuning.core.rematerialization import Rematerialization

    config = estimate.run_plan.model.config
    configured = policy_name(config.rematerialization)
    if config.encoder_rematerialization is not None:
        encoder = policy_name(config.encoder_rematerialization)
        configured = f"{configured}; encoder {encoder}"
    policies: list[tuple[str, Rematerialization | None]] = [(f"{configured} *", None)]
    for name in names:
        if name != configured:
            kind, offload = POLICIES[name]
            policies.append((name, Rematerialization(policy=kind, offload=offload)))
    return policies


def policy_name(policy: "Rematerialization") -> str:
    """Describes a policy and its settings in a few words."""
    words = policy.policy + (OFFLOAD if policy.offload else "")
    if policy.names:
        words += f" {', '.join(policy.names)}"
    if policy.every > 1:
        words += f", every {policy.every} blocks"
    if policy.ranges:
        words += f", {len(policy.ranges)} ranges of blocks differ"
    if policy.skipped_blocks:
        words += f", without {policy.skip_first} first and {policy.skip_last} last"
    return words


def describe(
    estimate: "MemoryEstimate", held: "ArgumentBytes", limit: int | None
) -> list[str]:
    """Describes the batch and everything that does not depend on the policy."""
    import jax

    platform = jax.devices()[0].platform
    devices = "one device" if estimate.devices == 1 else f"{estimate.devices} devices"
    available = "unknown" if limit is None else format_size(limit)
    return [
        f"largest batch: {estimate.shape}; step compiled for {devices} ({platform})",
        f"frozen parameters   {format_size(held.frozen):>10}",
        *(
            f"  {count} stacks of kernels as published, in {store}"
            for store, count in estimate.published.items()
        ),
        f"trained parameters  {format_size(held.trained):>10}",
        f"optimizer state     {format_size(held.optimizer):>10}",
        f"batch               {format_size(held.batch):>10}",
        f"memory of a device  {available:>10}",
    ]


def describe_types(
    estimate: "MemoryEstimate", rest: int, limit: int | None
) -> list[str]:
    """Lists the memory that the run needs with each dtype of frozen weights."""
    lines, largest = ["", "--parameter_dtype, as configured otherwise:"], None
    if estimate.published:
        lines[1] = "instead of the folder's own types, --parameter_dtype:"
    for dtype in PARAMETER_DTYPES:
        total = estimate.frozen_bytes(dtype) + rest
        fits = "" if limit is None else "fits" if total <= limit else "does not fit"
        lines.append(f"  {dtype:<10}{format_size(total):>12}  {fits}".rstrip())
        if limit is not None and largest is None and total <= limit:
            largest = dtype
    if largest is not None:
        lines.append(f"the widest that fits is {largest}")
    return lines


def cells(needed: "StepBytes", limit: int | None) -> list[str]:
    """Returns a row of the table, without its name and time."""
    fits = "?"
    if limit is not None:
        fits = f"{needed.total / limit:.0%}" if needed.total <= limit else "no"
    return [
        format_size(needed.activations),
        format_size(needed.host),
        format_size(needed.total),
        fits,
    ]


def device_limit(devices: int) -> int | None:
    """Returns the memory that each of `devices` may use; CPUs share the machine's."""
    import jax

    device = jax.local_devices()[0]
    reported = (device.memory_stats() or {}).get("bytes_limit")
    if reported:
        return int(reported)
    if device.platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
