"""The chaos command: faults are aimed, losses and hangs are found and kept."""

import dataclasses
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
from support import commands, own_run
from support.marks import slow

import meshpar
from experiments.faults import comparison, draws, faulty_machine, torn, watched
from experiments.faults import conductor as conductors
from experiments.faults.comparison import (
    LOSS,
    METRICS,
    STATE,
    Results,
    first_difference,
    read_results,
)
from experiments.faults.conductor import (
    HUNG,
    LOST,
    RECOVERED,
    SILENT,
    VERDICTS,
    Conductor,
    Report,
)
from experiments.faults.draws import Fault, draw_faults
from experiments.faults.scenarios import SCENARIOS, Scenario
from experiments.reports import chaos
from meshpar.multihost.watchdog import SECTIONS
from meshpar.runs import metrics

ROOT = pathlib.Path(__file__).parents[2]

COUNT = """
say() { echo "$n $1" >$MESHPAR_PROGRESS.new; mv $MESHPAR_PROGRESS.new $MESHPAR_PROGRESS
        sleep 0.05; }
cd HERE; RESTART
n=$(cat done 2>/dev/null | wc -l)
say start
while ((n < 8)); do
  say step; say save
  n=$((n + 1)); echo $n >>done
done
say end
"""
"""A run that counts to 8 and goes on where it was killed."""


def counting(tmp_path, monkeypatch, faults, on_restart=""):
    """A conductor of the run that counts, whose faults are given."""
    script = COUNT.replace("RESTART", on_restart)

    def command(self, folder, data, recipe):
        return ["bash", "-c", script.replace("HERE", str(folder))]

    def results(folder):
        rows = (folder.parent / "done").read_text().split()
        return Results({int(row): {"loss": 1.0} for row in rows}, len(rows), {})

    monkeypatch.setattr(Scenario, "command", command)
    monkeypatch.setattr(conductors, "read_results", results)
    conductor = Conductor("pipeline", tmp_path, seed=0)
    conductor._faults = itertools.chain(faults, itertools.repeat(faults[-1]))
    return conductor


def fault(kind, section, visits=0):
    return Fault(kind, section, visits, fraction=0.0, seed=3)


def test_faults_hit_the_sections_that_they_aim_at(tmp_path, monkeypatch):
    kinds = (draws.KILL, draws.KILL_SUPERVISOR, draws.KILL)
    aimed = [*zip(kinds, ("start", "save", "step"), strict=True)]
    faults = [fault(kind, section, 1 * (section == "save")) for kind, section in aimed]
    conductor = counting(tmp_path, monkeypatch, faults)
    conductor.run_unbroken()
    report = conductor.run_broken(most=3, until=float("inf"))
    assert (report.verdict, report.struck) == (RECOVERED, aimed), report
    assert report.starts >= 2 and not report.folder.exists()


@pytest.mark.parametrize(
    "on_restart, verdict, why",
    [
        ("[ -s done ] && sed -i 1d done", SILENT, "step 1: loss is missing"),
        ("[ -s done ] && exit 1", LOST, "an error before its first step"),
        slow("[ -s done ] && sleep 60", HUNG, "no progress for 8 s"),
    ],
)
def test_a_planted_loss_is_found_and_its_folder_is_kept(
    on_restart, verdict, why, tmp_path, monkeypatch
):
    """Runs that lose a row, end or hang when they are started again."""
    monkeypatch.setattr(watched, "HUNG_S", 8.0)
    faults = [fault(draws.KILL, "save", visits=2)]
    conductor = counting(tmp_path, monkeypatch, faults, on_restart)
    conductor.run_unbroken()
    report = conductor.run_broken(most=1, until=float("inf"))
    assert report.verdict == verdict and why in report.why, report
    assert (report.folder / "done").exists()


def test_equal_seeds_draw_equal_faults_and_a_deck_holds_all():
    for name, scenario in SCENARIOS.items():
        first, again, other = (
            list(itertools.islice(draw_faults(seed, name, scenario), 100))
            for seed in (7, 7, 8)
        )
        assert first == again != other
        found = {(each.kind, each.section) for each in first}
        assert {*itertools.product(draws.EVERYWHERE, SECTIONS)} <= found
        assert ((draws.KILL_ACTOR, "step") in found) == scenario.actors
        garbage = (draws.GARBAGE, "start") in found
        assert garbage == (scenario.processes > 1)


