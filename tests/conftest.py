"""Caches compiled programs between test runs, in a folder that git ignores."""

import gc
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.shared_data import SHARED

# Before torch and NumPy are imported. Threads of tiny operations mostly wait for each
# other, which made fifty steps of TRL take four times as long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("CHECK_TYPES"):
    from tests.support import type_checks

    type_checks.install()

# Tests of tiny models spend nearly all their time compiling, and on a CPU these flags
# save more than half of it. XLA's rewrites and matrix products stay the same; only the
# machine code around them is slower.
FLAGS = " ".join(
    (
        "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE",
        # XLA's verification of the rewrites.
        "--xla_disable_hlo_passes=hlo-verifier",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # One part per program, since each part has a preamble.
        "--xla_cpu_parallel_codegen_split_count=1",
        # On a busy machine a device of a mesh may wait for the others for longer than
        # the 40 seconds after which XLA ends the process.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
)


def _start_quickly() -> None:
    """Sets the flags before JAX reads them, if XLA knows them; others abort JAX."""
    given = os.environ.get("XLA_FLAGS", "")
    if FLAGS in given:  # set by the parent process
        return
    flags = f"{given} {FLAGS}".strip()
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    attempt = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    )
    if attempt.returncode == 0:
        os.environ["XLA_FLAGS"] = flags


_start_quickly()
# A path that does not exist may be the name of a model of the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402

from prompt_tuning.config.option_hints import as_option  # noqa: E402
from prompt_tuning.core.setting_hints import as_argument, speak_with  # noqa: E402

# Messages are tested as the command prints them.
speak_with(as_option)


@pytest.fixture
def python_words():
    """Lets messages name arguments, as in a process without the command."""
    speak_with(as_argument)
    yield
    speak_with(as_option)


# One per process, since JAX may read a file that another process is writing.
CACHE = Path(__file__).parents[1] / ".jax_cache"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update("jax_compilation_cache_dir", str(CACHE / WORKER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# The largest mesh in the tests; tests without a mesh run on the first device.
jax.config.update("jax_num_cpu_devices", 8)


# Tracing creates and drops so many objects that garbage collection would take a tenth
# of the time, mostly for imported objects that stay.
gc.set_threshold(20_000, 10, 10)


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that limits the time of a run."""
    parser.addoption(
        "--minutes", type=float, help="skip tests that have not begun by then"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test when the time of the run is over."""
    limit = item.config.getoption("minutes")
    if limit is not None and time.monotonic() - STARTED > 60 * limit:
        pytest.skip(f"--minutes {limit:g} are over")


NEEDS = {
    "torch": (
        importlib.util.find_spec("peft") is not None,
        "torch, transformers and PEFT are not installed",
    ),
    "released": (
        SHARED.is_dir(),
        f"{SHARED}, the folder of released files, does not exist",
    ),
}
"""Marks of tests: whether what they need is here, and a message where it is not."""
MISSING = {mark: reason for mark, (here, reason) in NEEDS.items() if not here}


def pytest_report_header() -> list[str]:
    """Returns a line for each mark whose tests cannot run here."""
    return [
        f"without the tests marked {mark}: {reason}" for mark, reason in MISSING.items()
    ]


LONGEST = (
    "test_documents",
    "test_families",
    "test_memories",
    "test_docstring_examples",
    "test_decoding_engine",
    "test_fuzz",
    "test_rollout_runs",
    "test_bench_peft",
    "test_published_stores",
    "test_study",
    "test_preference_runs",
    "test_methods",
    "test_processes",
    "test_class_heads_on_mesh",
    "test_api",
    "test_server",
    "test_distillation",
    "test_peft_logits",
    "test_peft_training",
    "test_rematerialization",
    "test_sweep_step",
    "test_curves",
    "test_resume",
    "test_example_teacher",
    "test_class_heads",
    "test_stored_targets",
    "test_streamed_step",
    "test_objective_steps",
    "test_sequence_classifiers",
)
"""Files that run first, so that two processes finish at about the same time."""


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out tests that cannot run here, and puts the longest files first."""
    kept, left_out = [], []
    for item in items:
        missing = any(map(item.get_closest_marker, MISSING))
        (left_out if missing else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    ranks = {name: index for index, name in enumerate(LONGEST)}
    items[:] = sorted(kept, key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    """Excludes the imported objects of all tests from garbage collection."""
    gc.collect()
    gc.freeze()


MAPPED = Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drops the compiled programs after a file of tests if there are many.

    Each program has several memory mappings. Linux limits a process to 65,530 mappings,
    and XLA crashes beyond that. Few programs are kept, since other files use them.
    """
    yield
    if not MAPPED.exists() or MAPPED.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _trace_replaced_code(request):
    """Traces steps anew in a test that may replace code, and after it."""
    replaces = "monkeypatch" in request.fixturenames
    if replaces:
        _forget_steps()
    yield
    if replaces:
        _forget_steps()


def _forget_steps() -> None:
    module = sys.modules.get("prompt_tuning.training.step")
    if module is not None:
        module._jit_of_equals.cache_clear()
