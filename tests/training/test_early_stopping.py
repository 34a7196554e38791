"""A run that no longer improves stops with a reason, even after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.config.config_values import STOPPED_FILE
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.training import loop
from prompt_tuning.training.early_stopping import Patience
from prompt_tuning.training.member_checks import check_compatible
from tests.support.exhaustive import sample
from tests.support.small_runs import Killed, logged, tune

# Losses of the evaluations: the third is best, and the next two do not improve it.
LOSSES = {2: 5.0, 4: 4.0, 6: 3.0, 8: 3.0, 10: 3.5, 12: 1.0}
CHOICES: dict[str, Any] = {
    "Run.steps": 12,
    "Run.evaluate_every": 2,
    "Run.save_every": 1,
    "Run.keep_last": 1,
    "Run.early_stopping": 2,
}
REASON = "loss was best at step 6 (3.0000) and not better in 2 evaluations since"


@pytest.fixture(autouse=True)
def losses(monkeypatch) -> None:
    """Replaces the evaluator: its values depend only on the step."""
    measure = loop.Recorder._evaluate

    def evaluate(self, done, state):
        metrics = {"loss": LOSSES[done], "accuracy": float(done)}
        monkeypatch.setattr(Evaluator, "__call__", lambda *_: metrics)
        return measure(self, done, state)

    monkeypatch.setattr(loop.Recorder, "_evaluate", evaluate)


def stopped(directory: Path) -> dict:
    return json.loads((directory / STOPPED_FILE).read_text())


def test_a_run_stops_without_improvement_and_reports_why(files, tmp_path, capsys):
    assert tune(files, tmp_path / "run", **CHOICES) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"stopped after step 10 of 12: {REASON}" in printed
    assert "stopped early; the run is in" in printed
    assert stopped(tmp_path / "run") == {"step": 10, "reason": REASON}
    # The best and the newest are kept, and no step was taken after the stop.
    assert steps_in(tmp_path / "run" / FOLDER) == [6, 10]
    assert max(line["step"] for line in logged(tmp_path / "run")) == 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", sample(1, [3, 6, 7, 9, 10]))
def test_a_killed_run_stops_at_the_same_step_as_an_uninterrupted_run(
    step, files, tmp_path, monkeypatch
):
    record = loop._Loop._record

    def dying(self, at, *arguments):
        if at == step:
            raise Killed
        record(self, at, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Loop, "_record", dying)
        with pytest.raises(Killed):
            tune(files, tmp_path / "run", **CHOICES)
    assert tune(files, tmp_path / "run", **CHOICES) == 0
    assert stopped(tmp_path / "run") == {"step": 10, "reason": REASON}
    assert steps_in(tmp_path / "run" / FOLDER) == [6, 10]


def test_a_run_that_stopped_early_stays_stopped(files, tmp_path, capsys):
    assert tune(files, tmp_path / "run", **CHOICES) == 0
    (tmp_path / "run" / STOPPED_FILE).unlink()
    before = logged(tmp_path / "run")
    capsys.readouterr()
    assert tune(files, tmp_path / "run", **CHOICES) == 0
    assert "stopped after step 10 of 12" in " ".join(capsys.readouterr().out.split())
    assert stopped(tmp_path / "run") == {"step": 10, "reason": REASON}
    assert logged(tmp_path / "run") == before


@pytest.mark.parametrize("setting", ["Run.keep_best", "Run.early_stopping_metric"])
def test_a_rising_metric_to_maximize_does_not_stop_the_run(setting, files, tmp_path):
    rising: dict[str, Any] = CHOICES | {setting: "accuracy"}
    assert tune(files, tmp_path / "run", **rising) == 0
    assert not (tmp_path / "run" / STOPPED_FILE).exists()
    assert logged(tmp_path / "run")[-1]["step"] == 12


def test_patience_counts_evaluations_without_improvement():
    patience = Patience("accuracy", "max", 2)
    for step, value in enumerate([0.5, 0.5, 0.7, 0.6], start=1):
        patience = patience.observe(step, {"accuracy": value})
        assert patience.reason is None
    assert patience.observe(5, {}) == patience
    patience = patience.observe(6, {"accuracy": 0.7})
    assert (patience.best, patience.best_step) == (0.7, 3)
    assert patience.reason is not None and "step 3" in patience.reason


def test_members_of_a_sweep_run_all_their_steps(files, tmp_path):
    arguments = files.arguments(tmp_path / "sweep", **CHOICES)
    bindings = [line.removeprefix("--gin.") for line in arguments[1:]]
    run = read_run(["runs/first_prompt.gin"], bindings)
    with pytest.raises(InputError, match="early_stopping is 2, but members of a sweep"):
        check_compatible({"one": run, "other": run})


@pytest.mark.parametrize(
    "name", ["Run.keep_best", "Run.evaluation", "Run.evaluate_every"]
)
def test_early_stopping_needs_a_metric(name, files, tmp_path, capsys):
    nothing: dict[str, Any] = CHOICES | {
        name: 0 if name == "Run.evaluate_every" else None
    }
    if name == "Run.evaluation":
        nothing["EVALUATION_FILES"] = str(files.held_out)
    assert tune(files, tmp_path / "run", **nothing) == 2
    message = capsys.readouterr().err
    assert "Run.early_stopping is 2 and" in message and name in message
    assert Run.__dataclass_fields__["early_stopping"].default == 0
