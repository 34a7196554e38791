"""`prompt-tuning sweep`, from arguments to output and errors."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.cli.variations import parse_variations
from prompt_tuning.core.errors import InputError
from prompt_tuning.training import opening
from prompt_tuning.training.metrics_log import METRICS_FILE, read_log
from prompt_tuning.training.sweep.sweep_run import DIVERGED_FILE, SWEEP_FILE
from tests.support.small_runs import logged, write_pairs

GRID = ["--vary", "Run.seed=0,1", "--vary", "warmup_linear_decay.peak=0.3,1e38"]


def names(*given: str) -> list[str]:
    return [variation.name for variation in parse_variations(given)]


def test_several_arguments_form_a_grid():
    assert names("Run.seed=0,1", "adafactor.learning_rate=0.1,0.3") == [
        "seed=0,learning_rate=0.1",
        "seed=0,learning_rate=0.3",
        "seed=1,learning_rate=0.1",
        "seed=1,learning_rate=0.3",
    ]


def test_values_in_brackets_change_together():
    first, second = parse_variations(["PROMPT_LENGTH, Run.seed=(5, 1), (20, 2)"])
    assert first.lines == ["PROMPT_LENGTH = 5", "Run.seed = 1"]
    assert second.name == "PROMPT_LENGTH=20,seed=2"


def test_commas_in_brackets_and_quotes_do_not_separate_values():
    first, second = parse_variations(["f.labels=['a,b', \"c\"],[f(1,2)]"])
    assert first.lines == ["f.labels = ['a,b', \"c\"]"]
    assert second.lines == ["f.labels = [f(1,2)]"]


def test_names_are_safe_and_unique():
    assert names("SoftPrompt.initializer=@uniform(),@from_text()") == [
        "initializer=uniform",
        "initializer=from_text",
    ]
    assert names("x.rate=-1,1") == ["rate=-1", "rate=1"]
    # Different names, but not on a file system that ignores case.
    assert names("t.text='A/b ','a b'") == ["text=A-b", "text=a-b,2"]
    assert names("a/D.files=1", "b/D.files=2") == ["a-D.files=1,b-D.files=2"]
    (long,) = names(f"t.text='{'word ' * 50}'")
    assert len(long) < 60


@pytest.mark.parametrize(
    "given, message",
    [
        (["Run.seed"], "cannot be read; expected --vary NAME=VALUE"),
        (["Run.seed=0,"], "cannot be read"),
        (["=1,2"], "cannot be read"),
        (["Run.seed=0,0"], "two members would be the same: Run.seed=0"),
        (["Run.seed=0", "Run.seed=1"], "Run.seed is varied twice"),
        (["A,B=(1,2),3"], "3 is not one value for each of A, B"),
        (["A,B=(1,2,3)"], r"\(1,2,3\) is not one value for each of A, B"),
    ],
)
def test_arguments_that_cannot_be_parsed(given, message):
    with pytest.raises(InputError, match=message):
        parse_variations(given)


@pytest.fixture
def refused(files, tmp_path, capsys, monkeypatch) -> Callable[..., str]:
    """Sweeps, and expects an error before anything is compiled or written."""
    monkeypatch.setattr(opening, "compile_sweep_step", None)

    def run(*vary: str, **choices) -> str:
        words = [word for text in vary for word in ("--vary", text)]
        directory = tmp_path / "sweep"
        assert main(["sweep", *files.arguments(directory, **choices), *words]) == 2
        assert not directory.exists()
        printed = capsys.readouterr().err
        assert printed.startswith("prompt-tuning sweep: ")
        assert "Traceback" not in printed and len(printed) < 1000
        return " ".join(printed.split())

    return run


def test_a_sweep_must_vary_a_setting(refused):
    assert "nothing varies; give what differs: --vary NAME=VALUE" in refused()


@pytest.mark.slow
@pytest.mark.parametrize(
    "vary, shown",
    [
        ("Run.steps=5,6", "Run.steps is 5 in member steps=5 and 6 in member steps=6"),
        ("BATCH_SIZE=4,8", "Run.data.batch_size is 4 in member BATCH_SIZE=4 and 8"),
        ("Prompting.placement='prefix','suffix'", "Run.prompting.placement is"),
        ("Pretrained.compute_dtype='float32','bfloat16'", "Run.model.compute_dtype"),
        ("Run.keep_best=None,('loss','min')", "Run.keep_best is None"),
        ("Run.prompt=None,@SoftPrompt", "matches no parameter"),
    ],
)
def test_members_must_share_some_settings(vary, shown, refused):
    message = refused(vary)
    assert shown in message
    if "member" in shown:
        assert "may differ only in their prompt, groups" in message


@pytest.mark.slow
def test_members_with_different_trained_parameters(refused):
    message = refused(
        "ParameterGroup.regexes=['.*/prompt/.*'],['.*/prompt/.*','.*norm/scale']"
    )
    assert "is trained in only one of the members" in message


@pytest.mark.slow
def test_separate_batches_and_a_token_budget(refused):
    message = refused("Run.seed=0,1", **{"DataSource.batch_tokens": 256})
    assert "set Run.data_seed, so that they share batches" in message


def test_a_fresh_prompt_that_is_not_trained(refused):
    regexes = {"ParameterGroup.regexes": ["decoder/final_norm/.*"]}
    message = refused("PROMPT_LENGTH=2,4", **regexes)
    assert "decoder/prompt/prompt is fresh but not trained" in message


def test_a_parameter_that_no_member_uses(refused):
    message = refused("adamw.learning_rate=0.1,0.2")
    assert "--gin.adamw.learning_rate has no effect" in message
    assert "effect: --gin.adafactor.learning_rate=@warmup_linear_decay()" in message


def test_an_unused_name(refused):
    assert "no setting PROMPT_LENGHT in this config" in refused("PROMPT_LENGHT=2,3")


@pytest.mark.slow
def test_rows_that_fit_only_with_the_shorter_prompt(refused):
    choices = {
        "DataSource.on_too_long": "skip",
        "from_sampled_vocabulary.population_size": None,
    }
    shown = refused("PROMPT_LENGTH=4,52", **choices)
    assert "with 52 prompt vectors" in shown and "with 4 only 0" in shown


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> Path:
    """A grid half of whose members diverge."""
    directory = tmp_path_factory.mktemp("module") / "sweep"
    choices = {"Run.evaluate_every": 3, "Run.data_seed": 0}
    assert main(["sweep", *files.arguments(directory, **choices), *GRID]) == 0
    return directory


def output(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_best_member_is_named_in_the_table_and_in_files(finished, files, capsys):
    choices = {"Run.evaluate_every": 3, "Run.data_seed": 0}
    printed = output(capsys, "sweep", *files.arguments(finished, **choices), *GRID)
    assert "4 members, one copy of the frozen parameters; all read the same" in printed
    assert "all 6 steps are already done" in printed
    content = json.loads((finished / SWEEP_FILE).read_text())
    values = {
        name: member["best"]["value"] for name, member in content["members"].items()
    }
    assert list(values) == [
        "seed=0,peak=0.3",
        "seed=0,peak=1e38",
        "seed=1,peak=0.3",
        "seed=1,peak=1e38",
    ]
    assert [values[name] is None for name in values] == [False, True, False, True]
    whole = {name: value for name, value in values.items() if value is not None}
    expected = min(whole, key=lambda name: whole[name])
    assert content["best"] == expected
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    (best,) = (row for row in rows if "*" in row)
    assert f"{values[expected]:.4f}" in best
    assert [row.startswith("│ x") for row in rows] == [False, True, False, True]
    assert f"next: prompt-tuning generate --run {finished / expected} TEXT" in printed
    assert json.loads((finished / "best.json").read_text())["directory"] == expected
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (finished / "report.html").read_text("utf-8")
    assert all(f">{name}</a>" in page for name in values)
    lines = logged(finished / expected)
    measured = [x["evaluation/loss"] for x in lines if "evaluation/loss" in x]
    assert values[expected] == min(measured)


@pytest.mark.slow
def test_a_members_directory_is_a_run_directory(finished, capsys):
    member = finished / "seed=1,peak=0.3"
    assert "accuracy" in output(capsys, "evaluate", "--run", member)
    assert "nearest tokens" in output(capsys, "inspect", "--run", member)
    printed = output(capsys, "train", "--gin_file", member / "config.gin")
    assert "all 6 steps are already done" in printed


@pytest.mark.slow
def test_a_sweeps_directory_selects_its_best_member(finished, capsys):
    best = json.loads((finished / "best.json").read_text())["directory"]
    of_sweep = output(capsys, "evaluate", "--run", finished)
    assert of_sweep == output(capsys, "evaluate", "--run", finished / best)


@pytest.mark.slow
def test_a_table_and_a_message_replace_the_picture_without_matplotlib(
    finished, files, capsys, monkeypatch
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    choices = {"Run.evaluate_every": 3, "Run.data_seed": 0}
    printed = output(capsys, "sweep", *files.arguments(finished, **choices), *GRID)
    assert "no curves were drawn: `pip install matplotlib`" in printed
    assert "x diverged" in printed


@pytest.mark.exhaustive
def test_a_sweep_fails_if_all_members_diverge(files, tmp_path, capsys):
    vary = ["--vary", "Run.seed,warmup_linear_decay.peak=(0,1e38),(1,2e38)"]
    words = ["sweep", *files.arguments(tmp_path / "sweep"), *vary]
    for _ in range(2):
        assert main(words) == 1
        printed = capsys.readouterr()
        assert "all 2 members diverged" in printed.err
        assert printed.out.count("│ x") == 2
    assert len(list((tmp_path / "sweep").glob(f"*/{DIVERGED_FILE}"))) == 2


@pytest.mark.exhaustive
def test_the_training_loss_decides_without_held_out_data(files, tmp_path, capsys):
    words = files.arguments(tmp_path / "sweep", **{"Run.evaluation": None})
    printed = output(
        capsys, "sweep", *words, "--vary", "warmup_linear_decay.peak=0.3,0.01"
    )
    content = json.loads((tmp_path / "sweep" / SWEEP_FILE).read_text())
    assert content["by"] == ["train loss", "min"]
    values = {n: member["best"]["value"] for n, member in content["members"].items()}
    assert content["best"] == min(values, key=lambda name: values[name])
    assert "* best" in printed


@pytest.mark.slow
def test_a_member_that_always_gives_one_answer_does_not_win(files, tmp_path, capsys):
    """The held-out labels are those of the frozen model, which one member keeps."""
    prompts = list(ascii_lowercase)
    frozen = pt.load(files.decoder).predict(prompts, labels=["b", "n"])
    answers = [answer.label for answer in frozen]
    assert 0 < answers.count("n") < 26
    pairs = list(zip(prompts, answers, strict=True))
    train = write_pairs(tmp_path / "train.jsonl", [(p, "n") for p in prompts])
    held_out = write_pairs(tmp_path / "held_out.jsonl", pairs)
    directory = tmp_path / "sweep"
    words = ["sweep", "--model", files.decoder, "--train", train, "--eval", held_out]
    words += ["--labels", "b", "n", "--steps", 6, "--eval_every", 2, "--log_every", 2]
    words += ["--method", "lora", "--rank", 2, "--batch_size", 26, "--out", directory]
    words += ["--vary", "learning_rate=1e-9,0.1"]
    idle, biased = names("learning_rate=1e-9,0.1")
    output(capsys, *words)
    content = json.loads((directory / SWEEP_FILE).read_text())
    assert content["by"] == ["label_accuracy", "max"]
    assert content["best"] == idle
    assert content["members"][idle]["best"]["value"] == 1
    values = content["members"][biased]["evaluation"]
    assert values["label_accuracy"] == answers.count("n") / 26
    assert values["loss"] < content["members"][idle]["evaluation"]["loss"]
    assert "label_accuracy 1 at step 2" in output(capsys, "runs", directory)
    logs = [read_log(directory / name / METRICS_FILE) for name in (idle, biased)]
    # With another metric, checkpoints are measured again; each step keeps one point.
    output(capsys, *words, "--keep_best", "loss")
    content = json.loads((directory / SWEEP_FILE).read_text())
    assert (content["by"], content["best"]) == (["loss", "min"], biased)
    again = [read_log(directory / name / METRICS_FILE) for name in (idle, biased)]
    assert again == logs
    assert [line["step"] for line in again[0]] == [2, 4, 6]


def test_help_explains_how_members_vary():
    done = subprocess.run(
        [sys.executable, "-m", "prompt_tuning", "sweep", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--vary NAME=VALUE,VALUE,..." in done.stdout
    assert "memory of one run" in " ".join(done.stdout.split())
