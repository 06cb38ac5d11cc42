r"""Breaks real training runs at random, and proves that nothing is lost.

    python -m experiments.chaos --faults=60 --seed=7
    python -m experiments.chaos --recipe=my_run.py:net --minutes=10

Each scenario trains once undisturbed. Then it trains again and again under faults, as
real processes: kills, stops, pauses, a full or slow disk, damaged files, garbage at the
coordinator's port, in all sections of a run. Every run is resumed until it ends, with
the metrics and the state of the undisturbed one, bit for bit. Otherwise the command
exits with code 1 and names the folder of the broken run.
"""

import json
import math
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Sequence

from absl import flags, logging

from experiments import recipes
from experiments.faults.conductor import Conductor, Report
from experiments.faults.scenarios import RECIPE, SCENARIOS
from experiments.faults.watched import HungError, LostError
from experiments.reports import chaos
from meshpar.commands import command_line, outputs
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs.config import check_setting
from meshpar.settings import Choice, Number, Path

MINUTES = flags.DEFINE_float(
    "minutes", None, "No fault is struck after this time; 10 without --faults."
)
FAULTS = flags.DEFINE_integer("faults", 0, "Number of faults; 0 for as many as fit.")
SCENARIO = flags.DEFINE_list(
    "scenario", None, "Scenarios to run; all that the recipe and this machine take."
)
MARKDOWN = flags.DEFINE_string("markdown", None, "Write the table into this file, too.")
WORKDIR = flags.DEFINE_string("workdir", "runs/chaos", "Folder of the runs.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")
_MINUTES = 10.0
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


TAKES = (command_line.RECIPE, command_line.SEED)
"""The shared flags that it reads."""
_OF_RUNS = command_line.OF_RUNS
_SET = {flag.name: "its scenarios set it" for flag in _OF_RUNS}
_CATALOG = recipes.CATALOG._replace(default=RECIPE)


def _check_flags() -> None:
    """Raises ConfigError for one scenario twice, or a recipe that cannot be broken."""
    names = SCENARIO.value or []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--scenario names {name!r} twice; leave one out")
    recipe = command_line.RECIPE.value
    command_line.catalog().get(recipe)
    if recipe != RECIPE and ":" not in recipe:
        raise ConfigError(
            f"--recipe={recipe}: runs are started hundreds of times; use {RECIPE}, or "
            "a small recipe of your own, FILE.py:FUNCTION"
        )
    if MARKDOWN.value is not None:
        outputs.check_file(MARKDOWN.value, "--markdown")


def _unbroken(names: Sequence[str], folder: pathlib.Path, seed: int, say) -> list:
    """The scenarios that have run undisturbed; says which ones the recipe refuses.

    Raises:
      ConfigError: it refuses all of them.
    """
    conductors, refused = [], ""
    for name in names:
        conductor = Conductor(name, folder, seed, command_line.RECIPE.value)
        try:
            seconds = conductor.run_unbroken()
        except ConfigError as error:
            refused = f"{name} is left out, as the run refuses it: {error}"
            say(refused)
        except (LostError, HungError) as error:
            raise RuntimeError(f"{name}, undisturbed: {error}") from error
        else:
            say(f"{name}: undisturbed, {seconds:.0f} s")
            conductors.append(conductor)
    if not conductors:
        raise ConfigError(f"no scenario is left; give another --recipe: {refused}")
    return conductors


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
    minutes = MINUTES.value or (math.inf if FAULTS.value else _MINUTES)
    until = time.monotonic() + 60 * minutes
    console = terminal.wide_console()

    def say(text: str) -> None:
        if not JSON.value:
            console.print(text, soft_wrap=True)

    conductors = _unbroken(SCENARIO.value or list(SCENARIOS), folder, seed, say)
    while True:
        for conductor in conductors:
            struck = sum(len(report.struck) for report in reports)
            left = (FAULTS.value or sys.maxsize) - struck
            if left <= 0 or time.monotonic() > until:
                break
            reports.append(conductor.run_broken(left, until))
            say(chaos.line(reports[-1]))
            if MARKDOWN.value is not None:  # A part of the table, if this is killed.
                text = f"{chaos.markdown(reports)}\n{chaos.summary(reports, seed)}\n"
                pathlib.Path(MARKDOWN.value).write_text(text)
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
    command_line.run(main, TAKES, because=_SET, known=_CATALOG)
