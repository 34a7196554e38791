"""Measures `prompt-tuning serve`: its start, and clients that score and generate.

    python -m scripts.bench.serving start
    python -m scripts.bench.serving load [--clients 100] [--seconds 60]

Both start servers of the bundled decoder as processes. `start` prints the time from the
launch to the answers of `/health` and of a first request, without and with compiled
programs in the cache. `load` sends requests that score texts, generate, and stream, of
which some break off. Each answer must have the tokens and log-probabilities that it has
alone, to the bit. It prints the answers by status, the tokens per second, the server's
memory before, during and after, the slots in use afterwards, and whether every slot
then answers as before; it fails if one of these is not as it must be.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.machine import processor

BREAKS_OFF = 0.1
SLOTS = 16
MEMORY_GROWTH = 0.05
"""Growth of memory after the first third of the load that counts as flat."""
BODIES = 96
"""Number of different requests."""
BROKE_OFF, INCOMPLETE, DIFFERENT = 0, -1, -2
OTHER_OUTCOMES = {
    BROKE_OFF: "broke off",
    INCOMPLETE: "a stream without an end",
    DIFFERENT: "differs from the answer alone",
}


@contextlib.contextmanager
def running_server(cache: str) -> Iterator[tuple[int, int]]:
    """Starts a server, which SIGTERM ends afterwards.

    Args:
      cache: folder in which compiled programs are kept.

    Yields:
      its process id and its port.
    """
    command = [sys.executable, "-m", "prompt_tuning", "serve", "--port=0"]
    command += ["--model=bundled:skills-decoder", f"--slots={SLOTS}"]
    removed = ("JAX_", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
    # Bytecode is kept too, as of an installed package.
    kept = {"XDG_CACHE_HOME": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
    process = subprocess.Popen(
        command,
        env=environment | kept,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), None)
            if line is None:
                raise RuntimeError(f"the server ended with code {process.wait()}")
            yield process.pid, int(line.rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
    if process.returncode:
        raise RuntimeError(f"the server ended with code {process.returncode}")


def request(
    port: int,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout: int | float = 120,
) -> tuple[int, bytes]:
    """Returns the status and the content of an answer.

    Raises:
      OSError: if nothing of it arrives for so many seconds.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        with contextlib.closing(connection.getresponse()) as response:
            return response.status, response.read()


def measure_start() -> None:
    """Starts servers over one cache, the first of which compiles."""
    with tempfile.TemporaryDirectory() as cache:
        for number in range(4):
            start = time.monotonic()
            with running_server(cache) as (_, port):
                request(port, "/health")
                ready = time.monotonic() - start
                body = {"prompt": "reverse: abc=", "temperature": 0}
                status, content = request(port, "/v1/completions", body)
                answered = time.monotonic() - start
            assert status == 200, content
            kind = "programs from the cache" if number else "programs are compiled"
            print(
                f"start {number + 1}, {kind}: {ready:.2f} s to /health, "
                f"{answered:.2f} s to the first answer",
                flush=True,
            )


def body_of(number: int) -> dict[str, Any]:
    """Returns the body of a request: one in three scores, one generates, one streams.

    Args:
      number: number of the request; equal ones have equal bodies.
    """
    choose = random.Random(number)
    prompt = f"reverse: {''.join(choose.choices('abcdef', k=5))} ="
    if number % 3 == 0:
        candidates = [f"{prompt} {word}" for word in ("cab", "fed", "abcde", "faded")]
        return {"prompt": candidates, "max_tokens": 0, "echo": True, "logprobs": 1}
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": choose.randrange(4, 40),
        "ignore_eos": True,
        "logprobs": 1,
        "seed": number,
    }
    return body | ({"stream": True} if number % 3 == 1 else {})


