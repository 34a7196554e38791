"""Our defaults equal the defaults of the PEFT release that the project names."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prompt_tuning.adapters.peft.peft_settings import DEFAULTS

VERSION = DEFAULTS["LORA"]["peft_version"]
CLASSES = {
    "PROMPT_TUNING": "PromptTuningConfig",
    "PREFIX_TUNING": "PrefixTuningConfig",
    "CARTRIDGE": "CartridgeConfig",
    "MULTITASK_PROMPT_TUNING": "MultitaskPromptTuningConfig",
    "LORA": "LoraConfig",
    "IA3": "IA3Config",
}
SCRIPT = f"""
import json, peft
made = {{k: getattr(peft, c)().to_dict() for k, c in {CLASSES}.items()}}
print(json.dumps([peft.__version__, made], default=list))
"""


def test_the_bench_extra_brings_the_release_that_we_write_for():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    (needed,) = (x for x in extras["bench"] if x.startswith("peft"))
    release = ".".join(VERSION.split(".")[:2])
    assert needed == f"peft>={release}"


@pytest.fixture(scope="module")
def theirs():
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


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
