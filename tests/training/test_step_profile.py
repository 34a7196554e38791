"""`train --profile`, a trace of three steps."""

import gzip
import json

import pytest

from prompt_tuning.cli.main import main


@pytest.mark.slow
def test_three_steps_and_their_stages_are_traced(files, tmp_path):
    given = [*files.arguments(tmp_path / "run"), "--profile", str(tmp_path / "trace")]
    streamed = "--gin.Pretrained.weights='streamed'"
    assert main(["train", *given, streamed]) == 0
    (file,) = (tmp_path / "trace").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == "train"]
    # The first two compile.
    assert sorted(int(event["args"]["step_num"]) for event in steps) == [3, 4, 5]
    names = [event.get("name") for event in events]
    for name in ("forward", "backward", "gradient"):
        assert names.count(name) == 3
    # The model has one layer, which both passes read.
    assert names.count("read layer") == names.count("compute layer") == 6
    assert "record metrics" in names
