"""Which runs a directory belongs to."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.training.run_directory import CONFIG_FILE, claim

CONFIG = """
# Parameters for Run:
Run.mesh = None
Run.steps = 10
Pretrained.checkpoint = 'model'
Pretrained.weights = 'device'
Run.directory = 'here'
"""


def changed(*lines: str) -> str:
    """The config with other lines, each in place of the one of its name."""
    names = [line.partition(" = ")[0] for line in lines]
    kept = [
        line for line in CONFIG.splitlines() if line.partition(" = ")[0] not in names
    ]
    return "\n".join([*kept, *lines])


def test_a_run_goes_on_wherever_it_is_computed(tmp_path):
    claim(tmp_path / "run", CONFIG, "the model", {})
    elsewhere = changed(
        *("Run.mesh = @MeshShape()", "MeshShape.tensor = 2", "AxisRules.rules = ()"),
        *("Pretrained.weights = 'streamed'", "Run.checkpoint_form = 'orbax'"),
        *("encoder/Rematerialization.policy = 'dots'", "Run.directory = 'there'"),
    )
    claim(tmp_path / "run", elsewhere, "the model", {})
    by_macro = changed("TENSOR = 4", "MeshShape.tensor = %TENSOR")
    claim(tmp_path / "run", by_macro, "the model", {})
    long = changed(
        "AxisRules.rules = \\", "    [('rank', 'tensor'),", "     ('rank', None)]"
    )
    claim(tmp_path / "run", long, "the model", {})
    assert (tmp_path / "run" / CONFIG_FILE).read_text() == CONFIG


@pytest.mark.parametrize(
    "line",
    [
        *("Run.steps = 20", "Pretrained.checkpoint = 'other'", "MeshShapes.x = 2"),
        *("TENSOR = 2", "Run.data = %MeshShape.tensor"),
    ],
)
def test_another_run_is_refused_with_what_differs(line, tmp_path):
    claim(tmp_path / "run", CONFIG, "the model", {})
    with pytest.raises(InputError, match="another config") as problem:
        claim(tmp_path / "run", changed(line), "the model", {})
    assert f"+{line}" in str(problem.value)
