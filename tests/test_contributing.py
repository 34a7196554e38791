"""Adds a prompt, a loss and a command to a copy of the package, as documented."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMPT = '''"""Soft prompts in units of another size."""

from jaxtyping import Array, Float, Key

from prompt_tuning.core.number_ranges import AnyNumber, AxisLength
from prompt_tuning.prompts.soft import SoftPrompt


class ScaledPrompt(SoftPrompt):
    """Vectors that are multiplied by a constant.

    Attributes:
      scale: the constant.
    """

    def __init__(self, key, vocabulary, *, length: AxisLength, scale: AnyNumber = 2.0):
        """Initializes the vectors from uniform numbers."""
        super().__init__(key, vocabulary, length=length)
        self.scale = scale

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the scaled vectors."""
        return self.scale * super().__call__(key)
'''
PROMPT_CONFIG = """\
# Soft prompt in units of another size.
include 'prompts/soft.gin'
Run.prompt = @ScaledPrompt
ScaledPrompt.length = %PROMPT_LENGTH
ScaledPrompt.scale = %SCALE
SCALE = 3.0
"""
LOSS = '''"""A loss for tests."""

import dataclasses

from prompt_tuning.core.number_ranges import ShareBelowOne
from prompt_tuning.losses.token_objective import TokenObjective


@dataclasses.dataclass(frozen=True)
class SmoothObjective(TokenObjective):
    """Cross-entropy with more smoothing."""

    label_smoothing: ShareBelowOne = 0.3
'''
LOSS_CONFIG = """\
# Cross-entropy with more smoothing.
Run.objective = @SmoothObjective()
"""


COMMAND = '''"""`prompt-tuning count`: counts the shipped configs."""

import argparse

from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.config.shipped_configs import list_configs

HELP = "count the shipped configs"
HEADING = "Tune"
USES_JAX = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds no option."""


def run(options: argparse.Namespace) -> int:
    """Prints the number."""
    refuse_bindings(options)
    print(len(list_configs()))
    return 0
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in ("prompt_tuning", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    package, configs = folder / "prompt_tuning", folder / "configs"
    (package / "prompts/scaled.py").write_text(PROMPT)
    (configs / "prompts/scaled.gin").write_text(PROMPT_CONFIG)
    (package / "losses/smooth.py").write_text(LOSS)
    (configs / "losses/smooth.gin").write_text(LOSS_CONFIG)
    (package / "cli/count.py").write_text(COMMAND)
    lines = [{"prompt": "ab=", "completion": "AB"}] * 4
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def command(folder: Path, *words: str) -> str:
    """Runs the command of a copy and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "prompt_tuning", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_module_and_a_config_add_a_method_and_a_loss(copy):
    shown = command(copy, "train", "--help")
    assert "Soft prompt in units of another size" in shown
    assert "Cross-entropy with more smoothing" in shown
    data = ["--model", "bundled:skills-decoder", "--train", "train.jsonl"]
    chosen = ["--method", "scaled", "--loss", "smooth", "--prompt_length", "2"]
    sizes = ["--gin.SCALE=0.5", "--steps", "1", "--batch_size", "4", "--out", "run"]
    command(copy, "train", *data, *chosen, *sizes)
    config = (copy / "run/config.gin").read_text()
    assert "Run.prompt = @ScaledPrompt" in config and "SCALE = 0.5" in config
    assert "Run.objective = @SmoothObjective()" in config
    command(copy, "generate", "--run", "run", "--new_tokens", "1", "ab=")


@pytest.mark.slow
def test_the_site_has_a_page_for_an_added_prompt_and_loss(copy):
    code = (
        "from scripts import build_docs as site; site.check_names(); "
        "pages = site.pages_of_names(); "
        "print('ScaledPrompt' in pages['methods'], "
        "'SmoothObjective' in pages['objectives'])"
    )
    paths = os.pathsep.join([str(copy), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_module_adds_a_command(copy):
    assert "count the shipped configs" in command(copy, "--help")
    configs = (copy / "configs").rglob("*.gin")
    assert command(copy, "count").split() == [str(len(list(configs)))]
