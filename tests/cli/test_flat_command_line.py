"""Commands whose options configure a run, as a user types them."""

import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config.config_table import choices_of
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.flat_option import GROUPS
from prompt_tuning.config.options import TABLE
from prompt_tuning.training.metrics_log import METRICS_FILE
from tests.support.small_runs import write_pairs

PAIRS = [("ab=", "AB"), ("cd=", "CD"), ("ef=", "EF"), ("gh=", "GH")]
START = "--model PATH --train train.jsonl"


@pytest.fixture
def words(files, tmp_path, monkeypatch) -> list[str]:
    """The model and the data of a run below the working directory."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "train data.jsonl", PAIRS)
    write_pairs(tmp_path / "dev.jsonl", PAIRS[:2])
    model = str(files.decoder)
    return ["--model", model, "--train", "train data.jsonl", "--eval", "dev.jsonl"]


def refused(capsys, *words: object) -> str:
    """Returns the message of a command that fails with code 2."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_config_of_a_model_leaves_the_rest_to_options(words, capsys):
    """It names the checkpoint, or the option does."""
    data = ["train", "--train", "train data.jsonl", "--print_config"]
    assert main([*data, "--gin_file=models/bundled_decoder.gin"]) == 0
    printed = capsys.readouterr().out
    assert "PROMPT_LENGTH = 20" in printed and "bundled:skills-decoder" in printed
    sized = ["--gin_file=models/t5_1_1_base.gin", "--steps=7"]
    assert main([*data, *sized, "--model=folder", "--tokenizer=file"]) == 0
    printed = capsys.readouterr().out
    assert "t5_config.width = 768" in printed and "Run.steps = 7" in printed
    assert "--model is missing" in refused(capsys, *data, *sized)
    assert "--train is missing" in refused(capsys, "train", *sized, "--model=folder")


@pytest.mark.slow
def test_a_run_without_a_config_is_trained_continued_and_used(words, tmp_path, capsys):
    options = ["--method", "lora", "--rank", "2", "--steps", "2", "--batch_size", "4"]
    options += [
        "--labels",
        "AB",
        "CD",
        "EF",
        "GH",
        "--learning_rate",
        "1e-3",
        "--out",
        "runs/x",
    ]
    assert main(["train", *words, *options]) == 0
    run = tmp_path / "runs/x"
    config = (run / CONFIG_FILE).read_text()
    assert "LoRA.rank = 2" in config and "LEARNING_RATE = 0.001" in config
    assert "label_accuracy" in (run / METRICS_FILE).read_text()
    capsys.readouterr()
    assert main(["train", "--run", "runs/x"]) == 0
    assert "all 2 steps are already done" in capsys.readouterr().out
    other = ["--eval", "train data.jsonl", "--exact_match"]
    assert main(["evaluate", "--run", "runs/x", *other]) == 0
    assert "4 examples" in capsys.readouterr().out
    model = words[1]
    use = ["--model", model, "--prompt", "runs/x"]
    assert main(["generate", *use, "ab=", "--new_tokens", "2"]) == 0
    assert main(["evaluate", *use, "--eval", "dev.jsonl", "--baseline"]) == 0
    message = refused(capsys, "train", *words, *options, "--seed", 3)
    assert "belongs to a run with another config" in message
    message = refused(capsys, "train", "--run", "runs/x", "--out", "runs/y")
    assert "--gin_file runs/x/config.gin --out DIRECTORY" in message


def test_data_without_types_is_learned_with_a_note_or_refused(words, capsys):
    with h5py.File("bare.hdf5", "w") as file:
        file["input_ids"] = np.full((4, 5), 7, np.int32)
    command = ["train", *words[:2], "--train", "bare.hdf5", "--dry_run"]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "so every token is learned; to refuse such data, give --use_token" in printed
    message = refused(capsys, *command, "--use_token_type_ids")
    assert "but the data has no token_type_ids" in message


def test_options_and_their_macros_vary_in_a_sweep(words, capsys):
    vary = ["--vary", "LEARNING_RATE=0.1,0.3", "--vary", "seed=0,1", "--out", "sweep"]
    assert main(["sweep", *words, "--steps", "2", "--print_config", *vary]) == 0
    printed = capsys.readouterr().out
    assert printed.count("# Member ") == 4
    assert printed.count("\nLEARNING_RATE = 0.1") == 2
    assert printed.count("Run.seed = 1") == 2
    message = refused(capsys, "sweep", *words, "--vary", "PROMT_LENGTH=1,2")
    assert "no setting PROMT_LENGTH; did you mean PROMPT_LENGTH" in message
    config = ["--gin_file", "runs/first_prompt.gin"]
    message = refused(capsys, "sweep", *words, *config, "--vary", "PROMT=1,2")
    assert "no setting PROMT in this config; did you mean PROMPT_LENGTH" in message


