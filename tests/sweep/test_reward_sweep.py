"""Sweeps whose members learn from rewards of their own answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.training.rollouts.answer_sampler import AnswerSampler
from prompt_tuning.training.rollouts.rollout_log import ROLLOUTS_FILE
from tests.support.small_runs import Killed, logged, trained_prompt

pytestmark = pytest.mark.slow
VARY = "Run.seed,PROMPT_LENGTH=(0,4),(1,2)"


def arguments(files, command: str, directory: Path, *more: str) -> list[str]:
    flat = [command, "--model", str(files.decoder), "--train", str(files.train)]
    flat += ["--loss", "grpo", "--reward", "length=3", "--new_tokens", "8"]
    flat += ["--group", "4", "--resample", "1", "--updates", "2", "--steps", "6"]
    flat += ["--batch_size", "4", "--save_every", "2", "--learning_rate", "0.02"]
    flat += ["--gin.Run.log_every=1", "--gin.DataSource.buckets=1", "--no_report"]
    return [*flat, "--out", str(directory), *more]


def members_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())


def answers_of(directory: Path) -> list[dict]:
    lines = (directory / ROLLOUTS_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def swept(files, tmp_path_factory) -> Path:
    """A sweep that nothing stopped."""
    directory = tmp_path_factory.mktemp("swept") / "sweep"
    assert main(arguments(files, "sweep", directory, "--vary", VARY)) == 0
    return directory


def test_a_member_samples_and_learns_what_its_own_run_does(swept, files, tmp_path):
    member = members_of(swept)[1]
    own = ["--prompt_length", "2", "--gin.Run.seed=1"]
    assert main(arguments(files, "train", tmp_path / "alone", *own)) == 0
    expected, found = answers_of(tmp_path / "alone"), answers_of(member)
    for name in ("step", "prompt", "completion", "reward", "batch", "position"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    lines = [
        [line for line in logged(run) if "loss" in line]
        for run in (member, tmp_path / "alone")
    ]
    for name in ("loss", "reward", "entropy"):
        actual, wanted = ([line[name] for line in each] for each in lines)
        np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_a_killed_sweep_ends_with_the_same_bits(swept, files, tmp_path, monkeypatch):
    words = arguments(files, "sweep", tmp_path / "sweep", "--vary", VARY)
    sample, calls = AnswerSampler.__call__, []

    def kill(self, prompts, parameters, number, *rest):
        if number == 2 and calls.count(2):  # of the second member
            raise Killed
        calls.append(number)
        return sample(self, prompts, parameters, number, *rest)

    monkeypatch.setattr(AnswerSampler, "__call__", kill)
    with pytest.raises(Killed):
        main(words)
    monkeypatch.undo()
    assert main(words) == 0
    for member in members_of(swept):
        again = tmp_path / "sweep" / member.name
        assert trained_prompt(again, 6) == trained_prompt(member, 6)
        answers = (member / ROLLOUTS_FILE).read_bytes()
        assert (again / ROLLOUTS_FILE).read_bytes() == answers


def test_a_member_that_diverges_samples_no_more(files, tmp_path):
    vary = ["--vary", "learning_rate=0.02,1e38", "--gin.GRPO.beta=0.1"]
    words = arguments(files, "sweep", tmp_path / "sweep", *vary)
    assert main(words) == 0
    words[words.index("--steps") + 1] = "8"
    assert main(words) == 0  # it goes on without that member
    members = members_of(tmp_path / "sweep")
    assert [answers_of(member)[-1]["step"] for member in members] == [7, 1]
