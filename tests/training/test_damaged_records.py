"""Malformed records of a run or sweep: one message with file and field."""

import io
import json

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.training.continuation import read_key
from prompt_tuning.training.early_stopping import Patience
from prompt_tuning.training.metrics_log import MetricsLog, read_log
from prompt_tuning.training.run_directory import recorded_model
from prompt_tuning.training.stored_columns import read_stored, write_stored
from prompt_tuning.training.sweep.best_member import best_member
from prompt_tuning.training.sweep.sweep_run import read_diverged

SHAPES = ("[]", "null", "7", '"a"', "{", "", "\0", "[" * 100_000)


@pytest.mark.parametrize(
    "content", [*SHAPES, '{"frozen_model": 7}', '{"frozen_model": []}']
)
def test_the_identity_of_a_run_is_checked(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=r"run\.json"):
        recorded_model(tmp_path)
    (tmp_path / "run.json").write_text('{"frozen_model": "abc"}')
    assert recorded_model(tmp_path) == "abc"


@pytest.mark.parametrize(
    "content",
    [
        *SHAPES,
        "{}",
        '{"directory": 7}',
        '{"directory": ["a"]}',
        '{"directory": "../other"}',
        '{"directory": "/tmp"}',
        '{"directory": "link"}',
        '{"directory": "a\\u0000"}',
        json.dumps({"directory": "a" * 300}),
    ],
)
def test_the_best_member_of_a_sweep_is_in_its_directory(content, tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "link").symlink_to(tmp_path)
    (sweep / "best.json").write_text(content)
    with pytest.raises(InputError, match=r"best\.json"):
        best_member(sweep)
    (sweep / "best.json").write_text('{"directory": "a=1"}')
    assert best_member(sweep) == sweep / "a=1"


@pytest.mark.parametrize(
    "content",
    [*SHAPES, "{}", '{"step": "3", "reason": "a"}', '{"step": 3, "reason": 7}'],
)
def test_the_reason_of_a_dropped_member_is_checked(content, tmp_path):
    (tmp_path / "diverged.json").write_text(content)
    with pytest.raises(InputError, match=r"diverged\.json"):
        read_diverged(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "null",
        "7",
        "{}",
        '{"step": "3"}',
        '{"step": 2.5}',
        '{"step": true}',
        '{"step": -1}',
        json.dumps({"step": 10**300}),
        '{"step": 3, "loss": "low"}',
        '{"step": 3, "loss": [1]}',
        json.dumps({"step": 3, "loss": 10**400}),
    ],
)
def test_lines_of_a_log_are_checked(line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    content = '{"step": 1, "loss": 2.0}\n' + line + "\n"
    file.write_text(content)
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl"):
        read_log(file)
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl"):
        MetricsLog(tmp_path, 1)
    assert file.read_text() == content


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "\0\0", "\udcff", "[" * 100_000])
def test_a_truncated_line_is_dropped(line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "loss": NaN}\n'
    file.write_bytes(good.encode() + line.encode(errors="surrogateescape"))
    assert [values["step"] for values in read_log(file)] == [1]
    MetricsLog(tmp_path, 1).close()
    assert file.read_text() == good


@pytest.mark.parametrize("field", ["waited", "best", "best_step"])
def test_the_stored_patience_is_checked(field):
    patience = Patience("loss", "min", 3)
    stored = {"waited": 1, "best": 0.5, "best_step": 7}
    assert patience.with_state({"early_stopping": stored}).best == 0.5
    assert patience.with_state({}).best is None
    for wrong in ("1", [1], 10**400):
        extra = {"early_stopping": stored | {field: wrong}}
        with pytest.raises(InputError, match=field):
            patience.with_state(extra)
    with pytest.raises(InputError, match="early_stopping"):
        patience.with_state({"early_stopping": 7})


def test_the_stored_key_is_checked():
    key = jax.random.key(5)
    words = jax.random.key_data(key).tolist()
    read = read_key({"key": words}, key)
    assert jax.random.key_data(read).tolist() == words
    for wrong in ([1], [*words, 1], ["1", "2"], [1, 2**32], [1, -1], "12", None, 7):
        with pytest.raises(InputError, match="key"):
            read_key({"key": wrong}, key)


def test_a_damaged_reference_is_computed_again(tmp_path):
    file = tmp_path / "reference.npz"
    write_stored(file, "model", {b"a" * 16: {"values": np.ones(3, np.float32)}})
    content = file.read_bytes()
    assert list(read_stored(file, "model", ["values"])) == [b"a" * 16]
    for length in range(0, len(content), 9):
        file.write_bytes(content[:length])
        assert read_stored(file, "model", ["values"]) == {}
    with np.load(io.BytesIO(content)) as arrays:
        np.savez(file, **{**arrays, "values_sizes": np.array([4])})
    assert read_stored(file, "model", ["values"]) == {}
