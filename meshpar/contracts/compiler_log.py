"""What a compiler writes to standard error while it compiles."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects what is written to standard error, and passes it on at the end."""
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
    """Tensors that the compiler moved whole because it could not reshard them."""
    seen = set()
    for line in log:
        if "nvoluntary full rematerialization" not in line:
            continue
        name = re.search(r"HLO operation: %?([\w.\-]+)", line)
        place = re.search(r'op_name="([^"]*)"', line)
        what = (place or name).group(1) if place or name else line.strip()[:200]
        if what not in seen:
            seen.add(what)
            yield f"involuntary full rematerialization of {what}"
