"""Says what became of a process that could not say it: a script of its own.

JAX ends a process on the spot when process 0 cannot be reached (a C++ abort, which no
Python code sees), and a killed process says nothing either. This script waits beside a
process, for the end of its standard input: with `DONE` in it the process ended as it
should, and there is nothing to say.

Arguments: the process's number, how many there are, the coordinator's HOST:PORT, and
what is to be done.
"""

import signal
import socket
import sys

DONE = b"done"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What opens a connection of gRPC, which the coordinator speaks: the client's preface
and an empty SETTINGS frame (RFC 9113, section 3.4). It is answered with the like."""


def main(number: str, count: str, coordinator: str, advice: str) -> None:
    """Waits, and prints one line if the process did not end as it should."""
    # What stops the process is often sent to all that stands beside it.
    for stopping in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(stopping, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    if number == "0" or answers(coordinator):
        what = f"process {number} of {count} was killed"
    else:
        what = (
            f"process 0 of {count} has died or cannot be reached at {coordinator}, "
            f"so process {number} was ended"
        )
    print(f"prompt-tuning: {what}; {advice}", file=sys.stderr, flush=True)


def answers(coordinator: str, patience: float = 5.0) -> bool:
    """Whether process 0 does; the port of a halted one still takes connections.

    Args:
      coordinator: its HOST:PORT.
      patience: seconds that it has.
    """
    host, _, port = coordinator.rpartition(":")
    place = host.strip("[]"), int(port)
    try:
        with socket.create_connection(place, timeout=patience) as to:
            to.sendall(HELLO)
            return bool(to.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
