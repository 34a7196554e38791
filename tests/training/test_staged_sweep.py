"""A sweep whose model is divided into stages."""

import dataclasses

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from tests.support.exhaustive import sample
from tests.support.small_runs import DECODER, logged, write_model
from tests.support.staged_runs import staged

VARY = "Run.seed,PROMPT_LENGTH=(0,4),(1,2),(2,4)"


def losses(directory):
    return [line["loss"] for line in logged(directory) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vary", "alone"),
    sample(
        1,
        [
            ("Run.seed=0,1", {"Run.seed": 1}),
            (VARY, {"Run.seed": 1, "PROMPT_LENGTH": 2, "Run.accumulate": 2}),
        ],
    ),
)
def test_members_in_stages_equal_their_own_runs(
    files, tmp_path, monkeypatch, vary, alone
):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))

    def train(directory, words, **choices):
        settings = {"Run.evaluation": None, "Run.steps": 4} | choices
        settings = files.arguments(tmp_path / directory, model, **settings)
        return main([*words, *settings])

    assert train("one", ["train"], **alone) == 0
    more = {"Run.accumulate": alone.get("Run.accumulate", 1)}
    with monkeypatch.context() as patched:
        sweep = ["sweep", "--vary", vary, *staged(patched, 2)]
        assert train("staged", sweep, **more) == 0
    members = sorted(path for path in (tmp_path / "staged").iterdir() if path.is_dir())
    assert len(members) == 2 + (vary == VARY)
    actual = losses(members[1])
    assert len(actual) == 4
    np.testing.assert_allclose(actual, losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
def test_what_members_in_stages_cannot_do_is_refused(
    files, tmp_path, monkeypatch, capsys
):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))
    more = [*staged(monkeypatch, 2), "--gin.Run.pipeline=@Pipeline()"]
    arguments = ["--vary", VARY, *files.arguments(tmp_path / "sweep", model), *more]
    assert main(["sweep", "--at_once=2", *arguments]) == 2
    assert "--at_once is 2, but with 2 stages" in capsys.readouterr().err
    assert main(["sweep", *arguments, "--gin.Pipeline.schedule='gpipe'"]) == 2
    assert "Pipeline.schedule is 'gpipe', but the members" in capsys.readouterr().err
    assert main(["sweep", *arguments, "--gin.Pipeline.joined_p2=True"]) == 2
    assert "Pipeline.joined_p2 is True, but while members" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()
