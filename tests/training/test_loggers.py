"""Programs that get copies of a run's metrics, by the files that they write."""

# wandb and trackio are in extras of their own.
# pyright: reportMissingImports=false

import json
import struct

import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.training import loggers
from prompt_tuning.training.metrics_log import MetricsLog


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text("Run.seed = 3\n")
    return tmp_path / "run"


def write(run, name):
    """Writes a log of three steps, continued after the second, and one again."""
    for done, steps in ((0, (1, 2, 3)), (2, (2, 3))):
        log = MetricsLog(run, done, [name])
        for step in steps:
            log.write(step, {"loss": 1 / step, "evaluation/loss": float(step)})
        log.close()


def leveldb_records(content):
    """Yields the records of a LevelDB log without its header of 7 bytes."""
    position, whole = 0, b""
    while position + 7 <= len(content):
        left = 32768 - (position + 7) % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the only or the last part
            yield whole
            whole = b""


def test_wandb_gets_each_step_once_in_one_run(run, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(run, "wandb")
    found, ids, settings = [], set(), {}
    for file in sorted(run.glob("wandb/*run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                settings |= {x.key: x.value_json for x in record.run.config.update}
            for item in record.history.item:
                if item.key == "loss" or list(item.nested_key) == ["loss"]:
                    found.append(json.loads(item.value_json))
    assert sorted(found) == [1 / 3, 1 / 3, 0.5, 1.0]
    assert ids == {(run / "logger_run_id").read_text()}
    assert json.loads(settings["Run.seed"]) == "3"


def test_trackio_gets_each_step_once_in_one_run(run, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    write(run, "trackio")
    (name,) = SQLiteStorage.get_runs(loggers.PROJECT)
    logs = SQLiteStorage.get_logs(loggers.PROJECT, name)
    assert [(x["step"], x["loss"]) for x in logs if "loss" in x] == [
        *[(1, 1.0), (2, 0.5), (3, 1 / 3)],
        (3, 1 / 3),
    ]


def test_a_logger_without_its_package_is_refused_before_the_model_is_read(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "no_such_package")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    train = ["train", "--model", "bundled:skills-decoder", "--loggers", "wandb"]
    data = ["--train", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "run")]
    assert main([*train, *data]) == 2
    assert "pip install 'prompt-tuning[wandb]'" in capsys.readouterr().err
    assert main([*train[:-1], "mlflow", *data]) == 2
    assert "mlflow" in capsys.readouterr().err
