"""A run continues with settings on which nothing that it has learned depends."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.checkpoints.run_store.checkpoint_selection import best_or_latest
from prompt_tuning.config.config_changes import compare_configs
from prompt_tuning.config.config_values import CONFIG_FILE
from tests.support.small_runs import UPPER, logged, trained_prompt, tune, write_pairs


def of_steps(steps: int) -> dict[str, Any]:
    """Returns the settings of a run at a constant rate."""
    rate = {"adafactor.learning_rate": 0.1, "Run.save_every": 2}
    return rate | {"Run.steps": steps}


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> Path:
    """A run of four steps."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    assert tune(files, directory, **of_steps(4)) == 0
    return directory


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def snapshot(directory: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.parent.name != "tensorboard"
    }


def arrays(directory: Path) -> dict[Path, bytes]:
    """Returns what is learned: the arrays of all checkpoints."""
    files = snapshot(directory / FOLDER).items()
    return {path: content for path, content in files if path.suffix != ".json"}


@pytest.mark.slow
def test_more_steps_end_with_the_bits_of_a_run_that_took_them_at_once(
    files, run, tmp_path, capsys
):
    assert tune(files, run, **of_steps(6)) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    whole = tmp_path / "whole"
    assert tune(files, whole, **of_steps(6)) == 0
    assert trained_prompt(run, 6) == trained_prompt(whole, 6)
    extended, at_once = (
        [line["loss"] for line in logged(directory) if "loss" in line]
        for directory in (run, whole)
    )
    assert extended == at_once
    assert "Run.steps = 6" in (run / CONFIG_FILE).read_text()


def test_fewer_steps_than_were_taken_are_refused(files, run, capsys):
    before = snapshot(run)
    assert tune(files, run, **of_steps(3)) == 2
    assert "has taken 4 steps, more than Run.steps = 3" in capsys.readouterr().err
    assert snapshot(run) == before


@pytest.mark.exhaustive
def test_another_evaluation_measures_the_checkpoints_again(
    files, run, tmp_path, capsys
):
    learned = arrays(run)
    others = write_pairs(tmp_path / "others.jsonl", UPPER[:3])
    changes: dict[str, Any] = {
        "EVALUATION_FILES": str(others),
        "Run.keep_best": ("accuracy", "max"),
    }
    choices: dict[str, Any] = of_steps(4) | {"Run.log_every": 3, "Run.keep_last": 3}
    assert tune(files, run, **(choices | changes)) == 0
    assert "measuring the checkpoints again" in capsys.readouterr().out
    assert arrays(run) == learned

    alone = tmp_path / "alone"
    every: dict[str, Any] = {"Run.evaluate_every": 2}
    assert tune(files, alone, **(choices | changes | every)) == 0
    for step in steps_in(run / FOLDER):
        states = [
            checkpoint_files.read_state(directory / FOLDER / f"checkpoint_{step}")
            for directory in (run, alone)
        ]
        assert states[0]["metrics"] == states[1]["metrics"]
    best = [best_or_latest(directory / FOLDER).name for directory in (run, alone)]
    assert best[0] == best[1]
    # The same command again changes nothing.
    before = snapshot(run)
    assert tune(files, run, **(choices | changes)) == 0
    assert "again" not in capsys.readouterr().out
    assert snapshot(run) == before


CONFIG = """
BATCH_SIZE = 8
DEV = 'dev.jsonl'
STEPS = 60
adamw.learning_rate = 0.1
evaluation/DataSource.batch_size = %BATCH_SIZE
evaluation/DataSource.files = %DEV
train/DataSource.batch_size = %BATCH_SIZE
train/DataSource.files = 'train.jsonl'
Evaluation.data = @evaluation/DataSource()
Evaluation.labels = None
ParameterGroup.optimizer = @adamw()
Run.data = @train/DataSource()
Run.evaluation = @Evaluation()
Run.groups = [@ParameterGroup()]
Run.keep_best = ('loss', 'min')
Run.log_every = 10
Run.steps = %STEPS
"""
SCHEDULE = CONFIG.replace("rate = 0.1", "rate = @warmup_linear_decay()") + (
    "warmup_linear_decay.steps = %STEPS\n"
)


@pytest.mark.parametrize(
    ("old", "new", "steps", "measurement", "selection"),
    [
        ("STEPS = 60", "STEPS = 90", True, False, False),
        ("every = 10", "every = 5", False, False, False),
        ("'dev.jsonl'", "'other.jsonl'", False, True, False),
        ("labels = None", "labels = ['a', 'b']", False, True, False),
        ("('loss', 'min')", "('accuracy', 'max')", False, False, True),
        ("('loss', 'min')", "'accuracy'", False, False, True),
        ("('loss', 'min')", "'auto'", False, False, False),
        ("@Evaluation()", "None", False, True, False),
    ],
)
def test_settings_that_may_change(old, new, steps, measurement, selection):
    changes = compare_configs(CONFIG, CONFIG.replace(old, new))
    assert changes.learning == ()
    assert (changes.steps, changes.measurement) == (steps, measurement)
    assert changes.selection == selection
    assert changes.any_allowed


def test_labels_change_the_metric_of_an_automatic_choice():
    config = CONFIG.replace("('loss', 'min')", "'auto'")
    labels = config.replace("labels = None", "labels = ['a', 'b']")
    assert compare_configs(config, labels).selection
    assert not compare_configs(config, config).selection


def test_settings_of_a_later_version_have_their_defaults():
    """A run of an earlier version did not have them."""
    later = CONFIG + "train/DataSource.joiner = ''\nRun.start_from = None\n"
    assert not compare_configs(CONFIG, later).any_allowed
    assert compare_configs(CONFIG, later).learning == ()
    other = later.replace("joiner = ''", "joiner = ' '")
    assert compare_configs(CONFIG, other).learning == (
        "train/DataSource.joiner = not set, now ' '",
    )


def test_a_setting_whose_default_has_changed_had_the_earlier_one():
    """The number of buckets was 8, and determines the batches."""
    now = CONFIG + "train/DataSource.buckets = None\n"
    assert compare_configs(CONFIG, now).learning == (
        "train/DataSource.buckets = 8, now None",
    )
    same = CONFIG + "train/DataSource.buckets = 8\n"
    assert not compare_configs(CONFIG, same).learning


@pytest.mark.parametrize(
    ("config", "old", "new", "line"),
    [
        (
            *(SCHEDULE, "STEPS = 60", "STEPS = 90"),
            "STEPS = 60, now 90 (used by Run.steps, warmup_linear_decay.steps)",
        ),
        (
            *(CONFIG, "SIZE = 8", "SIZE = 4"),
            "BATCH_SIZE = 8, now 4 (used by evaluation/DataSource.batch_size, "
            "train/DataSource.batch_size)",
        ),
        (
            *(CONFIG, "'train.jsonl'", "'other.jsonl'"),
            "train/DataSource.files = 'train.jsonl', now 'other.jsonl'",
        ),
        # The training data may be the held-out data.
        (
            CONFIG.replace("@train/", "@evaluation/"),
            *("'dev.jsonl'", "'other.jsonl'"),
            "DEV = 'dev.jsonl', now 'other.jsonl' (used by "
            "evaluation/DataSource.files)",
        ),
        (
            CONFIG.replace("@adamw()", "@optimizer_from_python()"),
            *("STEPS = 60", "STEPS = 90"),
            "Run.steps = 60, now 90: an optimizer from Python may have a schedule of "
            "the steps",
        ),
    ],
)
def test_settings_that_determine_what_is_learned(config, old, new, line):
    assert compare_configs(config, config.replace(old, new)).learning == (line,)
