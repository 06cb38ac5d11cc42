r"""Breaks real training runs at random, and proves that nothing is lost.

    python -m experiments.chaos --minutes=10 --seed=7

Each scenario trains once undisturbed. Then it trains again and again under faults, as
real processes: kills, pauses, a full disk, torn files, garbage at the coordinator's
port, in all sections of a run. Every run has to end with the metrics and the state of
the undisturbed one, bit for bit. Otherwise the command exits with code 1 and names the
folder of the broken run.
"""

import json
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Sequence

from absl import flags, logging

from experiments.faults.conductor import Conductor, Report
from experiments.faults.scenarios import SCENARIOS
from experiments.faults.watched import HungError, LostError
from experiments.reports import chaos
from meshpar.commands import command_line, outputs
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs.config import check_setting
from meshpar.settings import Choice, Number, Path

MINUTES = flags.DEFINE_float("minutes", 10.0, "No fault is struck after this time.")
FAULTS = flags.DEFINE_integer("faults", 0, "Number of faults; 0 for as many as fit.")
SCENARIO = flags.DEFINE_list("scenario", list(SCENARIOS), "Scenarios to run.")
WORKDIR = flags.DEFINE_string("workdir", "runs/chaos", "Folder of the runs.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")
flags.declare_key_flag("seed")
command_line.limit(MINUTES, Number(0, 1e5, "minutes", whole=False, above=True))
command_line.limit(FAULTS, Number(0, 10**6, "faults", "0 for as many as fit"))
command_line.limit(SCENARIO, Choice(tuple(SCENARIOS)))
command_line.limit(WORKDIR, Path())


def _folder() -> pathlib.Path:
    """The folder of the runs, which may hold none yet.

    Raises:
      ConfigError: it cannot be written to, holds something, or is not on Linux.
    """
    if sys.platform != "linux":
        raise ConfigError("this command reads /proc: use it on Linux")
    folder = pathlib.Path(WORKDIR.value).absolute()
    outputs.check_folder(folder, "--workdir")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--workdir={folder} holds files, such as broken runs; delete them, or "
            "choose another folder"
        )
    return folder


_OF_RUNS = command_line.OF_CONFIG + command_line.OF_DEVICES
_SET = {flag.name: "its scenarios set it" for flag in _OF_RUNS}


def _check_flags() -> None:
    """Raises ConfigError for one scenario twice."""
    for name in SCENARIO.value:
        if SCENARIO.value.count(name) > 1:
            raise ConfigError(f"--scenario names {name!r} twice; leave one out")


def main(_: Sequence[str]) -> int:
    """Breaks runs until the time or the faults are used up; returns the exit code."""
    _check_flags()
    command_line.use_cpu()
    logging.set_verbosity(logging.ERROR)  # Orbax warns of each item that it reads.
    seed = command_line.SEED.value or 0
    check_setting("seed", seed)
    folder = _folder()
    reports: list[Report] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the runs as well.
    until = time.monotonic() + 60 * MINUTES.value
    console = terminal.wide_console()

    def say(text: str) -> None:
        if not JSON.value:
            console.print(text, soft_wrap=True)

    conductors = [Conductor(name, folder, seed) for name in SCENARIO.value]
    for conductor in conductors:
        try:
            seconds = conductor.run_unbroken()
        except (LostError, HungError) as error:
            raise RuntimeError(f"{conductor.name}, undisturbed: {error}") from error
        say(f"{conductor.name}: undisturbed, {seconds:.0f} s")
    while True:
        for conductor in conductors:
            struck = sum(len(report.struck) for report in reports)
            left = (FAULTS.value or sys.maxsize) - struck
            if left <= 0 or time.monotonic() > until:
                break
            reports.append(conductor.run_broken(left, until))
            say(chaos.line(reports[-1]))
        else:
            continue
        break
    if JSON.value:
        print(json.dumps(chaos.as_dict(reports, seed)))
    else:
        chaos.print_reports(reports, seed)
    if any(report.why for report in reports):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    command_line.run(main, (command_line.SEED,), because=_SET)
