import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prompt_tuning.core import file_locks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_locks import hold_lock

HOLDING = """
import sys, time
from pathlib import Path
from prompt_tuning.core.file_locks import hold_lock
with hold_lock(Path(sys.argv[1]), "work"):
    print("held", flush=True)
    time.sleep(60)
"""
COMPETING = """
import sys, time
from pathlib import Path
from prompt_tuning.core.file_locks import hold_lock
time.sleep(max(float(sys.argv[2]) - time.time(), 0))
with hold_lock(Path(sys.argv[1]), "work"):
    time.sleep(1.5)
"""


def start(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_the_second_process_is_refused_with_host_process_and_time(tmp_path):
    file = tmp_path / "folder" / "lock"
    with hold_lock(file, "run first"), pytest.raises(InputError) as refused:
        hold_lock(file, "run first").__enter__()
    message = str(refused.value)
    assert message.startswith("run first is being written by")
    assert f"process {os.getpid()} on '{socket.gethostname()}' since '20" in message


def test_no_lock_file_remains(tmp_path):
    with hold_lock(tmp_path / "a" / "b" / "lock", "work"):
        assert (tmp_path / "a" / "b" / "lock").is_file()
    assert list(tmp_path.iterdir()) == []


def test_files_written_meanwhile_stay(tmp_path):
    with hold_lock(tmp_path / "a" / "b" / "lock", "work"):
        (tmp_path / "a" / "result").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "result"]


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    process = start(HOLDING, tmp_path / "lock")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {process.pid} on "):
            hold_lock(tmp_path / "lock", "work").__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert json.loads((tmp_path / "lock").read_text())["process"] == process.pid
    with hold_lock(tmp_path / "lock", "work"):
        holder = json.loads((tmp_path / "lock").read_text())
    assert holder["process"] == os.getpid()


def test_exactly_one_of_many_processes_gets_the_lock(tmp_path):
    at = time.time() + 2
    processes = [start(COMPETING, tmp_path / "lock", at) for _ in range(6)]
    ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 1, 1, 1, 1, 1]
    for message, code in ends:
        assert not code or "is being written by process" in message


def test_the_lock_may_have_any_content(tmp_path, monkeypatch):
    monkeypatch.setattr(file_locks, "HOLDER_SECONDS", 0.1)
    for content in (b"", b"{", b'{"host": 3}', b"\xff" * 10_000):
        (tmp_path / "lock").write_bytes(content)
        with (tmp_path / "lock").open("rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(InputError, match="by another process"):
                hold_lock(tmp_path / "lock", "work").__enter__()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    expected = pytest.warns(UserWarning, match="file system has no locks")
    with expected, hold_lock(tmp_path / "lock", "work"):
        assert (tmp_path / "lock").exists()
    assert list(tmp_path.iterdir()) == []
