"""The length of a run in epochs, which are a number of steps of its data."""

import re

import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from tests.support.small_runs import UPPER, clean_process, files, logged, write_pairs

__all__ = ["clean_process", "files"]


@pytest.fixture
def words(files, tmp_path):
    """Arguments of a run over 32 examples, which are 4 batches."""
    chosen = ["--model", files.decoder, "--train", files.train, "--batch_size", 8]
    chosen += ["--prompt_length", 2, "--out", tmp_path / "run", "--gin.Run.log_every=2"]
    return [*map(str, chosen), "--gin.DataSource.buckets=1"]


def steps_in(config: str) -> set[int]:
    """Returns the numbers of steps of a config: of the run and of its schedule."""
    return {int(n) for n in re.findall(r"(?im)^(?:\S*\.)?steps = (\d+)$", config)}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--epochs=2"], 8),
        (["--epochs=0.3"], 2),  # 1.2, rounded up
        (["--epochs=0.1", "--batch_size=1"], 4),  # 3.2
        (["--gin.epochs=2"], 8),
        (["--epochs=3", "--accumulate=2"], 6),
        (["--epochs=3", "--schedule=linear"], 12),
        # All rows of 32 positions that hold several examples fit into a batch.
        (["--epochs=3", "--gin.DataSource.packing=True", "--batch_size=32"], 3),
    ],
)
def test_epochs_are_steps(options, steps, words, capsys):
    assert main(["train", *words, *options, "--print_config"]) == 0
    assert steps_in(capsys.readouterr().out) == {steps}


def test_members_of_a_sweep_and_configs_have_epochs(words, files, capsys):
    varied = ["--vary", "prompt_length=2,3", "--epochs=2", "--print_config"]
    assert main(["sweep", *words, *varied]) == 0
    printed = capsys.readouterr().out
    assert printed.count("# Member") == 2 and steps_in(printed) == {8}
    config = ["--gin_file=runs/first_prompt.gin", "--eval", str(files.held_out)]
    assert main(["train", *words, *config, "--epochs=4", "--print_config"]) == 0
    assert "\nSTEPS = 16\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--steps=3"],
        ["--gin.Run.steps=3"],
        ["--gin_file=runs/first_prompt.gin", "--gin.STEPS=3"],
    ],
)
def test_steps_and_epochs_contradict_each_other(options, words, capsys):
    assert main(["train", *words, "--epochs=2", *options]) == 2
    assert "--epochs and --steps both" in capsys.readouterr().err


def test_a_run_continues_to_more_epochs(words, tmp_path, capsys):
    assert main(["train", *words, "--epochs=0.5"]) == 0
    assert "32 training examples; 2 steps are 0.5 epochs" in capsys.readouterr().out
    assert main(["train", "--run", str(tmp_path / "run"), "--epochs=1"]) == 0
    assert "4 steps are 1 epochs" in capsys.readouterr().out
    lines = [(line["step"], line["epoch"]) for line in logged(tmp_path / "run")]
    assert lines == [(2, 0.5), (4, 1.0)]


def test_epochs_from_python_give_schedules_their_steps(files, capsys):
    tuned = pt.tune(
        files.decoder,
        pt.SoftPrompt(length=2),
        UPPER[:8],
        epochs=1.5,
        batch_size=4,
        learning_rate=pt.warmup_linear_decay(peak=0.1, warmup_steps=1),
    )
    assert tuned.result is not None and tuned.directory is not None
    assert (tuned.result.step, tuned.result.epochs) == (3, 1.5)
    config = (tuned.directory / "config.gin").read_text()
    assert steps_in(config.replace("warmup_steps", "")) == {3}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 training examples; 3 steps are 1.5 epochs"
    folder = tuned.directory / "numpy_checkpoints" / "checkpoint_3"
    # 2 vectors of 16 numbers of 4 bytes.
    assert lines[-2] == f"adapter: {folder} (32 parameters, 128 bytes)"
    assert "tuned.save(FOLDER) keeps it" in lines[-1]
    with pytest.raises(InputError, match="steps and epochs both"):
        pt.tune(files.decoder, pt.SoftPrompt(length=2), UPPER, steps=1, epochs=1)


def test_many_repetitions_of_few_examples_are_noted(words, tmp_path, capsys):
    data = write_pairs(tmp_path / "two.jsonl", UPPER[:2])
    assert main(["train", *words, "--train", str(data), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "2 training examples; 1,000 steps are 1,000 epochs" in printed
    assert "note: the run reads each example 1,000 times" in printed
