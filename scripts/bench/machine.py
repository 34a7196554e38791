"""Describes the machine, the versions and the settings of a measurement."""

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.data.preparation.worker_pool import available_cores
from scripts.bench.steps import Settings
from scripts.bench.workers import Worker

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_", "sve")
"""Instruction sets that decide the rate of products, or beginnings of their names."""

LIBRARIES = {"xla": "XLA", "numpy": "NumPy", "torch": "torch"}


def measure_rates(settings: Settings) -> dict[str, Any]:
    """Measures the rates of products and of memory in a process; see `rates`."""
    settings.say("[bold]the machine[/]: rates of products and of memory")
    command = [sys.executable, "-m", "scripts.bench.rates", settings.peft_python]
    with Worker("the machine's rates", command) as worker:
        return worker.ask("measure", rounds=settings.ideal_rounds)


def describe_machine(
    settings: Settings, versions: Mapping[str, str], rates: Mapping[str, Any] | None
) -> dict[str, str]:
    """Describes the machine, the versions and the settings."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    packages = installed | dict(versions)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "instruction sets": ", ".join(instruction_sets()) or "unknown",
        **({} if rates is None else describe_rates(rates)),
        "cores": str(available_cores()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{k} {v}" for k, v in sorted(packages.items())),
        "measured": f"{settings.steps} turns of each side, after {settings.warm_up} "
        "turns of warm-up and 3 turns that compare the losses, float32"
        + (f", {settings.devices} devices" if settings.devices > 1 else ""),
    }


def describe_rates(rates: Mapping[str, Any]) -> dict[str, str]:
    """Describes the measured rates: large and batched products, and memory."""
    kinds = {"large products": "plain", "batched products": "batched"}
    memory = rates["memory_bytes_per_second"]
    return {
        **{name: _by_library(rates, kind) for name, kind in kinds.items()},
        "memory traffic": f"{memory / 1e9:,.1f} GB/s",
    }


def _by_library(rates: Mapping[str, Any], kind: str) -> str:
    speeds = {
        title: rates["libraries"][library][kind]["flops_per_second"] / 1e9
        for library, title in LIBRARIES.items()
        if library in rates["libraries"]
    }
    return ", ".join(f"{name} {x:,.0f}" for name, x in speeds.items()) + " GFLOP/s"


def caption(machine: Mapping[str, str]) -> str:
    """Returns the line below every table: the processor and its rates."""
    names = ("processor", "instruction sets", "large products", "batched products")
    known = [(name, machine[name]) for name in names if name in machine]
    return "; ".join(
        value if name == "processor" else f"{name} {value}" for name, value in known
    )


def processor() -> str:
    """Returns the processor's model, from the kernel if possible."""
    return _processor_line("model name") or platform.processor() or "unknown"


def instruction_sets() -> list[str]:
    """Returns the processor's instruction sets that matter for products."""
    flags = (_processor_line("flags") or _processor_line("Features") or "").split()
    return [flag for flag in sorted(set(flags)) if flag.startswith(INSTRUCTION_SETS)]


def _processor_line(name: str) -> str | None:
    """Returns a value of the kernel's description of the first processor."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None
