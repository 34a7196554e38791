"""Runs that learn from rewards of their own answers, on a mesh."""

from typing import Any

import numpy as np
import optax
import pytest

import prompt_tuning as pt
from tests.rollouts.test_rollout_runs import answers_of, even, reinforce
from tests.support.small_runs import logged

MESHES = [
    ("decoder", {"data": 4, "tensor": 2}),
    ("t5", {"data": 2, "fsdp": 2, "tensor": 2}),
]


def losses_and_answers(files, directory, **settings) -> tuple[list[float], list[dict]]:
    """Trains a tiny model for a few steps with SGD, which amplifies no rounding."""
    reinforce(files, directory, 4, optimizer=optax.sgd(1.0), objective=GRPO, **settings)
    losses = [line["loss"] for line in logged(directory) if "loss" in line]
    return losses, answers_of(directory)


GRPO = pt.GRPO(beta=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_a_mesh_samples_and_learns_what_one_device_does(files, tmp_path, family, mesh):
    settings: dict[str, Any] = {
        "model": getattr(files, family),
        "rewards": [even, "logprob"],
        "rollouts": {"weights": [1, 0.1], "stop": ["e"], "resample": 1},
    }
    expected, answers = losses_and_answers(files, tmp_path / "one", **settings)
    on_mesh = pt.MeshShape(**mesh)
    losses, found = losses_and_answers(
        files, tmp_path / "mesh", mesh=on_mesh, **settings
    )
    for name in ("prompt", "completion", "tokens", "truncated"):
        assert [x[name] for x in found] == [x[name] for x in answers]
    assert {x["truncated"] for x in answers} == {True, False}
    for name in ("reward", "advantage"):
        drawn, given = ([x[name] for x in lines] for lines in (found, answers))
        np.testing.assert_allclose(drawn, given, atol=1e-4)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(losses, expected, atol=1e-5)
