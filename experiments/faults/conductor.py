"""The conductor: runs scenarios, strikes them with faults, and judges how they end."""

import collections
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Iterator

from experiments.faults import kinds
from experiments.faults.comparison import (
    LOSS,
    Results,
    first_difference,
    median_of,
    read_results,
)
from experiments.faults.draws import Fault, draw_faults
from experiments.faults.scenarios import RECIPE, SCENARIOS, write_text
from experiments.faults.watched import HungError, LostError, WatchedRun
from experiments.supervision.restarts import FINAL
from meshpar.errors import ConfigError
from meshpar.multihost.watchdog import END, FIRST_STEP, START

RECOVERED, LOST, SILENT, HUNG = "recovered", "lost", "silent", "hung"
VERDICTS = (RECOVERED, LOST, SILENT, HUNG)
"""How runs end, and with each run all faults that it was struck by.

A lost run ends with an error that no resumption mends; a silent one ends well, with
other results than an undisturbed one.
"""

FAULTS_PER_RUN = 20
_MOST_STARTS = 2 * FAULTS_PER_RUN
_HAND = 8
_END_POLL_S = 0.1
_EQUAL_RUNS = 3
"""Undisturbed runs whose results depend on timing: their spread is measured."""

_ORDER = {START: 0, FIRST_STEP: 1, END: 3}
"""Order of the sections; those not named repeat in between."""


@dataclasses.dataclass
class Report:
    """A run under faults.

    Attributes:
      scenario: its name.
      struck: (kind, section that the run was in) of every fault.
      verdict: one of `VERDICTS`.
      why: what was wrong; "" if it recovered.
      folder: its files, which are kept unless it recovered.
      starts: how often it was started by hand.
      seconds: how long it took.
    """

    scenario: str
    struck: list[tuple[str, str]]
    verdict: str
    why: str
    folder: pathlib.Path
    starts: int
    seconds: float


def _order(fault: Fault) -> int:
    """The place of a fault's section in an attempt."""
    return _ORDER.get(fault.section, 2)


def _is_ahead(fault: Fault, section: str) -> bool:
    """Whether a fault's section comes before the end of an attempt."""
    return _order(fault) >= _ORDER.get(section, 2) or not section


def _last(said: str) -> str:
    """The last error among lines of output, or else the last line."""
    lines = said.strip().split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1]


