"""Our defaults equal the defaults of the PEFT release that the project names."""

# PEFT is only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import tomllib
from pathlib import Path

import pytest

from prompt_tuning.adapters.peft.peft_settings import DEFAULTS
from tests.support.adapters import unheard_warnings

VERSION = DEFAULTS["LORA"]["peft_version"]
CLASSES = {
    "PROMPT_TUNING": "PromptTuningConfig",
    "PREFIX_TUNING": "PrefixTuningConfig",
    "CARTRIDGE": "CartridgeConfig",
    "MULTITASK_PROMPT_TUNING": "MultitaskPromptTuningConfig",
    "LORA": "LoraConfig",
    "IA3": "IA3Config",
}


def test_the_bench_extra_brings_the_release_that_we_write_for():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    (needed,) = (x for x in extras["bench"] if x.startswith("peft"))
    release = ".".join(VERSION.split(".")[:2])
    assert needed == f"peft>={release}"


@pytest.fixture(scope="module")
def theirs():
    with unheard_warnings():
        import peft

        made = {kind: getattr(peft, name)().to_dict() for kind, name in CLASSES.items()}
    return peft.__version__, json.loads(json.dumps(made, default=list))


@pytest.mark.torch
@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_equal_pefts(kind, theirs):
    version, defaults = theirs
    # PEFT saves adapters with inference_mode set.
    expected = defaults[kind] | {"inference_mode": True, "peft_version": VERSION}
    assert expected.pop("peft_type") == kind
    if version != VERSION:
        expected = {name: expected[name] for name in DEFAULTS[kind]}
    assert expected == DEFAULTS[kind]
