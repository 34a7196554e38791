"""`prompt-tuning memory`, which reports the memory of a run before it starts."""

import dataclasses
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.cli import memory as memory_command
from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.training import memory_estimate
from tests.support.small_runs import DECODER, LENGTH, Files, write_model

WIDTH = 16


def arguments(files: Files, *more: str, model=None, **macros) -> list[str]:
    """Returns arguments of a run whose directory is never created."""
    given = files.arguments(files.train.parent / "absent", model, **macros)
    return ["memory", *given, *more]


def table(printed: str) -> dict[str, list[str]]:
    """Returns the rows of the table by their first cells."""
    lines = [line.strip("│ ") for line in printed.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def bytes_of(text: str) -> float:
    return memory_command.parse_size(text.replace(",", "").replace(" ", ""))


@pytest.mark.slow
def test_the_memory_of_a_run_that_fits_is_reported(files, tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=4))
    given = ("--limit", "80GB", "--policy", "nothing")
    code = main(arguments(files, *given, model=model))
    printed = capsys.readouterr().out
    assert code == 0
    assert "32 training" not in printed
    assert "largest batch: 8 rows of " in printed
    stored = open_safetensors(model).values()
    frozen = sum(4 * int(np.prod(tensor.shape)) for tensor in stored)
    match = re.search(r"frozen parameters +(.+)", printed)
    assert match and bytes_of(match[1]) == pytest.approx(frozen, rel=0.01)
    assert f"trained parameters       {LENGTH * WIDTH * 4} B" in printed
    assert "memory of a device    80.00 GB" in printed
    saved, again = (table(printed)[name] for name in ("none *", "nothing"))
    assert bytes_of(again[0]) < bytes_of(saved[0])
    assert bytes_of(saved[2]) > frozen + bytes_of(saved[0])
    assert [saved[3], again[3]] == ["0%", "0%"]
    assert not (files.train.parent / "absent").exists()
    # The projections take 0.5 bytes and their share of a scale; the rest takes 2.
    sizes = dict(re.findall(r"^  (\w+) +(.+)  fits$", printed, re.MULTILINE))
    assert bytes_of(sizes["float32"]) == pytest.approx(bytes_of(saved[2]), rel=0.01)
    wide, half, int8, int4, _ = map(bytes_of, sizes.values())
    assert wide > half > int8 > int4
    assert "the widest that fits is float32" in printed


def test_sizes_of_weights_do_not_overflow():
    leaf = jax.ShapeDtypeStruct((80, 8192, 28672), np.uint8)
    assert memory_estimate._bytes(leaf) == 80 * 8192 * 28672


@pytest.mark.slow
def test_a_run_that_does_not_fit_has_its_own_exit_code(files, capsys):
    assert main(arguments(files, "--limit", "10KB", "--policy", "none")) == 1
    assert table(capsys.readouterr().out)["none *"][3] == "no"


@pytest.mark.exhaustive
def test_the_configured_policies_come_first_and_steps_are_timed(files, capsys):
    choices = {"Pretrained__encoder_rematerialization": None}
    given = arguments(files, "--time", "--policy", "dots", model=files.t5, **choices)
    given += ["--gin.Rematerialization.policy='nothing'"]
    given += ["--gin.Rematerialization.offload=True"]
    assert main(given) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows) == ["nothing+offload *", "dots"]
    assert all(re.fullmatch(r"[\d,]+ ms", row[4]) for row in rows.values())


@pytest.mark.exhaustive
def test_each_device_of_a_mesh_has_a_shard(files, capsys):
    def frozen(*more):
        assert main(arguments(files, "--policy", "none", *more)) == 0
        match = re.search(r"frozen parameters +(.+)", capsys.readouterr().out)
        assert match
        return bytes_of(match[1])

    mesh = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.fsdp=2"]
    if jax.device_count() > 1:
        assert frozen(*mesh) < 0.7 * frozen()


def test_a_config_sets_the_policy_of_each_stack(files):
    bindings = [
        "Rematerialization.policy = 'dots'",
        "Pretrained.encoder_rematerialization = @encoder/Rematerialization()",
        "encoder/Rematerialization.policy = 'names'",
        "encoder/Rematerialization.names = ['query']",
        *(f"{n} = 'x'" for n in ("MODEL", "TRAIN_FILES", "EVALUATION_FILES")),
    ]
    run = gin_files.read_run(["runs/first_prompt.gin"], bindings, "directory")
    assert run.model.rematerialization == Rematerialization(policy="dots")
    encoder = Rematerialization(policy="names", names=("query",))
    assert run.model.encoder_rematerialization == encoder


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80e9), ("16 GiB", 16 * 2**30), ("1.5kb", 1500), ("12", 12)],
)
def test_sizes_are_read_with_their_units(text, expected):
    assert memory_command.parse_size(text) == expected


@pytest.mark.parametrize("text", ["much", "80XB", "0GB", "-1GB", "GB"])
def test_other_sizes_are_refused_with_the_units(text):
    with pytest.raises(
        InputError, match="a number above 0 with one of the units B, KB, KiB"
    ):
        memory_command.parse_size(text)


