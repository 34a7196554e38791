"""Compiled programs are kept between test runs, in a folder that git ignores."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Nearly all of the time that tests of tiny models take is compiling, and on a CPU these
# take more than half off it. XLA rewrites the program as ever, and its matrix products
# are as ever; only the machine code around them is slower.
QUICK = " ".join(
    (
        "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE",
        # XLA's check of its own rewrites.
        "--xla_disable_hlo_passes=hlo-verifier",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # Not in as many threads as there are parts of a program: each has a preamble.
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)


def _start_quickly() -> None:
    """Sets the flags before JAX reads them, if XLA knows them: else JAX would end."""
    given = os.environ.get("XLA_FLAGS", "")
    if QUICK in given:  # by the process that started this one
        return
    flags = f"{given} {QUICK}".strip()
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    known = subprocess.run(
        asked, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    )
    if known.returncode == 0:
        os.environ["XLA_FLAGS"] = flags


_start_quickly()

import jax  # noqa: E402

# To each of several processes its own: JAX may read what another is still writing.
CACHE = Path(__file__).parents[1] / ".jax_cache"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update("jax_compilation_cache_dir", str(CACHE / WORKER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Meshes of up to so many are tested; whatever names none runs on the first.
jax.config.update("jax_num_cpu_devices", 8)


# Tracing makes and drops so many objects that the collector would take a tenth of the
# time, mostly to look again at what was imported and stays.
gc.set_threshold(20_000, 10, 10)


LONGEST = (
    "test_methods",
    "test_processes",
    "test_rematerialization",
    "test_sweep_step",
    "test_curves",
    "test_resume",
    "test_streamed_step",
    "test_objective_steps",
)
"""Files that two processes begin with, so that at the end none has one of them left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; the others stay in order."""
    places = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Lets the collector pass over what all tests together have imported."""
    gc.collect()
    gc.freeze()


MAPPED = Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drops the compiled programs after a file of tests, once they are many.

    Each holds several memory mappings, of which Linux gives a process 65,530: past that
    XLA ends it with a segmentation fault. Other files use the small ones among them.
    """
    yield
    if not MAPPED.exists() or MAPPED.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
