"""A separate script that reports the death of a process that could not report it.

JAX aborts a process immediately if it cannot reach process 0 (a C++ abort, which Python
code cannot catch), and a killed process prints nothing either. This script runs next to
a process and waits for the end of its standard input. If the input is `DONE`, the
process ended as intended and the script prints nothing.

Arguments: the process's rank, the number of processes, the coordinator's HOST:PORT, and
the advice to print.
"""

import signal
import socket
import sys

DONE = b"done"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The start of a gRPC connection to the coordinator: the HTTP/2 client preface and an
empty SETTINGS frame (RFC 9113, section 3.4). The server answers with its own frame."""


def main(rank: str, count: str, coordinator: str, advice: str) -> None:
    """Waits, and prints one line if the process did not end as intended."""
    # A signal that stops the process is often sent to its whole process group.
    for stopping in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(stopping, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    if rank == "0" or answers(coordinator):
        event = f"process {rank} of {count} was killed"
    else:
        event = (
            f"process 0 of {count} has died or cannot be reached at {coordinator}, "
            f"so process {rank} was ended"
        )
    print(f"prompt-tuning: {event}; {advice}", file=sys.stderr, flush=True)


def answers(coordinator: str, patience: float = 5.0) -> bool:
    """Tests whether process 0, at HOST:PORT, answers within `patience` seconds.

    A halted process still accepts connections, so connecting is not enough.
    """
    host, _, port = coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    try:
        with socket.create_connection(address, timeout=patience) as connection:
            connection.sendall(HELLO)
            return bool(connection.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
