"""The benchmark of GPUs, with tiny shapes and without a GPU."""

import json
import subprocess
import sys

import pytest

from scripts.bench.gpu_shapes import CASES

ROOT = __file__.rpartition("/tests/")[0]


def run(folder, *words):
    """Runs the benchmark; returns its exit code, its JSON and its Markdown."""
    command = [sys.executable, "-m", "scripts.bench.gpu", *words, "--smoke"]
    out = folder / "gpu"
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    results = json.loads(out.with_suffix(".json").read_text())
    return done.returncode, results, out.with_suffix(".md").read_text()


@pytest.mark.exhaustive
def test_a_part_is_measured_and_written(tmp_path):
    code, results, page = run(tmp_path, "llama_prefix:flash")
    assert code == 0
    part = results["parts"]["llama_prefix:flash"]
    assert part["attention"] == "flash (plain JAX)"
    assert part["seconds"] > 0 and part["steps"] == 3
    # An untrained model guesses among 64 tokens: log 64 nats, more by its confidence.
    assert 3 < part["losses"][0] < 8
    assert "| flash (plain JAX) |" in page


@pytest.mark.exhaustive
def test_decoding_is_measured_for_one_row_and_for_many(tmp_path):
    code, results, page = run(tmp_path, "decode:bfloat16")
    assert code == 0 and not results["failed"]
    rows = results["parts"]["decode:bfloat16"]["rows"]
    assert list(rows) == ["1", "2"]
    assert "## Decoding behind a soft prompt" in page


@pytest.mark.exhaustive
def test_streamed_weights_are_compared_with_weights_on_the_device(tmp_path):
    code, results, _ = run(tmp_path, "streaming")
    assert code == 0 and not results["failed"]
    places = results["parts"]["streaming"]["by_location"]
    assert places["streamed"]["losses"] == pytest.approx(places["device"]["losses"])
    assert places["streamed"]["resident"] < places["device"]["resident"]


def test_without_time_every_part_is_skipped_with_the_reason(tmp_path):
    code, results, page = run(tmp_path, "--minutes", "0")
    assert code == 1  # nothing was checked
    assert not results["parts"]
    assert set(results["failed"].values()) == {"out of time: 0 s left"}
    assert "| checks | out of time: 0 s left |" in page


def test_flops_are_four_for_each_frozen_weight_and_position():
    """Llama 3.1 8B has 8.03e9 parameters, of which two tables have 0.525e9 each."""
    case = CASES["llama_lora"]
    positions = case.rows * case.length
    attention = 12 * 4096 * 32 * positions * case.length / 2
    head = 4 * 0.525e9 * case.rows * case.learned
    expected = 4 * (8.03e9 - 2 * 0.525e9) * positions + attention + head
    assert abs(case.flops() / expected - 1) < 0.01
