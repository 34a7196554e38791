"""A preparation after a kill or power cut at each call to the file system."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation import preparation_plot, worker_pool
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    Share,
    Splits,
    TokenizerChoice,
)
from prompt_tuning.data.preparation.split_writer import SplitMetrics
from tests.support.crash_states import read_tree, recorded
from tests.support.small_tokenizer import write_tokenizer


def write_names(metrics: Mapping[str, SplitMetrics], file: Path) -> None:
    write_file(file, str(list(metrics)).encode(), force=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replaces", [False, True])
def test_a_preparation_ends_with_the_same_bits(replaces, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "TASK_RECORDS", 20)
    # Drawing would take most of the time; here only the writing matters.
    monkeypatch.setattr(preparation_plot, "plot_metrics", write_names)
    tokenizer = TokenizerChoice(str(write_tokenizer(tmp_path / "tokenizer")))
    lines = [
        json.dumps({"prompt": f"the {i} and", "completion": "a the " * (i % 9)})
        for i in range(60)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    root = tmp_path / "root"
    root.mkdir()

    def run(seed: int = 3) -> None:
        splits = Splits(Share(count=5), Share(count=0), seed, shuffle=True)
        settings = Preparation(
            (str(tmp_path / "lines.jsonl"),),
            str(root / "out"),
            tokenizer=tokenizer,
            length=64,
            splits=splits,
        )
        prepare(settings, workers=1, force=replaces)

    if replaces:
        run(seed=4)
    before = read_tree(root)
    recording = recorded(root, run)
    expected = read_tree(root)
    assert expected != before
    shutil.rmtree(root)
    for place, state in recording.written(root, same_path=True):
        try:
            run()
        except InputError as refused:  # completed before
            assert "already; --force replaces" in str(refused)
            left = {x for x in state if not x.startswith(".out.preparing")}
            assert {name: state[name] for name in left} == expected
        assert read_tree(place) == expected
