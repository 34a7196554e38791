"""Batches on a mesh of eight devices, with divisible and indivisible rows."""

import pytest

from prompt_tuning.cli.main import main
from tests.support.small_runs import UPPER, logged, write_pairs

ON_ALL = "--gin.Run.mesh=@MeshShape()"


@pytest.mark.parametrize("name", ["BATCH_SIZE", "evaluation/DataSource.batch_size"])
def test_indivisible_rows_are_refused_at_the_start(name, files, tmp_path, capsys):
    arguments = files.arguments(tmp_path / "run")
    assert main(["train", *arguments, ON_ALL, f"--gin.{name}=12"]) == 2
    output = capsys.readouterr().err
    assert "a batch of 12 rows cannot be divided among 8 devices along data" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_indivisible_batches_are_padded(files, tmp_path):
    """Five held-out examples, and as many training rows as fit a token budget.

    Losses and evaluations equal those on one device.
    """
    five = write_pairs(tmp_path / "five.jsonl", UPPER[32:37])
    results = []
    for number, mesh in enumerate(("--gin.Run.mesh=None", ON_ALL)):
        run = tmp_path / str(number)
        arguments = files.arguments(run, EVALUATION_FILES=str(five), Run__steps=3)
        budget = "--gin.train/DataSource.batch_tokens=300"
        assert main(["train", *arguments, budget, mesh]) == 0
        results.append(logged(run))
    names = ("loss", "accuracy", "evaluation/loss", "evaluation/accuracy")
    assert len(results[0]) == 4
    for one, eight in zip(*results, strict=True):
        measured = {name: one[name] for name in names if name in one}
        assert measured
        assert {n: eight[n] for n in measured} == pytest.approx(measured, rel=1e-5)
