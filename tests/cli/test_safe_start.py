"""Commands read untrusted input in isolation and write only to their outputs.

All commands run in one process: Python is isolated from its environment and the working
directory (`python -I`), neither the home nor the working directory can be written to,
and every file that is opened for writing, created, renamed or removed is recorded.
`chat` answers one line, and `serve` one request before a signal ends it.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import prompt_tuning
from tests.support.small_runs import COMPILATION_CACHE, add_chat_template
from tests.support.small_tokenizer import write_tokenizer

NOWHERE = "/proc/nonexistent"
"""A home directory that cannot be created, even by root."""
ONE_AFTER_THE_OTHER = r"""
import contextlib, http.client, io, json, os, signal, sys, threading, time

root, record = sys.argv[1:]
sys.path.insert(0, root)
writes, commands, codes, counts = [], json.load(sys.stdin), [], []
CHANGES = {
    "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2,
    "os.symlink": 2, "os.truncate": 1, "os.chmod": 1, "os.utime": 1,
}

def record_writes(event, arguments):
    if event == "open" and isinstance(arguments[0], str | bytes):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            writes.append(os.fsdecode(arguments[0]))
    for path in arguments[: CHANGES.get(event, 0)]:
        if not isinstance(path, int):
            writes.append(os.fsdecode(path))

def use_server(port):
    content = json.dumps({"prompt": "ab=", "max_tokens": 2})
    headers = {"Content-Type": "application/json"}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("POST", "/v1/completions", content, headers)
            assert connection.getresponse().status == 200
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.1)

sys.addaudithook(record_writes)
from prompt_tuning.cli.main import main

for command in commands:
    sys.stdin = io.StringIO("ab=\n")
    if command[0] == "serve":
        port = int(command[-1])
        threading.Thread(target=use_server, args=(port,), daemon=True).start()
    codes.append(main(command))
    counts.append(len(writes))
print(json.dumps([codes, counts, [os.path.abspath(path) for path in writes]]))
"""


def commands(files, folder: Path) -> list[list[str]]:
    run, other = folder / "run", folder / "other.npy"
    train = files.arguments(run, Run__steps=2)
    sweep = files.arguments(folder / "sweep", Run__steps=1)
    recycle = [f"--from={files.decoder}", f"--to={files.decoder}"]
    prepare = ["--output", str(folder / "prepared"), "--workers", "1"]
    prepare += ["--tokenizer", str(folder / "tokenizer"), "--length", "32"]
    model = Path(shutil.copytree(files.decoder, folder / "chat"))
    sizes = ["--model", str(add_chat_template(model))]
    sizes += ["--length", "32"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    served = []
    if importlib.util.find_spec("uvicorn") is not None:
        served = [["serve", *sizes, "--slots", "2", "--port", port]]
    return [
        ["train", *train],
        ["memory", *train, "--policy", "none"],
        ["inspect", "--run", str(run)],
        ["evaluate", "--run", str(run), "--predictions", str(folder / "predictions")],
        ["generate", "--run", str(run), "--new_tokens", "2", "ab="],
        ["predict", "--run", str(run), "--labels", "AB", "BA", "--", "ab="],
        ["runs", str(folder)],
        ["convert", str(run), str(other)],
        ["similar", str(run), str(other)],
        ["show", str(files.train_rows)],
        ["token-types", str(folder / "rows.hdf5"), "--all_completion", "--replace"],
        ["prepare", str(files.train), *prepare],
        ["sweep", *sweep, "--vary=Run.seed=0"],
        ["recycle", str(run), *recycle, f"--out={folder / 'recycled.npy'}"],
        ["diff", str(run), str(run)],
        ["configs"],
        ["chat", *sizes, "--new_tokens", "4", "--adapter", f"upper={run}"],
        *served,
    ]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_commands_write_only_to_their_outputs(files, tmp_path):
    (tmp_path / "rows.hdf5").write_bytes(files.train_rows.read_bytes())
    write_tokenizer(tmp_path / "tokenizer")
    given = commands(files, tmp_path)
    removed = (*COMPILATION_CACHE, "XDG_CACHE_HOME", "MPLCONFIGDIR")
    environment = {k: x for k, x in os.environ.items() if k not in removed}
    root = str(Path(prompt_tuning.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", ONE_AFTER_THE_OTHER, root, "record"],
        input=json.dumps(given),
        env=environment | {"HOME": NOWHERE, "TMPDIR": str(tmp_path)},
        cwd="/proc",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    codes, counts, writes = json.loads(done.stdout.splitlines()[-1])
    names = [command[0] for command in given]
    assert dict(zip(names, codes, strict=True)) == dict.fromkeys(names, 0), done.stderr
    # JAX tries to create its cache in the home directory, which fails.
    allowed = (str(tmp_path), "/dev/", "/proc")
    others = [path for path in writes if not path.startswith(allowed)]
    assert others == [], others
    run = str(tmp_path / "run")
    trained, *later = zip([0, *counts], counts, strict=False)
    assert any(path.startswith(run) for path in writes[slice(*trained)])
    assert not [x for part in later for x in writes[slice(*part)] if x.startswith(run)]
