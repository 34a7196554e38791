"""A run continues only with the files that it was started with."""

import pytest

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.run_directory import claim, run_record

CONFIG = "Run.steps = 10\n"


def run_on(files):
    return Run(
        directory="run",
        model=Pretrained(checkpoint="model"),
        groups=(),
        steps=10,
        data=DataSource(files=files),
    )


def test_a_glob_that_stands_for_other_files_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    run = run_on(f"{tmp_path}/*.jsonl")
    claim(tmp_path / "run", CONFIG, "the model", run_record(run))
    claim(tmp_path / "run", CONFIG, "the model", run_record(run))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(InputError, match=r"\['a.jsonl'\], and its glob .*'b.jsonl'\]"):
        claim(tmp_path / "run", CONFIG, "the model", run_record(run))


def test_files_that_are_named_are_in_the_config_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert run_record(run_on(str(tmp_path / "a.jsonl"))) == {}
    assert run_record(run_on([str(tmp_path / "a.jsonl")])) == {}
