"""Commands name the output that a read-only disk refuses, and still read from one."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""Runs a command that may mount something that only itself sees."""


def can_mount(folder) -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True).returncode == 0


SCRIPT = """
import json, subprocess, sys
from prompt_tuning.cli.main import main
disk, commands = sys.argv[1], json.loads(sys.argv[2])
mount = ["mount", "--bind", disk, disk]
subprocess.run(mount, check=True)
subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)
for command in commands:
    print(main(command), file=sys.stderr)
"""


@pytest.mark.slow
def test_every_command_that_writes_names_its_output(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this machine does not let users mount a read-only disk")
    data, prompt = disk / "data.jsonl", disk / "prompt.npy"
    data.write_text('{"prompt": "ab", "completion": "AB"}\n')
    np.save(prompt, np.ones((2, 3), np.float32))
    model = ["--model", "bundled:skills-decoder"]
    train = [*model, "--train", str(data), "--steps", "1", "--out"]
    writing = {
        "run": ["train", *train],
        "sweep": ["sweep", "--vary", "seed=0,1", *train],
        "table": ["prepare", "--tokenizer", model[1], str(data), "--output"],
        "texts.jsonl": ["generate", *model, "--input", str(data), "--output"],
        "prompt.safetensors": ["convert", str(prompt)],
    }
    commands = [[*given, str(disk / name)] for name, given in writing.items()]
    commands += [["show", *model, str(data)]]
    script = [*NAMESPACE, sys.executable, "-c", SCRIPT, str(disk), json.dumps(commands)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=300)
    expected = [
        line
        for name, (command, *_) in writing.items()
        for line in (
            f"prompt-tuning {command}: {disk / name} cannot be written: "
            "Read-only file system; choose another place, or check its permissions",
            "2",
        )
    ]
    assert ended.stderr.splitlines() == [*expected, "0"]
