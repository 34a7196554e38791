"""Loads a server on this machine with many clients, of which some break off.

Usage: python -m scripts.bench.serving PORT [CLIENTS] [SECONDS]

The server runs `prompt-tuning serve --model bundled:skills-decoder --port PORT`. The
table has the answers by status, the tokens per second, and the slots in use afterwards,
which must be none.
"""

import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter

BREAKS_OFF = 0.1


def ask(port: int, number: int) -> int:
    """Sends a request, and returns its status; 0 if this client breaks off."""
    choose = random.Random(number)
    body = {
        "prompt": f"reverse: {''.join(choose.choices('abcdef', k=5))} =",
        "max_tokens": choose.randrange(4, 40),
        "ignore_eos": True,
        "stream": True,
        "seed": number,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with contextlib.closing(connection.getresponse()) as response:
            if choose.random() < BREAKS_OFF and response.status == 200:
                response.read(64)
                return 0
            content = response.read()
            complete = content.endswith(b"[DONE]\n\n") or response.status != 200
            return response.status if complete else -1


def read_metrics(port: int) -> dict[str, float]:
    """Returns the server's metrics by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def main(port: int, clients: int = 200, seconds: int = 60) -> None:
    """Runs the clients, and prints the table."""
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def run(client: int) -> None:
        number = 0
        while time.monotonic() < end:
            status = ask(port, client * 100_000 + number)
            statuses[status] += 1
            number += 1
            if status == 429:
                time.sleep(0.2)

    before = read_metrics(port)
    threads = [
        threading.Thread(target=run, args=(client,)) for client in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1)
    after = read_metrics(port)
    tokens = "prompt_tuning_new_tokens_total"
    for status, count in sorted(statuses.items()):
        print(f"| {status or 'broke off'} | {count:,} |")
    print(f"| tokens per second | {(after[tokens] - before[tokens]) / seconds:,.0f} |")
    for name in ("active", "queued"):
        print(f"| {name} afterwards | {after[f'prompt_tuning_{name}']:.0f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