class Conductor:
    """Runs one scenario, unbroken at first and then under faults."""

    def __init__(
        self, name: str, folder: pathlib.Path, seed: int, recipe: str = RECIPE
    ):
        """Prepares the scenario; starts nothing yet.

        Args:
          name: of the scenario.
          folder: for the files of all its runs.
          seed: of the faults.
          recipe: what the runs train.
        """
        self.name, self._folder, self._recipe = name, folder / name, recipe
        self._scenario = SCENARIOS[name]
        self._faults: Iterator[Fault] = draw_faults(seed, name, self._scenario)
        self._hand: collections.deque[Fault] = collections.deque()
        self._usual: dict[str, float] = {}
        self._expected: Results | None = None
        self._num_runs = 0
        self._folder.mkdir(parents=True)
        write_text(self._folder / "text.txt")

    def _start(self, name: str) -> WatchedRun:
        folder = self._folder / name
        data, cache = self._folder / "text.txt", self._folder / "cache"
        return WatchedRun(
            self._scenario.command(folder, data, self._recipe),
            self._scenario.environment(cache),
            folder,
            self._scenario.processes,
        )

    def run_unbroken(self) -> float:
        """Runs the scenario without faults, as the measure of all other runs.

        Returns:
          How long a run took, in seconds.

        Raises:
          ConfigError: the recipe cannot be trained so.
          LostError, HungError: it did not end well.
        """
        began = time.monotonic()
        times = _EQUAL_RUNS if self._scenario.promise == LOSS else 1
        runs = [self._run_unbroken(f"unbroken-{i + 1}") for i in range(times)]
        self._expected = median_of(runs)
        return (time.monotonic() - began) / times

    def _run_unbroken(self, name: str) -> Results:
        entered = time.monotonic()
        run, section, spent = self._start(name), START, collections.Counter()
        visits: collections.Counter[str] = collections.Counter([START])
        try:
            while not self._is_over(run):
                now, new = time.monotonic(), run.position()[1]
                if new != section:
                    spent[section] += now - entered
                    section, entered = new, now
                    visits[new] += 1
                run.rest()
        except LostError as error:
            if run.code() == 2:
                raise ConfigError(str(error)) from error
            raise
        finally:
            run.kill()
        self._usual = {name: spent[name] / visits[name] for name in spent}
        return read_results(run.folder / "run")

    def run_broken(self, most: int, until: float) -> Report:
        """Runs the scenario under faults, and judges it.

        Args:
          most: largest number of faults.
          until: when to strike no more, by `time.monotonic`.
        """
        began, self._num_runs = time.monotonic(), self._num_runs + 1
        run = self._start(f"run-{self._num_runs}")
        report = Report(self.name, [], RECOVERED, "", run.folder, 1, 0.0)
        most = min(most, FAULTS_PER_RUN)
        try:
            while not self._is_over(run):
                if len(report.struck) < most and time.monotonic() < until:
                    self._play(run, report, until)
                else:
                    time.sleep(_END_POLL_S)
            found = read_results(run.folder / "run")
            promise = self._scenario.promise
            report.why = first_difference(found, self._expected, promise)
            report.verdict = SILENT if report.why else RECOVERED
        except HungError as error:
            report.verdict, report.why = HUNG, str(error)
        except Exception as error:  # Of results that cannot be read, as well.
            report.verdict, report.why = LOST, f"{error}" or repr(error)
        finally:
            run.kill()
        report.starts, report.seconds = run.starts, time.monotonic() - began
        if report.verdict == RECOVERED:
            shutil.rmtree(run.folder)
        return report

    def _play(self, run: WatchedRun, report: Report, until: float) -> None:
        """Takes a fault of the hand and strikes, unless its moment does not come."""
        while len(self._hand) < _HAND:
            self._hand.append(next(self._faults))
        section = run.section()
        ahead = [fault for fault in self._hand if _is_ahead(fault, section)]
        # The nearest one, as a start costs more than all else.
        fault = min(ahead or self._hand, key=_order)
        self._hand.remove(fault)
        came = self._wait_for(run, fault, until)
        if came and (struck := kinds.strike(run, fault)):
            report.struck.append((fault.kind, struck))
        else:
            self._hand.append(fault)
            run.rest()

    def _wait_for(self, run: WatchedRun, fault: Fault, until: float) -> bool:
        """Waits for the moment of a fault; False if the run or the time ends before."""
        visits, before = fault.visits, ""
        while run.code() is None and time.monotonic() < until:
            section = run.section()
            if section == fault.section != before:
                if not visits:
                    break
                visits -= 1
            before = section
            run.check_moving()
            run.rest()
        else:
            return False
        usual = self._usual.get(fault.section, 0.0)
        strike_at = time.monotonic() + fault.fraction * usual
        while time.monotonic() < strike_at and run.section() == fault.section:
            run.rest()
        return True

    def _is_over(self, run: WatchedRun) -> bool:
        """Whether a run is done; one that has to be started by hand is started.

        Raises:
          LostError: it ended in another way.
          HungError: it stands still.
        """
        code = run.code()
        if code is None:
            run.check_moving()
            return False
        if code == 0:
            return True
        said = run.text()
        full = run.disk_was_full and code == 2 and "make room" in said
        # Such as a kill of the supervisor, or two after the same step.
        if not (full or code not in FINAL) or run.starts > _MOST_STARTS:
            raise LostError(f"start {run.starts} ended with code {code}: {_last(said)}")
        run.start()
        return False
