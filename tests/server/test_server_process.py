"""The server as a process that a signal ends."""

import contextlib
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.small_runs import COMPILATION_CACHE

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("uvicorn") is None,
        reason="the extra serve is not installed",
    ),
]
NEW = 100


def test_a_server_that_is_killed_while_it_loads_leaves_all_as_it_was(tmp_path):
    adapter = tmp_path / "soft.npy"
    np.save(adapter, np.ones((4, 128), np.float32))
    content = adapter.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "prompt_tuning", "serve", f"--port={port}"]
    command += ["--model=bundled:skills-decoder", f"--adapter=soft={adapter}"]
    command += ["--slots=2", "--length=32"]
    environment = os.environ | COMPILATION_CACHE
    for seconds in (0.2, 1.5, 3.0, None):
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert process.stdout is not None
            if seconds is None:
                assert any("http://" in line for line in process.stdout)
                process.terminate()
            else:
                time.sleep(seconds)
                process.kill()
        assert list(tmp_path.iterdir()) == [adapter]
        assert adapter.read_bytes() == content
    assert process.returncode == 0


def test_sigterm_finishes_the_requests_that_run():
    command = [sys.executable, "-m", "prompt_tuning", "serve", "--port=0"]
    command += ["--model=bundled:skills-decoder", "--slots=2"]
    process = subprocess.Popen(
        command,
        env=os.environ | COMPILATION_CACHE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process:
        line = next((line for line in process.stdout if "http://" in line), "")
        port = int(line.rpartition(":")[2])
        body = {"prompt": "abc", "max_tokens": NEW, "ignore_eos": True, "n": 4}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            with connection.getresponse() as stream:
                begun = stream.read(100)
                process.terminate()
                content = begun + stream.read()
        rest = process.stdout.read()
    *events, last = content.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    usage = json.loads(events[-1].removeprefix(b"data: "))["usage"]
    # Two of the four samples waited for a slot when the signal came.
    assert usage["completion_tokens"] == 4 * NEW
    assert (process.returncode, rest) == (0, "")
    with pytest.raises(ConnectionRefusedError), contextlib.closing(connection):
        connection.request("GET", "/health")
