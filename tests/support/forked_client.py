"""Runs a program by `forked_python`, with the files and environment of this process."""

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Returns the exit code of the program; forwards signals to it."""
    program = {
        "arguments": sys.argv[2:],
        "folder": os.getcwd(),  # noqa: PTH109  imports nothing more
        "environment": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [json.dumps(program).encode()], [0, 1, 2])
        process = int(connection.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(process, number))
        code = int(connection.recv(64))
    # As a shell reports an end by a signal.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
