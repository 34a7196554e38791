"""Settings of pipelines: what they choose, and what is refused with which numbers."""

import pytest

from prompt_tuning.config.flat_config import flat_config
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.operative_config import complete_config
from prompt_tuning.core.errors import InputError
from prompt_tuning.pipeline.pipeline_plan import check_blocks
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pipeline import Pipeline
from prompt_tuning.sharding.mesh import build_mesh

GIVEN = {
    "model": "bundled:skills-decoder",
    "train": ["a.jsonl"],
    "eval": ["b.jsonl"],
    "out": "run",
}


def run_of(*bindings):
    """Returns the run of a few options and of bindings."""
    files, lines = flat_config(GIVEN, bindings)
    return read_run(files, bindings, defaults=lines)


def test_bindings_alone_turn_the_pipeline_on():
    run = run_of("MeshShape.stage = 4", "Pipeline.schedule = '1f1b'")
    assert run.stages == 4
    assert run.pipeline == Pipeline(schedule="1f1b")
    assert "Run.pipeline = @Pipeline()" in complete_config()


def test_stages_without_settings_have_the_default_ones():
    assert run_of("MeshShape.stage = 2").pipeline == Pipeline()
    assert run_of().pipeline is None


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["MeshShape.stage = 0"], "MeshShape.stage is 0, expected at least 1"),
        (["Pipeline.schedule = 'gpipe'"], "Run.pipeline is set, but the mesh has one"),
        (["Pipeline.schedule = 'zb-h2'"], "is 'zb-h2', expected one of 'auto', 'none'"),
        (["Pipeline.microbatches = 0"], "microbatches is 0, expected a number from 1"),
        (["Pipeline.microbatches = 4", "Run.accumulate = 3"], "4, which is not a mult"),
        (
            ["Pipeline.schedule = '1f1b-2'", "Run.accumulate = 7"],
            "4 stages needs at least 8 micro-batches, but there are 7",
        ),
        (
            ["Pipeline.schedule = 'zb-h1'", "Pipeline.two_stage = False"],
            "'zb-h1', whose backward pass has two parts, but Pipeline.two_stage is Fa",
        ),
        (
            ["Pipeline.joined_p2 = True", "Pipeline.two_stage = False"],
            "nothing is postponed to the end",
        ),
        (["Pipeline.layers = [1, 2, 3]"], "blocks of 3 stages, but the mesh has 4"),
        (["Pipeline.layers = [1, 2, 0, 1]"], "of Pipeline.layers is 0, expected a n"),
        (
            ["Pipeline.virtual = 2", "Run.accumulate = 6"],
            "multiple of the 4 stages, but it is 6: set Run.accumulate or Pi",
        ),
        (
            ["Pipeline.virtual = 2", "Pipeline.schedule = 'zb-h1'"],
            "virtual is 2 and Pipeline.schedule is 'zb-h1', but only '1f1b'",
        ),
        (
            ["Pipeline.virtual = 2", "Pipeline.joined_p2 = True"],
            "belong to several chunks: set joined_p2 to False, or virtual to 1",
        ),
        (
            [
                "Pipeline.virtual = 2",
                "Run.accumulate=4",
                "Pipeline.layers = [1, 1, 1, 1]",
            ],
            "4 with 2 chunks each .Pipeline.virtual.: expected 8 numbers",
        ),
        (["Pipeline.virtual = 0"], "virtual is 0, expected a number from 1"),
        (["Pipeline.layers = 4"], "Pipeline.layers is 4, an int; expected a list"),
        (
            ["Pretrained.weights = 'streamed'", "Pipeline.two_stage = True"],
            "weights is 'streamed' and MeshShape.stage is 4",
        ),
    ],
)
def test_bad_settings_are_refused_with_their_numbers(bindings, message):
    stage = "MeshShape.stage = 4"
    alone = bindings == ["Pipeline.schedule = 'gpipe'"]
    if not alone and not bindings[0].startswith("MeshShape"):
        bindings = [stage, *bindings]
    with pytest.raises(InputError, match=message):
        run_of(*bindings)


def test_stages_and_blocks_must_agree():
    with pytest.raises(InputError, match="stage is 5, but the model has 4 blocks"):
        check_blocks(None, 5, 4)
    with pytest.raises(InputError, match=r"\[1, 2\], together 3 blocks, but the"):
        check_blocks((1, 2), 2, 4)
    check_blocks((1, 3), 2, 4)
    with pytest.raises(
        InputError, match=r"together 6 chunks.* set virtual to 2 or les"
    ):
        check_blocks(None, 2, 4, 3)


def test_two_parts_are_chosen_where_weights_take_more_than_a_tenth():
    assert Pipeline().in_two_parts(0.46)
    assert not Pipeline().in_two_parts(0.025)
    assert Pipeline(two_stage=True).in_two_parts(0.0)
    assert not Pipeline(two_stage=False).in_two_parts(0.5)
    assert Pipeline(schedule="zb-h1").in_two_parts(0.0)
    assert Pipeline().schedule_for(two_stage=True) == "zb-h1"
    assert Pipeline().schedule_for(two_stage=False) == "1f1b"
    assert Pipeline(schedule="gpipe").schedule_for(two_stage=True) == "gpipe"
    assert Pipeline(virtual=2).schedule_for(two_stage=True) == "1f1b"


def test_stages_are_the_outermost_axis_and_none_without_several():
    devices = list(range(8))
    mesh = MeshShape(stage=2, data=2, tensor=2)
    assert mesh.sizes == {"stage": 2, "data": 2, "fsdp": 1, "tensor": 2}
    assert list(MeshShape().sizes) == ["data", "fsdp", "tensor"]
    assert mesh.without_stages == MeshShape(data=2, fsdp=2, tensor=2)
    with pytest.raises(InputError, match=r"8, is not a multiple of 3.*stage 3 x data"):
        build_mesh(MeshShape(stage=3), devices)
    with pytest.raises(InputError, match=r"stage 2 x data 3 x fsdp 1.*takes 6 devices"):
        build_mesh(MeshShape(stage=2, data=3), devices)
