"""The server as a process that a signal ends."""

import contextlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys

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
