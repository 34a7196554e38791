"""A sweep from its arguments to its directories, and interrupted in between."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.cli import sweep as command
from prompt_tuning.cli.main import build_parser, main, split_bindings
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.core.errors import InputError
from prompt_tuning.training import loop
from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.sweep.sweep_plot import running_mean
from prompt_tuning.training.sweep.sweep_run import DIVERGED_FILE, Sweep, train_sweep
from tests.support.exhaustive import sample
from tests.support.small_runs import Killed, kill_at_call, logged, tune

SEEDS = "Run.seed=0,1"


def arguments(files, directory, vary, model=None, **choices) -> list[str]:
    varied = [word for text in vary for word in ("--vary", text)]
    return ["sweep", *files.arguments(directory, model, **choices), *varied]


def prepare(files, directory, vary, model=None, **choices) -> Sweep:
    plain, bindings = split_bindings(
        arguments(files, directory, vary, model, **choices)
    )
    options = build_parser().parse_args(plain)
    options.bindings = bindings
    return command.prepare(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, vary, choices, alone",
    sample(
        1,
        [
            (
                "decoder",
                "Run.seed,PROMPT_LENGTH,warmup_linear_decay.peak=(0,4,0.3),(1,2,0.1)",
                {},
                {"Run.seed": 1, "PROMPT_LENGTH": 2, "warmup_linear_decay.peak": 0.1},
            ),
            (
                "t5",
                "Run.seed,SoftPrompt.initializer="
                "(0,@from_sampled_vocabulary()),(3,@uniform())",
                {"Run.data_seed": 5},
                {"Run.seed": 3, "prompts": "uniform"},
            ),
        ],
    ),
)
def test_a_member_equals_its_own_run(
    architecture, vary, choices, alone, files, tmp_path
):
    model = getattr(files, architecture)
    choices = choices | {"Run.evaluate_every": 3}
    assert main(arguments(files, tmp_path / "sweep", [vary], model, **choices)) == 0
    member = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())[1]
    single = tmp_path / "single"
    more = choices | {n: x for n, x in alone.items() if n != "prompts"}
    words = ["train", *files.arguments(single, model, **more)]
    if "prompts" in alone:
        words.append("--gin.SoftPrompt.initializer=@uniform()")
    assert main(words) == 0

    assert config_without_directory(member) == config_without_directory(single)
    actual, expected = logged(member), logged(single)
    assert [line.keys() for line in actual] == [line.keys() for line in expected]
    for line, wanted in zip(actual, expected, strict=True):
        for name in ("loss", "accuracy", "evaluation/loss", "evaluation/accuracy"):
            if name in wanted:
                np.testing.assert_allclose(line[name], wanted[name], rtol=1e-5)
    for step in steps_in(single / FOLDER):
        folder = f"{FOLDER}/checkpoint_{step}"
        np.testing.assert_allclose(
            read_prompt(member / folder), read_prompt(single / folder), atol=1e-4
        )


def config_without_directory(directory: Path) -> list[str]:
    """The config without the directory's name."""
    text = (directory / CONFIG_FILE).read_text().replace("\\\n", "")
    return [
        line
        for line in text.splitlines()
        if line and line[0] != "#" and "DIRECTORY" not in line.upper().split("=")[0]
    ]


STEPS = 12
CHOICES: dict[str, Any] = {
    "DataSource.buckets": 1,
    "Run.steps": STEPS,
    "Run.save_every": 3,
    "Run.evaluate_every": 6,
    "Run.data_seed": 0,
}


@pytest.fixture(scope="module")
def prepared(files) -> Callable[[Path], Sweep]:
    """Two members, compiled once for all directories; a third diverges."""
    sweep = prepare(
        files,
        "elsewhere",
        ["Run.seed,warmup_linear_decay.peak=(0,0.3),(1,0.1),(2,1e38)"],
        **CHOICES,
    )

    def run(directory: Path) -> Sweep:
        members = []
        for member in sweep.members:
            folder = str(directory / member.name)
            trainer = dataclasses.replace(
                member.trainer,
                run=dataclasses.replace(member.trainer.run, directory=folder),
                start=jax.tree.map(jnp.copy, member.trainer.start),
            )
            members.append(dataclasses.replace(member, trainer=trainer))
        here = dataclasses.replace(sweep, directory=directory, members=tuple(members))
        train_sweep(
            here,
            make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS),
        )
        return here

    return run


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory) -> Path:
    """The same sweep without an interruption."""
    directory = tmp_path_factory.mktemp("unkilled") / "sweep"
    sweep = prepared(directory)
    # All batches have one shape, so that only one program is compiled.
    assert sweep.members[0].trainer.step.programs == 1
    return directory


