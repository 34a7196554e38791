"""`prompt-tuning configs`, and the options that stop a command before it writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config import shipped_configs
from prompt_tuning.config.config_values import CONFIG_FILE, config_values
from tests.support.small_runs import trained_prompt, tune

FOLDER = Path(__file__).parents[2] / "configs"


def output(capsys, *arguments) -> str:
    capsys.readouterr()
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def test_every_config_is_listed_with_a_sentence(capsys):
    printed = output(capsys, "configs")
    lines = [line.split(maxsplit=1) for line in printed.splitlines() if ".gin " in line]
    names = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.gin")}
    assert {name for name, _ in lines} == names
    assert all(sentence[0].isupper() for _, sentence in lines)
    assert lines[0][0].startswith("runs/")


@pytest.mark.parametrize("name", ["adapters/lora.gin", "adapters/lora", "lora"])
def test_a_config_is_printed_by_its_name(name, capsys):
    assert output(capsys, "configs", name) == (FOLDER / "adapters/lora.gin").read_text()


def test_an_unknown_config_is_refused_with_the_nearest(capsys):
    assert main(["configs", "runs/first_promt.gin"]) == 2
    assert "expected runs/first_prompt.gin" in capsys.readouterr().err


def test_an_abbreviation_does_not_end_the_first_sentence():
    config = "# As Lester et al. 2021\n# do. Set MODEL.\nRun.seed = 0\n# Not this.\n"
    assert shipped_configs.first_sentence(config) == "As Lester et al. 2021 do"


def test_listing_configs_imports_nothing_heavy():
    code = (
        "import sys; from prompt_tuning.cli.main import main; main(['configs'])\n"
        "print([m for m in ('jax', 'numpy', 'gin', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.exhaustive
def test_the_printed_config_trains_the_same_run(files, tmp_path, capsys):
    arguments = files.arguments(tmp_path / "run", Run__steps=2)
    printed = output(capsys, "train", *arguments, "--print_config")
    assert "SoftPrompt.initializer = @" in printed and "Run.seed = 0" in printed
    assert not (tmp_path / "run").exists()
    config = tmp_path / "printed.gin"
    config.write_text(printed)
    again = f"--gin.Run.directory={str(tmp_path / 'again')!r}"
    output(capsys, "train", "--gin_file", config, again)
    assert tune(files, tmp_path / "run", Run__steps=2) == 0
    assert trained_prompt(tmp_path / "again", 2) == trained_prompt(tmp_path / "run", 2)
    # The config that the run keeps has the same values.
    (saved,) = {(tmp_path / "run" / CONFIG_FILE).read_text()}
    assert config_values(saved) == config_values(printed)
    for command in ("evaluate", "generate"):
        shown = output(capsys, command, "--run", tmp_path / "run", "--print_config")
        assert "Run.steps = 2" in shown


def test_a_config_is_printed_without_a_checkpoint(files, tmp_path, capsys):
    arguments = files.arguments(tmp_path / "run", tmp_path / "no-model")
    for command in ("train", "evaluate", "generate"):
        printed = output(capsys, command, *arguments, "--print_config")
        assert "no-model" in printed
    vary = ("--vary", "Run.seed=3,4", "--print_config")
    printed = output(capsys, "sweep", *arguments, *vary)
    assert "# Member seed=3" in printed and "Run.seed = 4" in printed


@pytest.mark.parametrize("command", [["train"], ["sweep", "--vary", "Run.seed=0,1"]])
def test_a_dry_run_reports_and_writes_nothing(command, files, tmp_path, capsys):
    arguments = files.arguments(tmp_path / "run")
    printed = output(capsys, *command, *arguments, "--dry_run")
    assert "32 training examples" in printed and "nothing was written" in printed
    assert not (tmp_path / "run").exists()
    missing = files.arguments(tmp_path / "run", TRAIN_FILES="absent.jsonl")
    assert main([*command, *missing, "--dry_run"]) == 2
    assert "absent.jsonl not found" in capsys.readouterr().err


def test_a_dry_run_checks_that_the_directory_is_free(files, tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    assert main(["train", *files.arguments(tmp_path / "run"), "--dry_run"]) == 2
    assert "is a file, expected a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "generate", "inspect", "convert"])
@pytest.mark.parametrize(
    "content, state", [("", "empty"), ("Run.seed = 1\n", "incomplete")]
)
def test_a_run_with_an_incomplete_config_is_refused(
    command, content, state, tmp_path, capsys
):
    (tmp_path / CONFIG_FILE).write_text(content)
    run = ["--run", str(tmp_path)]
    if command == "convert":
        run = [str(tmp_path), str(tmp_path / "target")]
    words = [*run, "text"] if command == "generate" else run
    assert main([command, *words]) == 2
    problem = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / CONFIG_FILE} is {state}: it does not set Run.model" in problem
