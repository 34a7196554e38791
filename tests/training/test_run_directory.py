"""Identity and ownership of run directories."""

import pytest

from prompt_tuning.config.config_values import config_values
from prompt_tuning.core.errors import InputError
from prompt_tuning.training.metrics_log import MetricsLog
from prompt_tuning.training.run_directory import (
    CONFIG_FILE,
    check_owner,
    claim,
    hold_run,
)
from tests.support.crash_states import recorded
from tests.support.small_runs import tune

CONFIG = """
# Parameters for Run:
Run.mesh = None
Run.steps = 10
Pretrained.checkpoint = 'model'
Pretrained.weights = 'device'
Run.directory = 'here'
"""


def changed(*lines: str) -> str:
    """Returns the config with some lines replaced by lines for the same name."""
    names = [line.partition(" = ")[0] for line in lines]
    unchanged = [
        line for line in CONFIG.splitlines() if line.partition(" = ")[0] not in names
    ]
    return "\n".join([*unchanged, *lines])


def test_a_run_continues_with_any_location_of_the_weights(tmp_path):
    claim(tmp_path / "run", CONFIG, "the model", {})
    elsewhere = changed(
        *("Run.mesh = @MeshShape()", "MeshShape.tensor = 2", "AxisRules.rules = ()"),
        *("Pretrained.weights = 'streamed'", "Run.checkpoint_form = 'orbax'"),
        *("encoder/Rematerialization.policy = 'dots'", "Run.directory = 'there'"),
    )
    claim(tmp_path / "run", elsewhere, "the model", {})
    by_macro = changed("TENSOR = 4", "MeshShape.tensor = %TENSOR")
    claim(tmp_path / "run", by_macro, "the model", {})
    long = changed(
        "AxisRules.rules = \\", "    [('rank', 'tensor'),", "     ('rank', None)]"
    )
    claim(tmp_path / "run", long, "the model", {})
    config = (tmp_path / "run" / CONFIG_FILE).read_text()
    assert config_values(config) == config_values(CONFIG)


@pytest.mark.parametrize(
    "line",
    [
        *("Run.seed = 20", "Pretrained.checkpoint = 'other'", "MeshShapes.x = 2"),
        *("TENSOR = 2", "Run.data = %MeshShape.tensor"),
    ],
)
def test_another_run_is_refused_with_what_differs(line, tmp_path):
    claim(tmp_path / "run", CONFIG, "the model", {})
    with pytest.raises(InputError, match="another config") as problem:
        claim(tmp_path / "run", changed(line), "the model", {})
    name, _, value = line.partition(" = ")
    was = "'model'" if name == "Pretrained.checkpoint" else "not set"
    assert f"{name} = {was}, now {value}" in str(problem.value)


def test_a_second_command_in_a_run_directory_is_refused(files, tmp_path, capsys):
    run = tmp_path / "run"
    with hold_run(run):
        before = sorted(path.name for path in run.iterdir())
        assert tune(files, run) == 2
        assert sorted(path.name for path in run.iterdir()) == before
    message = capsys.readouterr().err
    assert f"run directory {run} is being written by process" in message
    assert len(message.splitlines()) == 1


def test_a_directory_whose_run_cannot_be_opened_is_not_created(files, tmp_path):
    assert tune(files, tmp_path / "a" / "run", TRAIN_FILES="missing.jsonl") == 2
    assert not any(tmp_path.iterdir())


def test_lines_are_on_the_disk_once_the_log_is_synced(tmp_path):
    """The same holds after it was rewritten, as by a resumed run."""

    def log() -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 9}\n')
        written = MetricsLog(tmp_path, after_step=1)
        written.write(2, {"loss": 1.0})
        written.sync()
        (tmp_path / "checkpoint").mkdir()
        written.close()

    states = recorded(tmp_path, log, ("tensorboard",)).power_cut_states()
    with_checkpoint = [state for state in states if "checkpoint" in state]
    assert with_checkpoint
    for state in with_checkpoint:
        assert state["metrics.jsonl"] == b'{"step": 1}\n{"step": 2, "loss": 1.0}\n'


def test_a_config_of_spaces_is_compared_in_linear_time(tmp_path):
    """A megabyte of spaces would take hours in quadratic time."""
    (tmp_path / "config.gin").write_text(" " * 1_000_000 + "x")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="another config") as refused:
        check_owner(tmp_path, "Run.steps = 3\n", "model")
    assert len(str(refused.value)) < 2000


def test_a_config_that_is_too_large(tmp_path):
    (tmp_path / "config.gin").write_text("#" * (2**20 + 1))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="1,048,577 bytes, expected at most 1,048,576"):
        check_owner(tmp_path, "Run.steps = 3\n", "model")