def test_a_streamed_model_is_refused(files, capsys):
    given = arguments(files, Pretrained__weights="streamed")
    assert main(given) == 2
    assert "give --gin.Pretrained.weights=" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from prompt_tuning.cli import main; main.build_parser(); "
        "print({'jax', 'numpy', 'rich'} & set(sys.modules))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "set()"


@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_described_and_drawn(files, tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=5))
    stages = ("--gin.MeshShape.stage=4", "--gin.Run.mesh=@MeshShape()")
    given = arguments(files, "--pipeline", *stages, model=model, Run__accumulate=3)
    picture = tmp_path / "timeline.svg"
    assert main([*given, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    # 8 devices, of which each stage has 2 along data.
    assert "micro-batch: 4 rows of " in printed
    blocks = [name for name in table(printed) if name[0].isdigit()]
    assert sorted(name.partition(": ")[2] for name in blocks) == [
        *["1 block"] * 3,
        "2 blocks",
    ]
    in_flight = [row[4].partition(" x ")[0] for row in table(printed).values()]
    assert in_flight == ["3", "3", "2", "1"]
    assert re.search(r"stage 0  P?F0[-.\w]+B0", printed)
    assert "1f1b, backward pass in one part, 3 micro-batches; bubble " in printed
    assert picture.read_text().startswith("<svg")


@pytest.mark.slow
def test_the_chunks_of_each_stage_are_described(files, tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=4))
    more = ["--gin.MeshShape.stage=2", "--gin.Run.mesh=@MeshShape()"]
    more += ["--gin.Run.pipeline=@Pipeline()", "--gin.Pipeline.virtual=2"]
    given = arguments(files, "--pipeline", *more, model=model, Run__accumulate=2)
    assert main(given) == 0
    printed = capsys.readouterr().out
    rows = {name: row for name, row in table(printed).items() if name[0].isdigit()}
    assert list(rows) == [f"{chunk}: 1 block" for chunk in ("0a", "0b", "1a", "1b")]
    # Weights and what is held are those of the stage, in its first row.
    assert [bool(row[3]) for row in rows.values()] == [True, False] * 2
    assert "1f1b with 2 interleaved chunks of each stage, backward pass in" in printed
    assert "a to b chunk of the stage" in printed


@pytest.mark.exhaustive
def test_recomputed_activations_are_reported_where_p2_holds_them(
    files, tmp_path, capsys
):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))
    more = ["--gin.MeshShape.stage=2", "--gin.Run.mesh=@MeshShape()"]
    more += ["--gin.ParameterGroup.regexes=['.*']", "--gin.Run.prompt=None"]
    again = ["--gin.Pretrained.rematerialization=@Rematerialization()"]
    again += ["--gin.Rematerialization.policy='nothing'"]
    sizes = []
    for policy in ([], again):
        given = arguments(files, "--pipeline", *more, *policy, model=model)
        assert main(given) == 0
        rows = list(table(capsys.readouterr().out).values())
        cells = [row[column].partition(" x ")[2] for row in rows for column in (4, 5)]
        sizes.append([bytes_of(cell) for cell in cells])
    (first, _, last, held), (first_again, _, last_again, held_again) = sizes
    assert first_again < first
    assert last_again < last
    assert held_again >= held


@pytest.mark.slow
def test_what_a_pipeline_cannot_use_is_refused(files, tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(DECODER, layers=2))

    def refused(*more):
        assert main(arguments(files, *more, model=model)) == 2
        return " ".join(capsys.readouterr().err.split())

    stages = ("--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.stage=4")
    assert "the run has one stage: give --gin.MeshShape.stage=N" in refused(
        "--pipeline"
    )
    assert "--picture draws the timeline of --pipeline" in refused("--picture", "a.svg")
    assert "stage is 4, but the model has 2 blocks" in refused("--pipeline", *stages)
    three = (stages[0], "--gin.MeshShape.stage=3")
    assert "the number of devices, 8, is not a multiple of 3" in refused(
        "--pipeline", *three
    )
    assert "without --pipeline supports one stage only" in refused(*stages)
    two = (stages[0], "--gin.MeshShape.stage=2", "--gin.Run.pipeline=@Pipeline()")
    two = (*two, "--gin.Pipeline.microbatches=4")
    assert "2 rows, which cannot be divided among the 4 devices of a stage" in refused(
        "--pipeline", *two
    )
    layers = (stages[0], "--gin.MeshShape.stage=2", "--gin.Pipeline.layers=[1, 2]")
    bound = (*layers, "--gin.Run.pipeline=@Pipeline()")
    assert "[1, 2], together 3 blocks, but the model has 2" in refused(
        "--pipeline", *bound
    )
    rows = ("--gin.Run.accumulate=1", "--gin.Pipeline.microbatches=3", *bound[:2])
    assert "8 rows, which cannot be divided among 3 micro-batches" in refused(
        "--pipeline", *rows, "--gin.Run.pipeline=@Pipeline()"
    )
