"""Compiled programs are kept between test runs, in a folder that git ignores."""

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
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # Not in as many threads as there are parts of a program: each has a preamble.
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)


def _start_quickly() -> None:
    """Sets the flag before JAX reads it, where XLA knows it: else JAX would end."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
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


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drops a file's compiled programs once its tests are done.

    Each holds several memory mappings, of which Linux gives a process 65,530: past that
    XLA ends it with a segmentation fault.
    """
    yield
    jax.clear_caches()
