"""Compiled programs are kept between test runs, in a folder that git ignores."""

from pathlib import Path

import jax
import pytest

jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def quick_compile():
    """Halves the time of compiling, which is nearly all that tests of tiny models take.

    XLA rewrites the program as ever, and the numbers stay those of its matrix products;
    only the machine code around them is slower.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
