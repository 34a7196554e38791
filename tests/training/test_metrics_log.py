"""The log has one value of each metric and step, also where it was measured again."""

import json
import struct

import pytest

from prompt_tuning.training.metrics_log import METRICS_FILE, MetricsLog, read_log


def write_log(folder, lines):
    (folder / METRICS_FILE).write_text("".join(f"{json.dumps(x)}\n" for x in lines))


def measured(step, loss, accuracy):
    return {"step": step, "evaluation/loss": loss, "evaluation/accuracy": accuracy}


def test_a_step_that_was_measured_again_is_read_once(tmp_path):
    lines = [
        {"step": 40, "loss": 2.0},
        measured(40, 4.0, 0.1),
        measured(80, 3.0, 0.2),
        measured(120, 3.5, 0.3),
        measured(80, 3.25, 0.4),
    ]
    write_log(tmp_path, lines)
    assert read_log(tmp_path / METRICS_FILE) == [
        {"loss": 2.0, **measured(40, 4.0, 0.1)},
        measured(80, 3.25, 0.4),
        measured(120, 3.5, 0.3),
    ]


def test_values_of_another_evaluation_are_left_out(tmp_path):
    """They cannot be compared; the lines stay in the file."""
    write_log(tmp_path, [{"step": 40, "loss": 2.0}, measured(40, 4.0, 0.1)])
    log = MetricsLog(tmp_path, 40)
    log.forget_evaluations()
    log.write(80, {"evaluation/loss": 5.0})
    log.close()
    # Opening it again keeps the mark.
    MetricsLog(tmp_path, 80).close()
    file = tmp_path / METRICS_FILE
    assert read_log(file) == [
        {"step": 40, "loss": 2.0},
        {"step": 80, "evaluation/loss": 5.0},
    ]
    assert len(file.read_text().splitlines()) == 4


def test_tensorboard_gets_no_second_point_of_a_step_that_is_measured_again(tmp_path):
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    log = MetricsLog(tmp_path, 40)
    for step in (40, 80):
        log.write(step, {"evaluation/loss": 2.0})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, steps = file.read_bytes(), []
    while data:
        # Length, checksum, event, checksum.
        (size,) = struct.unpack("<Q", data[:8])
        event = events.Event.FromString(data[12 : 12 + size])
        steps += [event.step for _ in event.summary.value]
        data = data[16 + size :]
    assert steps == [80]
