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
NEW = 30


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


def send_request(stack, port, **fields) -> http.client.HTTPConnection:
    """Sends a request for rows that use all their tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    stack.callback(connection.close)
    headers = {"Content-Type": "application/json"}
    body = {"prompt": "abc", "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def test_sigterm_ends_the_requests_that_take_longer_than_their_grace():
    command = [sys.executable, "-m", "prompt_tuning", "serve", "--port=0"]
    command += ["--model=bundled:skills-decoder", "--slots=2", "--queue=600"]
    process = subprocess.Popen(
        command,
        env=os.environ | COMPILATION_CACHE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        line = next((line for line in process.stdout if "http://" in line), "")
        port = int(line.rpartition(":")[2])
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        short = send_request(stack, port, max_tokens=NEW, n=4, **usage)
        begun = short.getresponse()
        half = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        rows = {"prompt": ["abc"] * 8, "n": 16, "max_tokens": 100}
        long = send_request(stack, port, **rows, stream=True)
        stream = long.getresponse()
        send_request(stack, port, **rows, stream=True)  # which nobody reads
        waiting = send_request(stack, port, **rows)
        signalled = time.monotonic()
        process.terminate()
        events = begun.read().removesuffix(b"\n\n").split(b"\n\n")
        *_, problem, last = stream.read().removesuffix(b"\n\n").split(b"\n\n")
        status = waiting.getresponse().status
        rest = process.stdout.read()
        ended = time.monotonic() - signalled
    # Two of the four samples waited for a slot when the signal came.
    assert events[-1] == last == b"data: [DONE]"
    counts = json.loads(events[-2].removeprefix(b"data: "))["usage"]
    assert counts["completion_tokens"] == 4 * NEW
    message = json.loads(problem.removeprefix(b"data: "))["error"]["message"]
    assert (message, status) == ("the server is stopping", 503)
    assert (process.returncode, rest) == (0, "") and ended < 10
    with pytest.raises(ConnectionRefusedError), contextlib.closing(short):
        short.request("GET", "/health")
