"""The shipped recipe, Adafactor at a rate of 0.3, with every split of a batch.

Adafactor divides a gradient by its magnitude, so that rounding grows with every step:
the losses agree for some steps, the final metric in the end.
"""

from pathlib import Path

import pytest

from prompt_tuning.cli.main import main
from scripts import skills
from scripts.skill_tuning import write_pairs
from tests.support.small_runs import logged

ONE = ("--gin.BATCH_SIZE=16",)
MESH = (*ONE, "--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.fsdp=2")
MESH += ("--gin.MeshShape.data=2", "--gin.MeshShape.tensor=2")
HALVES = ("--gin.BATCH_SIZE=8", "--gin.Run.accumulate=2")


def trained(run: Path, data: dict[str, str], split: tuple[str, ...]) -> list[dict]:
    """Trains the bundled decoder; returns what was logged of every step."""
    macros = [f"--gin.{name}='{file}'" for name, file in data.items()]
    settings = ["--gin.STEPS=100", "--gin.Run.log_every=1"]
    settings.append(f"--gin.RUN_DIRECTORY='{run}'")
    config = ["--gin_file", "runs/skills_decoder.gin"]
    assert main(["train", *config, *macros, *settings, *split]) == 0
    return logged(run)


@pytest.mark.exhaustive
def test_losses_agree_for_four_steps_and_the_final_metric_in_the_end(tmp_path):
    words = skills.splits(0, train=256, dev=64, test=1)
    data = {
        "TRAIN_FILES": write_pairs(tmp_path / "train.jsonl", "tail", words.train),
        "EVALUATION_FILES": write_pairs(tmp_path / "dev.jsonl", "tail", words.dev),
    }
    splits = {"one": ONE, "mesh": MESH, "halves": HALVES}
    logs = {name: trained(tmp_path / name, data, how) for name, how in splits.items()}
    losses, matches = (
        {
            name: [line[metric] for line in lines if metric in line]
            for name, lines in logs.items()
        }
        for metric in ("loss", "evaluation/exact_match")
    )
    for name in ("mesh", "halves"):
        assert losses[name][:4] == pytest.approx(losses["one"][:4], rel=1e-5)
        assert losses[name][4:8] == pytest.approx(losses["one"][4:8], rel=1e-3)
        # Each split follows another path from there.
        assert losses[name][20] != pytest.approx(losses["one"][20], rel=0.05)
    for name in splits:
        assert matches[name][-1] >= 0.95
