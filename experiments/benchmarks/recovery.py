r"""Times a killed run until its next step, with and without a compilation cache.

    python -m experiments.benchmarks.recovery --recipe=bytes-llama --rounds=3

Each round starts a run in an empty folder and kills it (SIGKILL) after its first
checkpoint. It starts the run again, which loads the programs that the first start
compiled, kills it after its first step, and starts it once more without them. The table
has the medians of the rounds. The last line gives the ratio of the times to compile of
the restart and of the first start. Aim: at most 0.1.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import rich.table
from absl import flags

from experiments import recipes
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs import startup
from meshpar.runs.metrics import METRICS
from meshpar.settings import Number

ROUNDS = flags.DEFINE_integer("rounds", 3, "Starts of each kind.")
command_line.limit(ROUNDS, Number(1, 1000, "rounds"))

FIRST, CACHED, COMPILED = "first start", "restart", "restart without the cache"
FROM_KILL = "from the kill"
SETTINGS = ("checkpoint_every=2", "evaluate_every=1000000", "sample_tokens=0")

Seconds = dict[str, float]
"""{metric of a startup: seconds}."""


class Run:
    """A process of the run in a folder; it is killed when the context ends."""

    def __init__(self, folder: pathlib.Path, environment: Mapping[str, str]):
        """Starts the process.

        Args:
          folder: the run's folder; it also holds the log.
          environment: what differs from the environment of this process.
        """
        self._folder, self._log = folder, folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._num_before = len(startups(folder))
        inherited = {k: v for k, v in os.environ.items() if k not in _OF_THE_CACHE}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*(sys.executable, "-m", "experiments.run"), *_words(folder)],
                env=inherited | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()

    def startup(self) -> Seconds:
        """Waits for the first step, and returns the time that it took to come."""
        self._wait(lambda: len(startups(self._folder)) > self._num_before)
        return startups(self._folder)[-1]

    def wait_for_a_checkpoint(self) -> None:
        """Waits until a checkpoint is complete."""
        folder = self._folder / "checkpoints"
        self._wait(lambda: any(path.name.isdigit() for path in folder.glob("*")))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._process.poll() is not None:
                raise ConfigError(
                    f"the run ended with code {self._process.returncode} before it "
                    f"could be killed; mend it, or use more --steps:\n"
                    f"{self._log.read_text()[-2000:]}"
                )
            time.sleep(0.005)


_OF_THE_CACHE = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)
"""Variables of the environment that would give the run another cache."""


def _words(folder: pathlib.Path) -> list[str]:
    """Flags of the run: those of this command, and the settings of the benchmark."""
    shared = flags.FLAGS.flags_by_module_dict()[command_line.__name__]
    given = [flag.serialize() for flag in shared if flag.present]
    settings = [f"--set={setting}" for setting in SETTINGS]
    return [*"\n".join(given).splitlines(), *settings, f"--workdir={folder}"]


def startups(folder: pathlib.Path) -> list[Seconds]:
    """The startups that a run's folder records, one per process so far."""
    path, found = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # Half of a line.
            continue
        if startup.TOTAL in row:
            found.append(row)
    return found


def measure(folder: pathlib.Path) -> dict[str, Seconds]:
    """One round: {kind of start: seconds by part}."""
    seconds = {}
    with Run(folder, {}) as run:
        seconds[FIRST] = run.startup()
        run.wait_for_a_checkpoint()
        killed = time.perf_counter()
    for kind, enabled in ((CACHED, "true"), (COMPILED, "false")):
        with Run(folder, {"JAX_ENABLE_COMPILATION_CACHE": enabled}) as run:
            seconds[kind] = run.startup()
            seconds[kind][FROM_KILL] = time.perf_counter() - killed
            killed = time.perf_counter()
    return seconds


def table(medians: Mapping[str, Seconds]) -> rich.table.Table:
    """Parts in rows; seconds and share of every kind of start in columns."""
    found = rich.table.Table("part", *medians)
    for part in startup.PARTS:
        name, cells = startup.metric_name(part), []
        for seconds in medians.values():
            share = seconds[name] / seconds[startup.TOTAL]
            cells.append(f"{seconds[name]:.2f} s  {share:4.0%}")
        found.add_row(part, *cells)
    found.add_section()
    sums = {"to the first step": startup.TOTAL, "of CPU": startup.CPU_TOTAL}
    for label, name in (sums | {FROM_KILL: FROM_KILL}).items():
        cells = [f"{s[name]:.2f} s" if name in s else "" for s in medians.values()]
        found.add_row(label, *cells)
    return found


def main(_: Sequence[str]) -> int:
    """Prints the table of medians, and the ratio of the times to compile."""
    command_line.config_from_flags()  # Errors of flags come before the first start.
    rounds = []
    with tempfile.TemporaryDirectory(prefix="meshpar-recovery-") as folder:
        for number in range(ROUNDS.value):
            rounds.append(measure(pathlib.Path(folder) / str(number)))
    medians = {
        kind: {
            name: statistics.median(measured[kind][name] for measured in rounds)
            for name in rounds[0][kind]
        }
        for kind in (FIRST, CACHED, COMPILED)
    }
    terminal.wide_console().print(table(medians))
    compiling = startup.metric_name(startup.COMPILING)
    ratio = medians[CACHED][compiling] / medians[FIRST][compiling]
    print(f"compiling, restart / first start: {ratio:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(main, command_line.OF_RUNS, known=recipes.CATALOG)
