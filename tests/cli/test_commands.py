"""Commands from arguments to output, on tiny models."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.cli.main import Command, load_commands, main
from prompt_tuning.config import gin_files
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.core.config_folder import CONFIG_FOLDERS, PACKAGE
from tests.support.exhaustive import sample
from tests.support.small_runs import (
    LENGTH,
    UPPER,
    logged,
    trained_prompt,
    tune,
    write_pairs,
)

BUCKETS = 8


@pytest.fixture(scope="module")
def run(files, tmp_path_factory) -> Path:
    """A finished run of a decoder, on batches of several lengths."""
    directory = tmp_path_factory.mktemp("module") / "run"
    assert tune(files, directory, DataSource__buckets=BUCKETS) == 0
    return directory


@pytest.fixture(scope="module")
def t5_run(files, tmp_path_factory) -> Path:
    """A finished run of a T5."""
    directory = tmp_path_factory.mktemp("module") / "t5"
    assert tune(files, directory, files.t5) == 0
    return directory


def output(capsys, *arguments) -> str:
    capsys.readouterr()
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def evaluated(capsys, *arguments) -> dict[str, float]:
    """Returns the rows of the table that `evaluate` prints."""
    lines = output(capsys, "evaluate", *arguments).splitlines()
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    return {name.strip(): float(value) for name, value, _ in rows}


@pytest.mark.slow
def test_a_shipped_config_is_found_by_name_from_any_directory(
    files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert tune(files, Path("run")) == 0
    printed = capsys.readouterr().out
    assert "restored       11" in printed
    assert f"decoder/prompt/prompt ({LENGTH}, 16): the prompt's initializer" in printed
    assert "32 training examples" in printed
    assert read_prompt(tmp_path / "run").shape == (LENGTH, 16)


def test_configs_inside_the_package_take_precedence():
    assert CONFIG_FOLDERS[0] == PACKAGE / "configs"
    assert (CONFIG_FOLDERS[1] / "runs/first_prompt.gin").is_file()


@pytest.mark.slow
def test_the_log_has_each_step_once_with_speed_and_padding(run):
    steps = [line for line in logged(run) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        assert line["loss"] > 0 and line["gradient_norm"] > 0
        assert line["prompt_norm"] > 0 and 0 <= line["accuracy"] <= 1
        assert line["tokens_per_second"] > 0 and 0 <= line["padding_share"] < 0.9
        assert 0 <= line["data_wait_share"] < 1
    (evaluation,) = (line for line in logged(run) if "evaluation/loss" in line)
    assert evaluation["step"] == 6
    assert list((run / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_saved_config_reproduces_the_run_bitwise(run, tmp_path, capsys):
    again = tmp_path / "again"
    config = f"--gin_file={run / CONFIG_FILE}"
    output(capsys, "train", config, f"--gin.Run.directory={str(again)!r}")
    assert trained_prompt(again, 6) == trained_prompt(run, 6)


def test_evaluating_a_run_repeats_its_last_evaluation(run, capsys):
    results = evaluated(capsys, "--run", run)
    (measured,) = (line for line in logged(run) if "evaluation/loss" in line)
    assert results["loss"] == pytest.approx(measured["evaluation/loss"], abs=6e-5)


@pytest.mark.slow
def test_evaluation_without_a_prompt_uses_the_frozen_model(run, capsys):
    alone = evaluated(capsys, "--run", run, "--gin.Run.prompt=None")
    assert alone.keys() == {"loss", "perplexity", "accuracy"}
    assert alone["loss"] != evaluated(capsys, "--run", run)["loss"]


@pytest.mark.slow
def test_a_moved_run_can_be_evaluated(run, tmp_path, capsys):
    run.rename(tmp_path / "moved")
    try:
        moved = evaluated(capsys, "--run", tmp_path / "moved")
    finally:
        (tmp_path / "moved").rename(run)
    assert moved == evaluated(capsys, "--run", run)


@pytest.mark.slow
def test_another_prompt_can_be_evaluated(run, tmp_path, capsys):
    np.save(tmp_path / "prompt.npy", np.zeros((LENGTH, 16), np.float32))
    other = evaluated(capsys, "--run", run, "--prompt", tmp_path / "prompt.npy")
    assert other["loss"] != evaluated(capsys, "--run", run)["loss"]


@pytest.mark.exhaustive
def test_a_text_continues_the_same_alone_and_in_a_batch(run, monkeypatch, capsys):
    texts = ["hi=", "a much longer text before it=", "hello="]
    options = ("generate", "--run", run, "--new_tokens", 8)
    alone = [output(capsys, *options, text) for text in texts]
    assert output(capsys, *options, *texts) == "".join(alone)
    lines = io.StringIO("".join(f"{text}\n" for text in texts))
    monkeypatch.setattr("sys.stdin", lines)
    assert output(capsys, *options) == "".join(alone)
    assert all(map(str.startswith, alone, texts))


@pytest.mark.slow
def test_a_seed_repeats_its_samples(run, capsys):
    def drawn(seed):
        options = ("--new_tokens", 12, "--temperature", 2.0, "--seed", seed)
        return output(capsys, "generate", "--run", run, *options, "hello=")

    assert drawn(1) == drawn(1) != drawn(2)


def test_inspect_shows_each_vector_with_its_norm(run, capsys):
    printed = output(capsys, "inspect", "--run", run, "--nearest", 2)
    norms = np.linalg.norm(read_prompt(run), axis=1)
    for index, norm in enumerate(norms):
        assert f"│ {index}      │ {norm:.3f}" in printed


@pytest.mark.slow
def test_a_t5_is_tuned_evaluated_and_generates(t5_run, capsys):
    assert read_prompt(t5_run).shape == (LENGTH, 16)
    assert evaluated(capsys, "--run", t5_run)["loss"] > 0
    command = ("generate", "--run", t5_run, "--new_tokens", 4)
    alone = output(capsys, *command, "hello=")
    assert alone.startswith("hello= -> ")
    assert output(capsys, *command, "hello=", "a much longer text=").startswith(alone)


@pytest.mark.exhaustive
def test_hdf5_rows_train_as_their_original_pairs(files, run, t5_run, tmp_path):
    rows = {"TRAIN_FILES": str(files.train_rows)}
    rows["EVALUATION_FILES"] = str(files.held_out_rows)
    runs = ((files.decoder, run, BUCKETS), (files.t5, t5_run, 1))
    for model, of_pairs, buckets in runs:
        directory = tmp_path / model.name
        choices = {"DataSource__buckets": buckets, **rows}
        assert tune(files, directory, model, **choices) == 0
        assert trained_prompt(directory, 6) == trained_prompt(of_pairs, 6)


@pytest.mark.slow
@pytest.mark.parametrize("directory", sample(1, ["run", "t5_run"]))
def test_exact_match_and_labels_are_measured_on_request(
    directory, files, tmp_path, capsys, request
):
    pairs = [(prompt, "yes" if i % 2 else "no") for i, (prompt, _) in enumerate(UPPER)]
    data = write_pairs(tmp_path / "labels.jsonl", pairs[:6])
    results = evaluated(
        capsys,
        *("--run", request.getfixturevalue(directory)),
        f"--gin.EVALUATION_FILES={str(data)!r}",
        "--gin.Evaluation.labels=['yes', 'no']",
        "--gin.Evaluation.exact_match=True",
        "--gin.Evaluation.new_tokens=4",
    )
    assert results["label_accuracy"] * 6 == pytest.approx(
        round(results["label_accuracy"] * 6), abs=1e-3
    )
    assert 0 <= results["exact_match"] <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("default:1 of 3 completions are longer than")
def test_a_fixed_continuation_is_matched_exactly(run, tmp_path, capsys):
    """Two of the three targets are what the model generates."""
    texts = ["a=", "hello="]
    printed = output(capsys, "generate", "--run", run, "--new_tokens", 5, *texts)
    answers = [
        line.removeprefix(text)
        for text, line in zip(texts, printed.splitlines(), strict=True)
    ]
    pairs = [*zip(texts, answers, strict=True), ("b=", "zzzzzzzz")]
    data = write_pairs(tmp_path / "said.jsonl", pairs)
    results = evaluated(
        capsys,
        *("--run", run),
        f"--gin.EVALUATION_FILES={str(data)!r}",
        "--gin.Evaluation.exact_match=True",
        "--gin.Evaluation.new_tokens=5",
    )
    assert results["exact_match"] == pytest.approx(2 / 3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"]]
    + [[command, "--help"] for command in ("train", "sweep", "convert", "memory")],
)
def test_help_does_not_import_jax(arguments):
    code = (
        "import sys; from prompt_tuning.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "finally: print([m for m in ('jax', 'numpy', 'gin') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "prompt_tuning", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--gin_file FILE" in done.stdout


def test_no_command_prints_the_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert "Start with: prompt-tuning train --model PATH --train FILE" in printed


def test_every_command_is_listed_in_one_line(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, command in load_commands().items():
        assert isinstance(command, Command)
        assert f"  {name:11}  {command.HELP}" in lines


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--stepz=3", "unrecognized arguments: --stepz=3; did you mean --steps"),
        ("--gin_fil=x", "unrecognized arguments: --gin_fil=x; did you mean --gin_file"),
        ("--gin.Run.steps", "--gin.Run.steps has no '=': write --gin.Run.steps=VALUE"),
    ],
)
def test_an_unknown_flag_is_an_error(flag, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", flag])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").rglob("*.gin"))
MACROS = {
    "MODEL": "model",
    "TOKENIZER": "tokenizer.model",
    "TRAIN_FILES": "train.jsonl",
    "EVALUATION_FILES": "held_out.jsonl",
    "RUN_DIRECTORY": "run",
    "CLASS_LABELS": ["yes", "no"],
    "PROMPT_FILE": "prompt.npy",
    "PROMPT_EXAMPLES": str(Path(__file__).parents[1] / "fixtures/shots.jsonl"),
    "PROMPT_TEXT": "text",
    "TASKS": 2,
    "TEMPLATE": "{soft:2} Review: {text}",
    "SHARED_FEATURES": 3,
    "TASK_FEATURES": 5,
    "CONTEXT": "a text",
    "CONTEXT_KEY": "chunk",
    "ADDED_TOKENS": ["<tool>"],
    "REWARDS": ["exact_match"],
    "STEPS": 900,
    "LEARNING_RATE": 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_shipped_config_builds_its_objects(file, tmp_path):
    # In a file, because an unused macro on the command line is an error.
    macros = tmp_path / "macros.gin"
    bound = [f"{name} = {value!r}\n" for name, value in MACROS.items()]
    macros.write_text("".join(bound))
    # Values that each part of a run leaves to the other parts.
    rest = ["Run.directory = 'run'", "Run.model = @Pretrained()"]
    rest += ["Pretrained.checkpoint = 'model'"]
    if file.stem == "t5_1_1":
        sizes = ("layers", "width", "feed_forward_width", "heads")
        rest += [f"t5_config.{size} = 1" for size in sizes]
    name = str(file.relative_to(CONFIG_FOLDERS[1]))
    run = gin_files.read_run([name, str(macros)], rest)
    if run.prompt is not None and run.prompt.keywords:
        assert callable(run.prompt.keywords["initializer"].scoped_configurable_fn())
    if file.parent.name == "runs":
        assert run.groups


@pytest.mark.exhaustive
def test_an_inference_only_prompt_generates_as_the_tuned_one(
    files, run, tmp_path, capsys
):
    np.save(tmp_path / "prompt.npy", read_prompt(run))
    constant = output(
        capsys,
        "generate",
        "--gin_file=models/checkpoint.gin",
        "--gin_file=prompts/inference_only.gin",
        f"--gin.MODEL={str(files.decoder)!r}",
        f"--gin.PROMPT_FILE={str(tmp_path / 'prompt.npy')!r}",
        f"--gin.PROMPT_LENGTH={LENGTH}",
        "--gin.Run.directory='nowhere'",
        "--new_tokens=9",
        "hello=",
    )
    tuned = output(capsys, "generate", "--run", run, "--new_tokens=9", "hello=")
    assert constant == tuned


@pytest.mark.slow
def test_a_run_directory_with_a_long_path_can_be_moved(files, tmp_path):
    long = tmp_path / "a-long-name" / ("directory-" * 9)
    assert tune(files, long) == 0
    assert tune(files, long.rename(tmp_path / "moved")) == 0