def bits(directory: Path) -> dict[str, object]:
    """All files of a sweep; logs without values that depend on the clock."""
    results: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "tensorboard" not in path.parts:
            results[str(path.relative_to(directory))] = path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                line.pop("tokens_per_second", None)
                line.pop("data_wait_share", None)
            results[str(path.relative_to(directory))] = lines
    return results


def test_a_diverging_member_is_dropped_and_the_others_continue(uninterrupted):
    members = sorted(path for path in uninterrupted.iterdir() if path.is_dir())
    steps = [steps_in(member / FOLDER) for member in members]
    assert [actual[-1:] for actual in steps] == [[STEPS], [STEPS], []]
    assert [(m / DIVERGED_FILE).exists() for m in members] == [False, False, True]
    assert [logged(member)[-1]["step"] for member in members[:2]] == [STEPS] * 2
    why = json.loads((members[2] / DIVERGED_FILE).read_text())
    assert why["step"] <= 3 and "no checkpoint had been written" in why["reason"]


@pytest.mark.parametrize("step", sample(2, [1, 4, 6, 7, 11, STEPS]))
def test_interruption_at_a_step(step, prepared, tmp_path, uninterrupted, monkeypatch):
    record = loop.Recorder.record

    def recorded(self, at, *rest):
        if at == step:
            raise Killed
        return record(self, at, *rest)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(loop.Recorder, "record", recorded)
        prepared(tmp_path / "sweep")
    prepared(tmp_path / "sweep")
    assert bits(tmp_path / "sweep") == bits(uninterrupted)


@pytest.mark.parametrize("call", sample(3, range(1, 70, 5)))
def test_interruption_among_disk_calls(
    call, prepared, tmp_path, uninterrupted, monkeypatch
):
    """Between the members' saves, and in the middle of each."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_at_call(patched, call)
        prepared(tmp_path / "sweep")
    prepared(tmp_path / "sweep")
    assert bits(tmp_path / "sweep") == bits(uninterrupted)


def test_a_damaged_checkpoint_of_one_member_rolls_back_all_members(
    prepared, tmp_path, uninterrupted
):
    shutil.copytree(uninterrupted, tmp_path / "sweep")
    members = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    prompt = members[1] / FOLDER / f"checkpoint_{STEPS}" / "decoder.prompt.prompt.npy"
    prompt.write_bytes(prompt.read_bytes()[:-1])
    prepared(tmp_path / "sweep")
    assert bits(tmp_path / "sweep") == bits(uninterrupted)


def test_members_without_a_common_step_are_refused(prepared, tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "sweep")
    members = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    for step in steps_in(members[0] / FOLDER)[:-1]:
        shutil.rmtree(members[0] / FOLDER / f"checkpoint_{step}")
    shutil.rmtree(members[1] / FOLDER / f"checkpoint_{STEPS}")
    before = bits(tmp_path / "sweep")
    with pytest.raises(InputError, match="no intact checkpoint of the same step"):
        prepared(tmp_path / "sweep")
    assert bits(tmp_path / "sweep") == before


def test_a_member_without_checkpoints_does_not_affect_the_others(
    prepared, tmp_path, uninterrupted
):
    shutil.copytree(uninterrupted, tmp_path / "sweep")
    members = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    shutil.rmtree(members[0] / FOLDER)
    before = bits(tmp_path / "sweep")
    with pytest.raises(
        InputError, match=r"no intact checkpoint of the same step: .* has \[\]"
    ):
        prepared(tmp_path / "sweep")
    assert bits(tmp_path / "sweep") == before


def test_a_sweep_with_other_members_is_refused(
    prepared, tmp_path, uninterrupted, files
):
    shutil.copytree(uninterrupted, tmp_path / "sweep")
    before = bits(tmp_path / "sweep")
    other = prepare(files, tmp_path / "sweep", [SEEDS], **CHOICES)
    with pytest.raises(InputError, match="belongs to a sweep with other members"):
        train_sweep(
            other, make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS)
        )
    assert bits(tmp_path / "sweep") == before


def test_a_single_runs_directory_is_refused(files, tmp_path, capsys):
    choices: dict[str, Any] = {"Run.steps": 1}
    assert tune(files, tmp_path / "run", **choices) == 0
    assert main(arguments(files, tmp_path / "run", [SEEDS])) == 2
    assert "belongs to a single run" in capsys.readouterr().err


def test_a_running_mean_forgets_and_starts_unbiased():
    curve = np.concatenate([np.full(100, 4.0), np.full(100, 2.0)])
    mean = running_mean(curve)
    np.testing.assert_allclose(mean[:100], 4)
    assert 2 < mean[105] < 4 and mean[-1] < 2.02