def test_every_option_is_in_help_with_its_group_and_default(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    whole = " ".join(printed.split())
    assert all(f"\n{group}:" in printed for group in GROUPS)
    assert all(f"\n  {name} " in printed for name in choices_of("method"))
    for option in TABLE:
        assert f"\n  {option.flag}" in printed
        if isinstance(option.default, int) and not isinstance(option.default, bool):
            assert f"(default: {option.default})" in whole


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from prompt_tuning.cli.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('jax', 'numpy', 'gin', 'rich') if m in sys.modules])"
    )
    started = time.process_time()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n") and time.process_time() - started < 5


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["train"], START),
        (["generate", "hello"], "--run runs/first"),
        (["evaluate"], "--run runs/first"),
        (["memory"], START),
        (["train", "--model", "x"], "--train is missing"),
        (["train", "--modle", "x"], "did you mean --model"),
        (["train", "--lr", "1"], "did you mean --learning_rate?"),
        (["train", "--BATCH_SIZE", "1"], "did you mean --batch_size?"),
        (["generate", "--tempreature", "1"], "did you mean --temperature?"),
        (["train", "--gin.MODEL", "a b"], "--gin.MODEL='\"a b\"' or --model 'a b'"),
        (["sweep", "--vary", "seed", "0,1"], "as in --vary NAME=0,1"),
        (["train", "--gin.STEPS", "5"], "--gin.STEPS=5 or --steps 5"),
    ],
)
def test_a_mistake_names_the_option_to_type(typed, expected, capsys):
    assert expected in refused(capsys, *typed)


def test_an_unknown_option_shows_the_usage_of_its_command(capsys):
    assert "prompt-tuning train --model PATH" in refused(capsys, "train", "--foo")
    assert "prompt-tuning generate --run" in refused(capsys, "generate", "--foo")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--gin.STEPS=0"], "--steps is 0, expected at least 1"),
        (["--gin.LEARNING_RATE=-1"], "--learning_rate is -1, expected a number above"),
        (["--gin.adafactor.learning_rate=0"], "adafactor.learning_rate is 0, expected"),
        (
            ["--gin_file", "runs/first_prompt.gin", "--gin.STEPS=0"],
            "Run.steps is 0, expected at least 1",
        ),
    ],
)
def test_numbers_that_are_too_small_are_refused(typed, expected, words, capsys):
    assert expected in refused(capsys, "train", *words, *typed)


def test_a_missing_option_is_refused_before_jax_is_imported():
    code = (
        "import sys; from prompt_tuning.cli.main import main\n"
        "main(['train', '--model', 'x']), main(['generate', 'x'])\n"
        "print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_config_takes_options_too(words, tmp_path, capsys):
    options = ["--gin_file", "runs/first_prompt.gin", "--steps", "12", "--print_config"]
    assert main(["train", *words, *options, "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "STEPS = 12" in printed and "'train data.jsonl'" in printed
    assert not Path(tmp_path / "run").exists()
    message = refused(capsys, "train", *words, *options, "--method", "lora")
    assert "--gin_file adapters/lora.gin" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_data_that_vanish_during_training_do_not_fail_the_run(
    command, words, tmp_path, monkeypatch, capsys
):
    name = {
        "train": "training.loop.train_held",
        "sweep": "sweep.sweep_run.train_sweep",
    }
    train = pkgutil.resolve_name(f"prompt_tuning.{name[command]}")

    def train_and_delete(*arguments, **options):
        outcome = train(*arguments, **options)
        (tmp_path / "train data.jsonl").unlink()
        return outcome

    monkeypatch.setattr(f"prompt_tuning.{name[command]}", train_and_delete)
    vary = ["--vary", "seed=0,1"] if command == "sweep" else []
    sizes = ["--steps", "1", "--batch_size", "4", "--prompt_length", "2"]
    assert main([command, *words, *sizes, *vary, "--out", "my run"]) == 0
    assert "next: prompt-tuning generate --run 'my run" in capsys.readouterr().out