RESULTS = Results(
    {1: {"loss": 0.5, "grad_norm": 0.0}, 2: {"loss": 0.25, "evaluation_loss": 0.1}},
    2,
    {"state/w": np.array([1.0, 0.0], np.float32)},
)


@pytest.mark.parametrize(
    "changed, difference",
    [
        ({}, ""),
        ({"values": {1: RESULTS.values[1]}}, "step 2: loss is missing"),
        ({"values": {**RESULTS.values, 3: {"loss": 1.0}}}, "step 3: loss should not"),
        (
            {"values": {**RESULTS.values, 2: {"loss": 0.25}}},
            "step 2: evaluation_loss is missing",
        ),
        (
            {"values": {**RESULTS.values, 1: {"loss": 0.5, "grad_norm": -0.0}}},
            "step 1: grad_norm is -0.0, not 0.0",
        ),
        ({"step": 1}, "of step 1, not 2"),
        ({"tensors": {}}, "state/w is missing"),
        (
            {"tensors": {"state/w": np.array([1, 1e-45], np.float32)}},
            "state/w has 1 other values",
        ),
        ({"tensors": {"state/w": np.zeros(2)}}, "state/w is float64"),
    ],
)
def test_a_difference_of_one_bit_is_found(changed, difference):
    found = first_difference(dataclasses.replace(RESULTS, **changed), RESULTS)
    assert difference in found and bool(found) == bool(difference)


@pytest.mark.parametrize("seed", range(20))
def test_torn_metrics_keep_what_a_checkpoint_has_synced(seed, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    log = metrics.MetricsLog(run, 0)
    for step in range(1, 6):
        log.write(step, loss=1.0 / step)
    log.close()
    (tmp_path / "disk" / "id" / "3-0").mkdir(parents=True)
    (tmp_path / "disk" / "id" / "3-0" / "0.npz").write_bytes(b"content")
    (tmp_path / "disk" / "id" / "4-0").mkdir()  # A kill came before its file.
    before = (run / metrics.METRICS).read_bytes()
    torn.choose(tmp_path, torn.cut, random.Random(seed))()
    kept = [row["step"] for row in metrics.read(run / metrics.METRICS)]
    assert kept[:3] == [1, 2, 3]
    is_torn = (tmp_path / "disk" / "id" / "3-0" / "0.npz").read_bytes() != b"content"
    assert is_torn != (before != (run / metrics.METRICS).read_bytes())


@pytest.mark.parametrize("damage", [torn.flip, torn.remove])
def test_other_damages_leave_the_metrics_alone(damage, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / metrics.METRICS).write_text("{}\n")
    assert torn.choose(tmp_path, damage, random.Random(0)) is None
    for step in (1, 2):
        (tmp_path / "run" / "checkpoints" / f"{step}").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / f"{step}" / "x").write_bytes(b"content")
    torn.choose(tmp_path, damage, random.Random(0))()
    newest = tmp_path / "run" / "checkpoints" / "2" / "x"
    assert not newest.exists() or newest.read_bytes() != b"content"
    assert (tmp_path / "run" / "checkpoints" / "1" / "x").read_bytes() == b"content"


def test_results_that_depend_on_timing_may_differ_a_little():
    def ending(loss):
        return Results({1: {"loss": 1.0}, 2: {"evaluation_loss": loss}}, 2, {})

    def apart(found, promise):
        return first_difference(found, ending(1.0), promise)

    assert not apart(ending(1.05), LOSS) and not apart(ending(1.0), STATE)
    assert apart(ending(1.05), STATE) == "the last held-out loss is 1.05, not 1.0"
    assert "is 1.2, not 1.0" in apart(ending(1.2), LOSS)
    assert "is nan" in apart(ending(float("nan")), LOSS)
    lacking = dataclasses.replace(ending(1.0), values={2: {"evaluation_loss": 1.0}})
    assert apart(lacking, LOSS) == "step 1 is missing"
    earlier = dataclasses.replace(
        ending(1.0), values=RESULTS.values | {2: {"evaluation_loss": 1.0}}
    )
    assert not apart(earlier, STATE) and apart(earlier, METRICS)
    spread = comparison.median_of([ending(1.0), ending(0.9), ending(1.1)])
    assert spread.last_loss == 1.0 and round(spread.spread, 6) == 0.2
    assert not first_difference(ending(1.29), spread, LOSS)
    assert "is 1.31, not 1.0" in first_difference(ending(1.31), spread, LOSS)
    other = dataclasses.replace(ending(1.0), tensors={"state/w": np.ones(2)})
    assert "state/w should not be there" in apart(other, STATE)
    assert not apart(other, LOSS)


