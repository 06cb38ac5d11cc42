"""Messages that the compiler writes to standard error."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects the lines written to standard error, and prints them at the end.

    Yields:
      The lines, complete once the context is left; those of C++ code are included.
    """
    log: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            log += file.read().decode(errors="replace").splitlines()
            for line in log:
                print(line, file=sys.stderr)


def rematerialized(log: Iterable[str]) -> Iterator[str]:
    """Names the tensors that the compiler gathered because it could not reshard them.

    Args:
      log: lines of the compiler.

    Yields:
      One warning per tensor.
    """
    seen = set()
    for line in log:
        if "nvoluntary full rematerialization" not in line:
            continue
        op_name = re.search(r'op_name="([^"]*)"', line)
        match = op_name or re.search(r"HLO operation: %?([\w.\-]+)", line)
        tensor = match.group(1) if match else line.strip()[:200]
        if tensor not in seen:
            seen.add(tensor)
            yield f"involuntary full rematerialization of {tensor}"
