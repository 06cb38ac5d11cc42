r"""Whether a long run keeps its memory, files and threads: trains, and watches /proc.

    python -m experiments.benchmarks.long_run --recipe=tiny --steps=20000

The run evaluates and saves every `--every` steps. Memory (RssAnon), open files and
threads of its process are read every second, and the last two thirds of the samples are
compared: what grows by more than its scatter is a leak. Afterwards its folder for
temporary files has to be empty, and its own folder free of half files. The exit code is
1 if something grew or stayed. Linux alone has /proc.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import rich.table
from absl import flags

from experiments import recipes
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs.metrics import METRICS
from meshpar.settings import Number
from meshpar.units import readable_bytes

EVERY = flags.DEFINE_integer("every", 200, "Steps from one checkpoint to the next.")
command_line.limit(EVERY, Number(1, 10**6, "steps"))

_SHARE = 0.01
"""Growth over the watched samples that counts as none, as a share of the median."""

_SCATTER = 3.0
"""Growth that counts as none, in standard deviations of the samples about the line."""

TAKES = (command_line.RECIPE, command_line.STEPS)
"""The shared flags that it reads."""


class Sample(NamedTuple):
    """A process at one time.

    Attributes:
      memory: bytes of its own, without pages of files.
      files: number of open files.
      threads: number of threads.
    """

    memory: int
    files: int
    threads: int


class Growth(NamedTuple):
    """The course of one number over the watched samples.

    Attributes:
      median: of the samples.
      grown: the rise of the line through them, from the first to the last.
      scatter: standard deviation about the line.
    """

    median: float
    grown: float
    scatter: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Growth":
        """Fits a line to the last two thirds of some values."""
        watched = np.asarray(values[len(values) // 3 :], float)
        at = np.linspace(0, 1, len(watched))
        grown, start = np.polyfit(at, watched, 1)
        scatter = np.std(watched - start - grown * at)
        return cls(float(np.median(watched)), float(grown), float(scatter))

    @property
    def is_leak(self) -> bool:
        """Whether it grew by more than its scatter and by more than a small share."""
        return self.grown > max(_SCATTER * self.scatter, _SHARE * self.median)


def sample(pid: int) -> Sample | None:
    """A process as it is now; None if it has ended."""
    folder = pathlib.Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        found = {line.partition(":")[0]: line.split()[1:] for line in lines}
        memory = int(found["RssAnon"][0]) * 1024
        return Sample(memory, len(os.listdir(folder / "fd")), int(found["Threads"][0]))
    except (OSError, KeyError):  # A process that has ended has no memory.
        return None


def watch(process: subprocess.Popen, folder: pathlib.Path) -> Iterator[Sample]:
    """The samples of a process, every second from its first metrics on.

    Args:
      process: the run.
      folder: its folder.
    """
    while process.poll() is None:
        time.sleep(1)
        found = sample(process.pid) if (folder / METRICS).exists() else None
        if found:
            yield found


def left_behind(folder: pathlib.Path, temporary: pathlib.Path) -> list[pathlib.Path]:
    """The files that should be gone after a run.

    Args:
      folder: of the run.
      temporary: its folder for temporary files.
    """
    halves = [x for x in folder.rglob("*") if ".partial" in x.name or "-tmp-" in x.name]
    return [*temporary.iterdir(), *halves]


def main(_: Sequence[str]) -> int:
    """Trains, prints a table, and returns the exit code."""
    command_line.config_from_flags()  # Errors of flags come before the start.
    if not pathlib.Path("/proc/self/fd").is_dir():
        raise ConfigError("this system has no /proc; run the command on Linux")
    with tempfile.TemporaryDirectory(prefix="meshpar-long-run-") as place:
        folder, temporary = pathlib.Path(place, "run"), pathlib.Path(place, "tmp")
        temporary.mkdir()
        words = [
            *(f"--recipe={command_line.RECIPE.value}", "--layout=data=1"),
            *(f"--steps={command_line.STEPS.value or 20_000}", f"--workdir={folder}"),
            *(f"--set=checkpoint_every={EVERY.value}", "--set=sample_tokens=0"),
            *(f"--set=evaluate_every={EVERY.value}", "--platform=cpu"),
        ]
        with pathlib.Path(place, "log").open("w+") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "experiments.run", *words],
                env=os.environ | {"TMPDIR": str(temporary)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                samples = list(watch(run, folder))
            finally:
                run.kill()
                run.wait()
            log.seek(0)
            said = log.read()
        left = left_behind(folder, temporary)
    if run.returncode or len(samples) < 9:
        raise ConfigError(
            f"the run ended with code {run.returncode} after {len(samples)} samples; "
            f"take more --steps, or mend what it says: {said[-2000:]}"
        )
    return _report(samples, left)


def _report(samples: Sequence[Sample], left: Sequence[pathlib.Path]) -> int:
    courses = {
        name: Growth.of([getattr(x, name) for x in samples]) for name in Sample._fields
    }
    table = rich.table.Table(title=f"{len(samples)} samples, the last two thirds")
    for column in ("", "median", "grown", "scatter", "verdict"):
        table.add_column(column)
    for name, course in courses.items():
        shown = [f"{x:.1f}" for x in course]
        if name == "memory":
            shown = [readable_bytes(abs(x)) for x in course]
            shown[1] = f"{'-' if course.grown < 0 else '+'}{shown[1]}"
        table.add_row(name, *shown, "LEAK" if course.is_leak else "flat")
    terminal.wide_console().print(table)
    print("left behind:", ", ".join(map(str, left)) or "nothing")
    return int(bool(left) or any(course.is_leak for course in courses.values()))


if __name__ == "__main__":
    command_line.run(main, TAKES, known=recipes.CATALOG)
