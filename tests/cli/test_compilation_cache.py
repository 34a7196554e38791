"""Compiled programs outlive the process that compiled them."""

import os
import re
import subprocess
import sys

import jax
import pytest

from prompt_tuning.cli.main import set_up_process
from tests.support.small_runs import COMPILATION_CACHE

MISS = re.compile(r"PERSISTENT COMPILATION CACHE MISS for '([^']*)'")
HIT = re.compile(r"Persistent compilation cache hit for '([^']*)'")


@pytest.mark.exhaustive
def test_a_second_process_compiles_nothing(files, tmp_path):
    without_cache = {k: v for k, v in os.environ.items() if k not in COMPILATION_CACHE}
    cache = tmp_path / "cache"
    logged = {"JAX_LOG_COMPILES": "1", "JAX_EXPLAIN_CACHE_MISSES": "1"}
    environment = without_cache | logged | {"XDG_CACHE_HOME": str(cache)}

    def train(run: str) -> str:
        command = [sys.executable, "-m", "prompt_tuning", "train"]
        done = subprocess.run(
            [*command, *files.arguments(tmp_path / run, Run__steps=1)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stderr

    assert "jit_train_step" in MISS.findall(train("first"))
    assert any(cache.rglob("jit_train_step*"))
    again = train("second")
    assert MISS.findall(again) == []
    assert "jit_train_step" in HIT.findall(again)


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_a_configured_cache_directory_takes_precedence(chosen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    try:
        jax.config.update(name, chosen)
        set_up_process()
        expected = chosen or str(tmp_path / "prompt_tuning" / "jax")
        assert jax.config.values[name] == expected
    finally:
        jax.config.update(name, before)
