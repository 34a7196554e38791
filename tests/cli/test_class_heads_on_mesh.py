"""Class heads on meshes have the losses and the probabilities of one device."""

import functools

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from tests.cli.test_class_heads import PAIRS
from tests.support.encoder_folders import write_bert
from tests.support.exhaustive import sample
from tests.support.small_runs import logged, write_pairs

pytestmark = pytest.mark.slow
LABELS = ("--labels", "low", "high")
RUNS = {
    "decoder": ("decoder", "--method", "lora", "--head", "last"),
    "beside a prompt": ("decoder", "--method", "soft", "--head", "mean"),
    "tokens": ("decoder", "--method", "lora", "--head", "last", "--problem", "tokens"),
    "t5": ("t5", "--method", "lora", "--head", "last"),
    "t5 tokens": ("t5", "--method", "lora", "--head", "last", "--problem", "tokens"),
    "bert": ("bert", "--method", "class_head", "--head", "first"),
}
# The meshes have all eight devices of the tests.
MESHES = {
    "data 8": {"data": 8},
    "data 4, tensor 2": {"data": 4, "tensor": 2},
    "fsdp 4, tensor 2": {"data": 1, "fsdp": 4, "tensor": 2},
}
CASES = [
    ("beside a prompt", "data 4, tensor 2"),
    ("tokens", "fsdp 4, tensor 2"),
    ("t5", "fsdp 4, tensor 2"),
    ("bert", "data 8"),
    ("decoder", "data 4, tensor 2"),
    ("decoder", "data 8"),
    ("decoder", "fsdp 4, tensor 2"),
    ("bert", "fsdp 4, tensor 2"),
    ("t5 tokens", "fsdp 4, tensor 2"),
]


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """Trains a case on a mesh, or without one, once."""
    folder = tmp_path_factory.mktemp("runs")
    places = {"decoder": files.decoder, "t5": files.t5}
    places["bert"] = write_bert(folder / "bert")
    data = str(write_pairs(folder / "pairs.jsonl", PAIRS))

    @functools.cache
    def train(case: str, mesh: str | None):
        model, *more = RUNS[case]
        given = ["--model", str(places[model]), "--train", data]
        # One case evaluates on the mesh, too; others would compile the same for it.
        given += ["--eval", data] if case == "tokens" else []
        rest = ["--steps", "2", "--batch_size", "8", "--log_every", "1"]
        out = folder / f"{case} {mesh}"
        on = [f"--gin.MeshShape.{x}={n}" for x, n in MESHES.get(mesh or "", {}).items()]
        assert (
            main(["train", *given, *more, *LABELS, *rest, *on, "--out", str(out)]) == 0
        )
        return [line["loss"] for line in logged(out) if "loss" in line], out

    return train


@pytest.mark.parametrize(("case", "mesh"), sample(4, CASES))
def test_losses_and_probabilities_are_those_of_one_device(case, mesh, trained):
    (one, alone), (many, out) = trained(case, None), trained(case, mesh)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    texts = [text for text, _ in PAIRS]
    first, second = (pt.load_tuned(str(x)).predict(texts) for x in (alone, out))
    for a, b in zip(first, second, strict=True):
        expected = a.probabilities
        assert b.probabilities == pytest.approx(expected, abs=1e-5)
