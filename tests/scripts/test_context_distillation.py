"""The measurement of context distillation with fewer texts and steps."""

import json

import pytest

from scripts.bench import context_distillation
from tests.support.shared_data import SHARED
from tests.support.small_runs import clean_process

__all__ = ["clean_process"]

MODEL = SHARED / "data/models/stories260k"


@pytest.mark.exhaustive
@pytest.mark.released
def test_a_prompt_closes_most_of_the_gap_between_no_context_and_a_context(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(context_distillation, "HELD_OUT", 64)
    results_file = tmp_path / "found.json"
    choices = ["--texts=256", f"--runs={tmp_path}", f"--json={results_file}"]
    choices += ["--gin.STEPS=80", "--gin.BATCH_SIZE=8"]
    context_distillation.main([f"--model={MODEL}", *choices])
    measured = json.loads(results_file.read_text())
    # BOS alone is clearly worse, so there is something to distill.
    assert measured["nothing"] > measured["context"] + 0.4
    assert 0.8 < measured["closed"] < 1


def test_a_misspelt_flag_is_an_error(capsys):
    with pytest.raises(SystemExit):
        context_distillation.main([f"--model={MODEL}", "--text=5"])
    assert "unrecognized arguments: --text=5" in capsys.readouterr().err
