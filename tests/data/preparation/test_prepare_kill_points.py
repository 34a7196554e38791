"""A preparation that is ended at any file-system call is finished by repeating it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[3]

DRIVER = """
import hashlib, os, shutil, sys
from pathlib import Path
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation, Share, Splits, TokenizerChoice)
from prompt_tuning.data.preparation import output_files

folder, step = Path(sys.argv[1]), int(sys.argv[2])
output = folder / "results" / "out"
output_files._write_plots = lambda *_: None  # they take most of the time
CHANGES = {
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod",
    "shutil.rmtree", "os.utime",
}
state = {"left": -1}

def count(event, arguments):
    if state["left"] < 0 or not (
        event in CHANGES or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        return
    if not state["left"]:
        os._exit(137)
    state["left"] -= 1

sys.addaudithook(count)

def run(kill_at):
    \"\"\"Runs in another process; returns its exit code.\"\"\"
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    state["left"] = kill_at
    code = 1
    try:
        prepare(
            Preparation(
                (str(folder / "lines.jsonl"),), str(output),
                TokenizerChoice(str(folder / "tokenizer")), length=32,
                splits=Splits(test=Share(count=10), train_files=2, shuffle=True),
            ),
            workers=1,
        )
        code = 0
    except InputError as problem:
        print(problem, flush=True)
        code = 2
    finally:
        os._exit(code)

def snapshot():
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return [(str(p), hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]

assert run(-1) == 0
whole, points = snapshot(), 0
for number in range(0, 10000, step):
    shutil.rmtree(output.parent)
    code = run(number)
    if code == 0:
        break
    assert code == 137, (number, code)
    points += 1
    before, code = snapshot(), run(-1)
    # An output that was complete before, but for a lock, is not replaced.
    assert code == 0 or code == 2 and before == whole, (number, code)
    assert snapshot() == whole, number
    assert [path.name for path in output.parent.iterdir()] == ["out"], number
print("points", points)
"""


@pytest.mark.exhaustive
def test_every_kill_point_ends_with_the_same_bytes(tmp_path):
    """The process is ended instead of each third call that changes a file."""
    write_tokenizer(tmp_path / "tokenizer")
    lines = (
        json.dumps({"prompt": f"the {i}", "completion": "a the " * (i % 9 + 1)})
        for i in range(60)
    )
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), "3"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        env={"TOKENIZERS_PARALLELISM": "false", "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[-1]) > 10
