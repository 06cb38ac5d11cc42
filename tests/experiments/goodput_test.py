"""The record of a run's time and the goodput that is read from it."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import pytest
from support import tiny_runs

from meshpar.multihost.watchdog import END as AT_END
from meshpar.multihost.watchdog import EVALUATION, FIRST_STEP, SAVE, STEP
from meshpar.runs import goodput, startup
from meshpar.runs.time_record import DONE, RECORD, RESTORE, STOPPED, TimeRecord


class Times:
    """A clock that tests move, and one start of a run that it times."""

    def __init__(self, folder, now=0.0):
        self.folder, self.now = folder, now

    def __call__(self):
        return self.now

    def start(self, restored, began):
        """A start that takes 5 s, restores for 2 s and reaches its first step."""
        self.now = began
        self.record = TimeRecord(began - 1.0, clock=self)
        self.recording = self.record.recording(
            self.folder, layout="data=8", processes=1
        )
        self.recording.__enter__()
        self.after(4, lambda: self.record.enter(RESTORE))
        self.after(2, lambda: self.record.restored(restored))
        self.after(0, lambda: self.record.note(0, FIRST_STEP))

    def after(self, seconds, act):
        self.now += seconds
        act()

    def steps(self, *numbers):
        """Steps of 1 s each."""
        for number in numbers:
            self.after(1, lambda n=number: self.record.note(n, STEP))

    def section(self, name, step, seconds):
        self.record.note(step, name)
        self.after(seconds, lambda: self.record.note(step, STEP))

    def kill(self):
        """Forgets the record without a last line, as kill -9 does."""
        self.record._closed.set()
        self.record._file.close()
        self.record._file = None


@pytest.fixture
def times(tmp_path):
    return Times(tmp_path)


def used(start):
    return {use: x for use, x in start.seconds.items() if x}


def test_two_kills_lose_the_steps_after_the_checkpoints(times):
    """Lost: 5 and 6, once; 9, which was interrupted after it was done, and half a step.

    All seconds of the wall are found, in one use each.
    """
    times.start(0, 100)
    times.steps(1, 2, 3, 4)
    times.section(SAVE, 4, 3)
    times.steps(5, 6)
    times.after(0.5, lambda: None)
    times.record._file.write(json.dumps({"time": times.now}) + "\n")  # Half of step 7.
    times.kill()

    times.start(4, 200)
    times.steps(5, 6, 7, 8)
    times.section(SAVE, 8, 1)
    times.section(EVALUATION, 8, 2)
    times.steps(9)
    times.kill()
    with (times.folder / RECORD).open("a") as file:
        file.write('{"time": 299, "part": "ste')  # Torn.

    times.start(8, 300)
    times.steps(9, 10)
    times.record.note(10, AT_END)
    times.after(4, lambda: times.record.close(DONE))

    found = goodput.read(times.folder)
    first, second, third = found.starts
    begin = dict(start=5, restore=2)
    assert used(first) == pytest.approx(
        begin | dict(steps=4, checkpoints=3, lost=2.5, down=199 - 115.5)
    )
    assert used(second) == pytest.approx(
        begin | dict(steps=4, checkpoints=1, evaluation=2, lost=1, down=299 - 214)
    )
    assert used(third) == begin | dict(steps=2, end=4)
    assert found.wall_seconds == pytest.approx(times.now - 99)
    assert [start.lost_steps for start in found.starts] == [2, 1, 0]
    assert [start.num_steps for start in found.starts] == [6, 5, 2]
    assert [start.ended for start in found.starts] == ["", "", "done"]
    assert found.value == pytest.approx(10 / (times.now - 99))


def test_a_step_counts_once_however_far_back_a_later_start_goes(times):
    """The third start goes back behind the second, as its checkpoint was damaged."""
    for number, (restored, last) in enumerate([(0, 6), (4, 8), (2, 3)]):
        times.start(restored, 100 * (number + 1))
        times.steps(*range(restored + 1, last + 1))
        times.kill()
    found = goodput.read(times.folder)
    assert [start.lost_steps for start in found.starts] == [4, 4, 0]
    assert found.seconds["steps"] == 2 + 0 + 1 and found.seconds["lost"] == 8


def test_pauses_after_the_last_step_are_no_down_time_but_those_after_a_stop_are(times):
    times.start(0, 100)
    times.steps(1)
    times.record.close(STOPPED)
    times.start(1, 200)
    times.steps(2)
    times.record.close(DONE)
    times.start(2, 10_000)
    times.steps(3)
    times.record.close(DONE)
    found = goodput.read(times.folder)
    assert found.seconds["down"] == 199 - 107
    assert found.wall_seconds == 3 * 8 + 199 - 107
    assert found.lost_steps == 0


def test_compilations_are_taken_out_of_the_part_that_they_are_in(times):
    def compiled(begin, end):
        for event in (startup.COMPILE_EVENT, startup.TRACE_EVENTS[0]):
            jax.monitoring.record_event_time_span(event, begin, end)

    times.start(0, 100)
    times.after(
        10, lambda: compiled(times.now - 9, times.now - 3)
    )  # Of the first step.
    times.steps(1)
    times.record.note(1, EVALUATION)
    times.after(5, lambda: compiled(times.now - 2, times.now))
    times.record.note(1, STEP)
    times.steps(2)
    times.record.close(DONE)
    seconds = goodput.read(times.folder).seconds
    assert seconds["compile"] == pytest.approx(8)
    assert seconds["steps"] == pytest.approx(11 - 6 + 1)
    assert seconds["evaluation"] == pytest.approx(3)


def test_an_error_ends_the_record_and_a_full_disk_does_not_hide_it(times, tmp_path):
    record = TimeRecord(clock=times)
    with pytest.raises(KeyError):
        with record.recording(tmp_path):
            record.note(0, FIRST_STEP)
            times.now = 3
            raise KeyError
    (start,) = goodput.read(tmp_path).starts
    assert start.ended == "failed" and start.seconds["lost"] == 3
    full = open("/dev/full", "w", buffering=1)
    with pytest.raises(KeyError):
        with record.recording(tmp_path):
            record._file.close()
            record._file = full
            raise KeyError


def test_without_a_record_there_is_no_goodput(tmp_path):
    found = goodput.read(tmp_path)
    assert found.starts == () and found.value == 0


@pytest.mark.slow
def test_a_run_killed_twice_and_resumed_elsewhere_accounts_for_all_its_time(
    text, tmp_path
):
    """Real processes; the last one under another layout. Checkpoints every 4 steps."""
    workdir = tmp_path / "run"
    more = ["--set=checkpoint_every=4", "--set=evaluate_every=4", "--steps=100000"]
    began, seen = time.time(), []
    for layout in ("data=2", "fsdp=2"):
        command = tiny_runs.command(text, workdir, *more, f"--layout={layout}")
        process = subprocess.Popen(command, cwd=tiny_runs.ROOT)
        wanted = max([9, *(s + 9 for s in seen[-1:])])
        while max(tiny_runs.losses(workdir), default=0) < wanted:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        seen.append(goodput.read(workdir).starts[-1].last_step)
    last = seen[-1] + 8
    command = tiny_runs.command(text, workdir, *more[:2], f"--steps={last}")
    done = subprocess.run(
        [*command, "--layout=data=1"],
        cwd=tiny_runs.ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ended = time.time()
    found = goodput.read(workdir)
    assert str(found) in done.stdout and found.starts[-1].ended == "done"
    layouts = [start.facts["layout"].split(",")[0] for start in found.starts]
    assert layouts == ["data=2", "fsdp=2", "data=1"]
    restored = [start.restored for start in found.starts]
    assert restored[0] == 0 and all(step % 4 == 0 for step in restored)
    lost = [step - after for step, after in zip(seen, restored[1:], strict=True)]
    assert [start.lost_steps for start in found.starts] == [*lost, 0]
    kept = sum(start.num_steps - start.lost_steps for start in found.starts)
    assert kept == last
    # Processes begin a little later than they are started, and end a little later.
    assert 0.6 * (ended - began) < found.wall_seconds <= ended - began + 0.02
    words = [sys.executable, "-m", "experiments.goodput", str(workdir)]
    shown = subprocess.run(words, cwd=tiny_runs.ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert f"goodput {found.value:.1%}" in shown.stdout
    assert (workdir / "goodput.png").stat().st_size > 1000


def test_a_date_that_jumps_moves_no_line_of_a_start(tmp_path, monkeypatch):
    record, now = TimeRecord(), time.time
    with record.recording(tmp_path):
        monkeypatch.setattr(time, "time", lambda: now() + 400 * 86_400)
        record.enter(RESTORE)
        record.close(DONE)
    assert 0 <= goodput.read(tmp_path).wall_seconds < 60
