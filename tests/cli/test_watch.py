"""`watch`, which follows a run by its files."""

import json

import pytest

from prompt_tuning.cli import watch
from prompt_tuning.cli.main import main
from prompt_tuning.report.terminal_curve import draw_curve


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps that has taken 20 of them."""
    (tmp_path / "config.gin").write_text("STEPS = 40\nRun.steps = %STEPS\n")
    lines = [{"step": step, "loss": 1 / step} for step in (5, 10, 15, 20)]
    lines += [{"step": step, "evaluation/loss": 2.0} for step in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(x)}\n" for x in lines)
    )
    return tmp_path


def test_a_run_in_progress_is_shown_once_without_a_terminal(run, capsys):
    answers = [
        {"step": 20, "prompt": "a=", "completion": "A\x1b[2J", "reward": 0.5},
        {"step": 20, "prompt": "b=", "completion": "B", "reward": 1.0},
    ]
    text = "".join(f"{json.dumps(x)}\n" for x in answers)
    (run / "rollouts.jsonl").write_text(f'{text}{{"step": 20, "pro')
    assert main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 20 of 40" in out and "finished" not in out
    assert "loss: 0.05 at step 20" in out and "evaluation/loss: 2 at step 20" in out
    assert "reward 1.0: 'b=' -> 'B'" in out
    assert "\x1b" not in out


def test_the_end_of_a_run_is_told(run, capsys):
    (run / "stopped.json").write_text(json.dumps({"step": 20, "reason": "no gain"}))
    view = watch._View(run)
    view.look()
    assert view.ended
    assert main(["watch", str(run)]) == 0
    assert "step 20 of 40, stopped: no gain" in capsys.readouterr().out


def test_what_is_not_a_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_a_curve_keeps_a_peak_of_one_step():
    values = [0.0] * 1000
    values[617] = 1.0
    top, *_, bottom, steps = draw_curve(range(1000), values, 42, 5)
    assert [i for i, dot in enumerate(top) if "\u2800" < dot <= "\u28ff"] == [27]
    assert top.startswith("1 │") and bottom.startswith("0 │")
    assert (len(top), steps.split()) == (42, ["0", "999"])
