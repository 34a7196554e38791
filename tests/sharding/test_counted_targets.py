"""Filler rows of a batch have no targets, even for a loss that counts padding."""

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.data.batching.batch_plan import FILLING, PlannedBatch, Sharing
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.losses.token_objective import TokenObjective
from tests.support.small_runs import logged

TOTAL = "num_total_target_tokens"


def row(length: int) -> Example:
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return Example(tokens, tokens, np.ones(length, np.float32), prefix_length=0)


@pytest.mark.parametrize(
    "rows", [np.arange(6), np.array([[0, 1], [2, 3], [4, FILLING], [5, FILLING]])]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_mesh_pads_batches_with_rows_that_do_not_count(rows, accumulate):
    examples = [row(length) for length in (3, 1, 2, 4, 1, 2)]
    divided = Sharing(accumulate, row_parts=8).pad_rows(rows)
    assert len(divided) == accumulate * 8
    for planned in (rows, divided):
        batch = build_batch(examples, PlannedBatch(planned, 7, 7, 7), pad_id=0)
        assert TokenObjective(normalizer=TOTAL).divisor(batch) == len(rows) * 7


@pytest.mark.exhaustive
def test_a_token_budget_has_the_same_losses_on_a_mesh(files, tmp_path):
    choices = {
        "DataSource.batch_tokens": 120,
        "DataSource.buckets": 1,
        "TokenObjective.normalizer": TOTAL,
        "Run.evaluation": None,
        "Run.keep_best": None,
        "Run.steps": 4,
    }
    curves = []
    for mesh in ("None", "@MeshShape()"):
        arguments = files.arguments(tmp_path / mesh, **choices)
        chosen = ["--gin.Run.objective=@TokenObjective()", f"--gin.Run.mesh={mesh}"]
        assert main(["train", *arguments, *chosen]) == 0
        curves.append([x["loss"] for x in logged(tmp_path / mesh) if "loss" in x])
    np.testing.assert_allclose(*curves, rtol=1e-5)