SLOW = """
import os, sys, time
began = time.monotonic()
for number in range(5):
    open(f"{sys.argv[1]}/{number}", "w").close()
print(time.monotonic() - began)
"""


def test_a_slow_disk_is_slow_while_its_flag_is_up(tmp_path):
    (tmp_path / "touch.py").write_text(SLOW)
    words = [
        "-m",
        "experiments.faults.faulty_machine",
        str(tmp_path),
        "touch",
        tmp_path,
    ]
    seconds = []
    for is_slow in (False, True):
        if is_slow:
            faulty_machine.slow_flag(tmp_path).touch()
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
        )
        seconds.append(float(done.stdout))
    assert seconds[0] < 0.4 < 0.5 <= seconds[1]


CLOCK = """
import os, sys, time
from experiments.faults import faulty_machine
import pathlib
flag = faulty_machine.clock_flag(pathlib.Path(sys.argv[1]))
steady = time.monotonic()
begin = time.time()
flag.touch()
moved = faulty_machine.EPOCH_NS - 3600 * 10**9
os.utime(flag, ns=(moved, moved))
there = time.time()
flag.unlink()
print(round(there - begin), round(time.time() - begin), time.monotonic() >= steady)
"""


def test_a_clock_jumps_while_its_flag_is_up(tmp_path):
    (tmp_path / "clock.py").write_text(CLOCK)
    words = ["experiments.faults.faulty_machine", str(tmp_path), "clock", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["-3600", "0", "True"], done.stderr


def test_the_table_has_a_row_for_each_kind_and_a_column_for_each_scenario():
    def report(scenario, kind, verdict):
        struck = [(kind, "save")]
        return Report(scenario, struck, verdict, "", pathlib.Path("x"), 1, 1.0)

    reports = [
        report("pipeline", draws.KILL, RECOVERED),
        report("islands", draws.KILL, RECOVERED),
        report("islands", draws.FLIPPED_BIT, SILENT),
    ]
    assert chaos.markdown(reports).splitlines() == [
        "| recovered | pipeline | islands | all |",
        "| --- | --- | --- | --- |",
        "| kill | 1 | 1 | 2 |",
        "| flipped_bit |  | 1 SILENT | 1 SILENT |",
    ]
    assert chaos.summary(reports, 7).startswith("recovered 2, lost 0, silent 1, hung 0")


def test_a_recipe_of_the_catalog_is_too_slow_to_be_broken(
    monkeypatch, capsys, tmp_path
):
    def say(*words):
        words = [f"--workdir={tmp_path / 'x'}", *words]
        return commands.run("chaos", words, monkeypatch, capsys)

    done = say("--recipe=llama2-7b")
    assert done.code == 2 and "use tiny, or a small recipe of your own" in done.err
    done = say(f"--recipe={ROOT}/tests/support/own_run.py:nat")
    assert done.code == 2 and "did you mean 'net'" in done.err
    assert not (tmp_path / "x").exists()


def test_equal_runs_of_a_file_give_equal_results_however_fast_they_are(tmp_path):
    settings = {"checkpoint_every": 2, "evaluate_every": 2, "steps": 4}
    found = []
    for name in ("once", "again"):
        meshpar.train(own_run.net(steps=4), workdir=tmp_path / name, **settings)
        found.append(read_results(tmp_path / name))
    assert not first_difference(*found)
    assert found[0].values[4].keys() >= {"loss", "mae", "evaluation_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_real_runs_survive_a_few_faults(scenario, tmp_path):
    words = [sys.executable, "-m", "experiments.chaos", "--faults=4", "--minutes=20"]
    words += [f"--scenario={scenario}", f"--workdir={tmp_path}/chaos", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [report[verdict] for verdict in VERDICTS] == [4, 0, 0, 0]
    assert not report["broken"] and not (tmp_path / "chaos").exists()
