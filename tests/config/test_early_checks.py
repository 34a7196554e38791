"""Mistakes in a config are found without importing JAX."""

import subprocess
import sys

import pytest

from prompt_tuning.config.early_checks import check_config
from prompt_tuning.core.errors import InputError

FILES = ["runs/first_prompt.gin"]


@pytest.fixture
def bindings(tmp_path):
    data = tmp_path / "data.jsonl"
    data.touch()
    return [
        "MODEL = 'bundled:skills-decoder'",
        f"TRAIN_FILES = '{data}'",
        f"EVALUATION_FILES = ['{data}']",
        f"RUN_DIRECTORY = '{tmp_path / 'run'}'",
    ]


def refused(*bindings: str, files=FILES, **options) -> str:
    with pytest.raises(InputError) as caught:
        check_config(files, bindings, **options)
    return str(caught.value)


def test_a_correct_config_passes(bindings):
    check_config(FILES, bindings)
    check_config([*FILES, "adapters/lora.gin"], bindings)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("SoftPrompt.lenght = 3", "did you mean length"),
        ("SoftPromt.length = 3", "did you mean SoftPrompt"),
        ("STEP = 3", "did you mean STEPS"),
        ("Run.steps = '3'", "Run.steps is '3', a str; expected int"),
        ("STEPS = '3'", "Run.steps is '3', a str; expected int"),
        ("adafactor.learning_rate = 'x'", "is 'x', a str; expected a number"),
        ("adamw.learning_rate = 0.1", "has no effect: the run does not use adamw"),
        ("TRAIN_FILES = 'absent.jsonl'", "data file absent.jsonl not found"),
        ("TRAIN_FILES = ['a', 3]", "DataSource.files is ['a', 3], a list"),
        ("EVALUATION_FILES = 'absent.jsonl'", "data file absent.jsonl not found"),
        ("MODEL = 'absent'", "absent does not exist; expected a Hugging Face folder"),
        ("MODEL = 'bundled:absent'", "no model 'absent' is bundled; available: skills"),
        ("MODEL = 'owner/name'", "`hf download owner/name --local-dir name`"),
    ],
)
def test_mistakes(binding, message, bindings):
    assert message in refused(*bindings, binding)


def test_unset_macros_are_named():
    assert "it needs EVALUATION_FILES, MODEL, RUN_DIRECTORY" in refused()


def test_paths_that_the_command_does_not_read_are_not_checked(bindings):
    bindings.append("TRAIN_FILES = 'absent.jsonl'")
    check_config(FILES, bindings, omitted=["data"])


def test_the_file_of_a_model_is_refused_with_its_folder(bindings, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.touch()
    message = refused(*bindings, f"MODEL = '{weights}'")
    assert message == f"{weights} is a file of a model; give its folder, {tmp_path}"


def test_nothing_heavy_is_imported(bindings):
    script = (
        "import sys\n"
        "from prompt_tuning.config.early_checks import check_config\n"
        f"check_config({FILES}, {bindings})\n"
        "assert not {'jax', 'numpy', 'flax', 'optax'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