def ask(
    port: int, body: Mapping[str, Any], breaks_off: bool = False
) -> tuple[int, list[Any]]:
    """Returns the status of a completion, and its choices or those of its events.

    Args:
      port: port of the server.
      body: the request.
      breaks_off: whether the client leaves while the answer is streamed; the status is
        `BROKE_OFF` then.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with contextlib.closing(connection.getresponse()) as response:
            status, streams = response.status, "stream" in body
            if status != 200:
                return status, []
            if streams and breaks_off:
                response.read(64)
                return BROKE_OFF, []
            content = response.read()
    if not streams:
        return status, json.loads(content)["choices"]
    *events, last = content.decode().removesuffix("\n\n").split("\n\n")
    if last != "data: [DONE]":
        return INCOMPLETE, []
    return status, [json.loads(event[6:])["choices"] for event in events]


def values_of(choices: Any) -> list[Any]:
    """Returns the tokens and log-probabilities of an answer, in one order."""
    each = [x for part in choices for x in (part if isinstance(part, list) else [part])]
    kept = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    found = [part["logprobs"] for part in each if part["logprobs"]]
    return [[x for part in found for x in part[name]] for name in kept]


def read_metrics(port: int) -> dict[str, float]:
    """Returns the server's metrics by name."""
    lines = request(port, "/metrics")[1].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def answers_of_all_slots(port: int) -> list[str]:
    """Returns the texts of as many simultaneous requests as there are slots."""

    def text(seed: int) -> str:
        body = {
            "prompt": f"upper: {'abcdefgh'[: 1 + seed % 8]}=",
            "max_tokens": 32,
            "ignore_eos": True,
            "seed": seed,
        }
        status, content = request(port, "/v1/completions", body)
        assert status == 200, content
        return json.loads(content)["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
        return list(pool.map(text, range(SLOTS)))


def resident_megabytes(process: int) -> float:
    """Returns the memory that a process has in use."""
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def run_clients(
    port: int, clients: int, seconds: float, expected: Sequence[Any]
) -> Counter[int]:
    """Sends requests from many threads; returns the number of answers by status.

    Args:
      port: port of the server.
      clients: number of threads.
      seconds: duration.
      expected: answer to each request, without any other at the same time.
    """
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def run(client: int) -> None:
        choose = random.Random(client)
        while time.monotonic() < end:
            number = choose.randrange(len(expected))
            leaves = choose.random() < BREAKS_OFF
            status, choices = ask(port, body_of(number), leaves)
            if status == 200 and values_of(choices) != expected[number]:
                status = DIFFERENT
            statuses[status] += 1
            if status == 429:
                time.sleep(0.2)

    threads = [
        threading.Thread(target=run, args=(client,)) for client in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def measure_load(clients: int, seconds: int) -> None:
    """Runs clients in three parts, and prints the table."""
    with tempfile.TemporaryDirectory() as cache, running_server(cache) as server:
        process, port = server
        alone = [values_of(ask(port, body_of(n))[1]) for n in range(BODIES)]
        expected = answers_of_all_slots(port)
        before = read_metrics(port)
        statuses: Counter[int] = Counter()
        memory = [resident_megabytes(process)]
        for _ in range(3):
            statuses += run_clients(port, clients, seconds / 3, alone)
            memory.append(resident_megabytes(process))
        time.sleep(1)
        after = read_metrics(port)
        same = answers_of_all_slots(port) == expected
    tokens = "prompt_tuning_new_tokens_total"
    for status, count in sorted(statuses.items()):
        print(f"| {OTHER_OUTCOMES.get(status, status)} | {count:,} |")
    print(f"| tokens per second | {(after[tokens] - before[tokens]) / seconds:,.0f} |")
    print(f"| memory, MiB | {', '.join(f'{each:,.0f}' for each in memory)} |")
    left = {name: after[f"prompt_tuning_{name}"] for name in ("active", "queued")}
    for name, number in left.items():
        print(f"| {name} afterwards | {number:.0f} |")
    print(f"| all {SLOTS} slots answer as before | {same} |")
    allowed = {200, 429, BROKE_OFF}
    assert statuses.keys() <= allowed, f"other statuses than {allowed}: {statuses}"
    assert same and not any(left.values()), "a slot was lost or answers otherwise"
    assert memory[-1] <= memory[1] * (1 + MEMORY_GROWTH), "memory grows"


def main() -> None:
    """Runs a measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("measure", choices=("start", "load"))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    print(processor(), flush=True)
    if options.measure == "start":
        measure_start()
    else:
        measure_load(options.clients, options.seconds)


if __name__ == "__main__":
    main()
