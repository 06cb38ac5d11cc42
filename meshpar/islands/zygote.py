"""The zygote: a process that has imported everything, and forks Ray's workers.

A new process of an island or a server needs seconds of a core for imports, which the
others have to spare. A fork has them already. The zygote has no threads that a fork
would miss, and no jax backend: both start in the forked process.

Ray still starts, watches and kills the workers: it runs `fork_client.py` in place of
Python, and knows a worker by what it registers, not by its parent.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from meshpar.islands import fork_client

_SOCKET, _PYTHON = "socket", "python"
"""Files of a zygote's folder: its socket, and what Ray starts as Python."""

_CLIENT_S = 5.0
"""Seconds in which a client has to write its request."""

_JOB = "RAY_JOB_ID"

_IMPORTS = (
    "ray._private.workers.default_worker",
    "meshpar.islands.ray_island",
    "meshpar.islands.ray_servers",
)


class Zygote:
    """A zygote of this process, which ends with it.

    Attributes:
      process: the process.
    """

    def __init__(self):
        # As Ray's: the path of a socket has at most 107 bytes, whatever TMPDIR is.
        self._folder = tempfile.mkdtemp(prefix="meshpar-zygote-", dir="/tmp")
        paths = os.pathsep.join(filter(None, sys.path))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(self._folder, _SOCKET))
            listener.listen(128)
            arguments = [str(listener.fileno()), self._folder]
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.PIPE,  # It ends when this process closes it.
                env=os.environ | {"PYTHONPATH": paths},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        client = [sys.executable, "-IS", fork_client.__file__]
        client += [os.path.join(self._folder, _SOCKET), sys.executable]
        self._python = os.path.join(self._folder, _PYTHON)
        with open(self._python, "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        os.chmod(self._python, 0o700)

    @contextlib.contextmanager
    def starts_workers(self) -> Iterator[None]:
        """A Ray that is started inside has its workers forked."""
        python, sys.executable = sys.executable, self._python
        try:
            yield
        finally:
            sys.executable = python

    def close(self) -> None:
        """Ends the zygote; the processes that it forked go on."""
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _without_job(environment: dict[str, str]) -> dict[str, str]:
    """An environment apart from the job: Ray assigns workers without one to any."""
    return {name: value for name, value in environment.items() if name != _JOB}


class _Zygote:
    """The zygote's own part: imports at the first request, and forks at each."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._environment: dict[str, str] | None = None

    def serve(self) -> list[str] | None:
        """Forks until the parent is gone; returns the command in a forked process."""
        while True:
            ready, _, _ = select.select([self._listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return None
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_CLIENT_S)  # A client that is gone is forgotten.
                if (command := self._answer(connection)) is not None:
                    self._listener.close()
                    return command

    def _answer(self, connection: socket.socket) -> list[str] | None:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        try:
            with connection.makefile("rb") as file:
                request = json.loads(file.read())
            if self._environment is None:
                self._prepare(request["environment"])
            if _without_job(request["environment"]) != _without_job(self._environment):
                return None  # Ray reads some of its variables as it is imported.
            connection.sendall(b"1")
            if os.fork():
                return None
            os.setsid()  # Ray kills the whole process group of a dead worker.
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.chdir(request["folder"])
            return request["command"]
        finally:
            for stream in streams:
                os.close(stream)

    def _prepare(self, environment: dict[str, str]) -> None:
        self._environment = environment
        os.environ.clear()
        os.environ.update(environment)
        for name in _IMPORTS:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # Collections in the forked processes leave its pages shared.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def main() -> None:
    """Runs the zygote; its forked processes run the commands of Ray's workers."""
    listener, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    command = _Zygote(listener).serve()
    if command is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
