"""`prompt-tuning runs` lists run directories from their configs and logs."""

import json

import pytest

from prompt_tuning.cli import runs
from prompt_tuning.cli.main import main

CONFIG = """
MODEL = 'folder/model'
Run.model = @Pretrained()
Pretrained.checkpoint = %MODEL
Run.steps = 40
Run.keep_best = ('label_accuracy', 'max')
"""
LOG = [
    {"step": 10, "loss": 2.0},
    {"step": 10, "evaluation/label_accuracy": 0.75},
    {"step": 20, "loss": 1.0},
    {"step": 20, "evaluation/label_accuracy": 0.5},
]


@pytest.fixture
def folder(tmp_path):
    for name, lines, config in (
        ("prompt", LOG, f"{CONFIG}Run.prompt = @SoftPrompt\n"),
        ("sweep/member", LOG[:1], f"{CONFIG}Run.adapters = [@LoRA(), @IA3()]\n"),
        ("damaged", [], "Run.steps ="),
    ):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "config.gin").write_text(config)
        log = "".join(f"{json.dumps(line)}\n" for line in lines)
        (directory / "metrics.jsonl").write_text(log)
    return tmp_path / "runs"


def test_a_run_is_described_by_its_config_and_log(folder):
    assert runs.describe(folder / "prompt") == (
        "folder/model",
        "SoftPrompt",
        "20 of 40",
        "label_accuracy 0.75 at step 10",
    )
    *_, trained, steps, best = runs.describe(folder / "sweep/member")
    assert (trained, steps) == ("LoRA, IA3", "10 of 40")
    assert best == "training loss 2 at step 10"


def test_a_repeated_step_has_its_newest_value(folder):
    """A run that continues with another metric measures its checkpoints again."""
    again = {"step": 10, "evaluation/label_accuracy": 0.25}
    with (folder / "prompt" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(again) + "\n")
    *_, best = runs.describe(folder / "prompt")
    assert best == "label_accuracy 0.5 at step 20"


@pytest.mark.parametrize(
    ("lines", "metric", "best"),
    [
        ("", None, "loss 1 at step 20"),
        ("Evaluation.labels = ['a', 'b']", None, "label_accuracy 0.5 at step 20"),
        ("Run.keep_best = 'label_accuracy'", None, "label_accuracy 0.5 at step 20"),
        ("Run.keep_best = ('loss', 'min')", None, "loss 1 at step 20"),
        ("Evaluation.labels = ['a', 'b']", "loss", "loss 1 at step 20"),
        ("", "bleu", "bleu was not measured"),
    ],
)
def test_the_metric_is_the_runs_or_the_one_asked_for(lines, metric, best, tmp_path):
    log = [
        {"step": 10, "evaluation/loss": 2.0, "evaluation/label_accuracy": 0.25},
        {"step": 20, "evaluation/loss": 1.0, "evaluation/label_accuracy": 0.5},
        {"step": 30, "evaluation/loss": 1.5, "evaluation/label_accuracy": 0.5},
    ]
    (tmp_path / "config.gin").write_text(
        f"{CONFIG}Run.keep_best = 'auto'\nRun.evaluation = @Evaluation()\n{lines}\n"
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))
    assert runs.describe(tmp_path, metric)[-1] == best


def test_members_of_sweeps_and_damaged_runs_are_listed(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    assert main(["runs"]) == 0
    # Long cells take several lines.
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("│ r")]
    assert [line.split()[1] for line in lines] == [
        "runs/damaged",
        "runs/prompt",
        "runs/sweep/member",
    ]
    assert "cannot be read: the config runs/damaged/config.gin" in lines[0]


def test_folders_without_runs_are_refused(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "no folder has a config.gin" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
