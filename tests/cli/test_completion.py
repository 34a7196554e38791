"""Completions, asked for as the shell does it: by argcomplete's variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completed(line: str, folder: Path) -> list[str]:
    """Returns the completions of a command line that ends at the cursor."""
    answer = folder / "answer"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    code = "from prompt_tuning.cli.main import main; main([])"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, cwd=folder, check=True
    )
    return answer.read_text().split("\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tr", ["train"]),
        ("train --learn", ["--learning_rate"]),
        ("train --method lor", ["lora"]),
        ("train --loss class_h", ["class_hinge"]),
        ("train --on_too_long sk", ["skip"]),
        ("configs adapters/l", ["adapters/lora.gin"]),
        ("train --gin_file runs/first", ["runs/first_prompt.gin"]),
        ("train --train mine", ["mine.jsonl"]),
    ],
)
def test_names_and_values_are_completed(line, expected, tmp_path):
    (tmp_path / "mine.jsonl").touch()
    names = [x.strip() for x in completed(f"prompt-tuning {line}", tmp_path)]
    assert names == expected
