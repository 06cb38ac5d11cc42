"""Asks the zygote for a worker process of Ray; a script of the standard library alone.

    fork_client.py SOCKET PYTHON COMMAND...

Ray starts it in place of Python. A worker's command goes to the zygote, which forks a
process for it; without a zygote, and for other commands, Python itself is started.
"""

import json
import os
import socket
import sys

WORKER = "default_worker.py"
"""The script that Ray runs in a worker process."""

_WAIT_S = 30.0
"""Seconds in which the zygote has to answer; it may still be importing."""


def ask(address: str, command: list[str]) -> bool:
    """Whether the zygote at a socket forked a process for a command."""
    request = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WAIT_S)
        try:
            connection.connect(address)
            socket.send_fds(connection, [b" "], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return bool(connection.recv(1))
        except OSError:
            return False


def main() -> None:
    """Has the command of the arguments run."""
    address, python, *command = sys.argv[1:]
    is_worker = bool(command) and os.path.basename(command[0]) == WORKER
    if not (is_worker and ask(address, command)):
        os.execv(python, [python, *command])


if __name__ == "__main__":
    main()
