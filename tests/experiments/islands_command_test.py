"""Islands as a user types them: settings, a run that resumes, and the sweep."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import time

import jax
import pytest

import meshpar
from experiments import recipes
from experiments import stragglers as simulated
from experiments.reports import islands
from meshpar.errors import ConfigError, MeshparError
from meshpar.islands import ASP, BSP, SSP, BoundedDelay, updates
from meshpar.islands.push_filters import Significant, Zlib
from meshpar.runs import metrics, programs
from meshpar.runs.config import with_settings
from meshpar.runs.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = ["optimizer_mode=islands", "islands.workers=2", "islands.consistency=ssp:2"]


def configured(*settings):
    return with_settings(recipes.get("tiny"), [*SETTINGS, *settings])


def test_settings_become_the_mode():
    mode = programs.make_mode(configured("islands.push=4", "islands.wire=int8"))
    assert (mode.workers, mode.consistency, mode.push) == (2, SSP(2), 4)
    for text, model in {"bsp": BSP(), "asp": ASP()}.items():
        assert programs.make_mode(configured(f"islands.consistency={text}")) == (
            dataclasses.replace(mode, push=1, wire="f32", consistency=model)
        )
    named = configured("islands.filters=relative:0.01+zlib", "islands.history=3")
    assert programs.make_mode(named) == dataclasses.replace(
        mode, push=1, wire="f32", history=3, filters=(Significant(0.01, True), Zlib())
    )
    delayed = programs.make_mode(configured("islands.consistency=bounded_delay:3"))
    assert delayed.consistency == BoundedDelay(3)


@pytest.mark.parametrize(
    "settings, error, words",
    [
        (["islands.algorithm=downpoor"], ConfigError, "did you mean 'downpour'"),
        (["islands.consistency=ssp"], MeshparError, "use bsp, asp, ssp:S"),
        (["islands.filters=kkt"], ConfigError, "use significant:T, relative:T, skip:P"),
        (["islands.filters=zlib", "islands.budget=64"], MeshparError, "use one alone"),
        (["islands.workers=0"], ConfigError, "islands.workers=0: use"),
        (["islands.algorithm=easgd", "islands.consistency=bsp"], MeshparError, "asp"),
        (["optimizer_mode=synchronous"], ConfigError, "add --optimizer_mode=islands"),
    ],
)
def test_settings_that_cannot_be_meant(settings, error, words):
    with pytest.raises(error, match=words):
        programs.make_mode(configured(*settings))


@pytest.mark.slow
def test_elastic_islands_go_on_from_a_synchronous_run(tmp_path, capsys):
    """The held-out loss of their center is that of the run, and not of new weights."""
    config = dataclasses.replace(
        recipes.get("tiny"),
        steps=24,
        workdir=str(tmp_path),
        sample_tokens=0,
        evaluate_every=24,
    )
    config = with_settings(config, ["model.depth=1"])
    layout, devices = meshpar.layouts.parse("data=1"), jax.devices()[:2]
    assert Trainer(config, layout, devices[:1]).run() == 0
    words = ["algorithm=easgd", "consistency=asp", "push=2", "workers=2"]
    settings = ["optimizer_mode=islands", *(f"islands.{word}" for word in words)]
    config = dataclasses.replace(config, steps=28, evaluate_every=4)
    assert Trainer(with_settings(config, settings), layout, devices).run() == 0
    assert "going on from step 24" in capsys.readouterr().out
    rows = metrics.read(tmp_path / "metrics.jsonl")
    found = {r["step"]: r["evaluation_loss"] for r in rows if "evaluation_loss" in r}
    print(found)
    assert found[28] < found[24] + 0.02


@pytest.mark.slow
def test_a_run_of_islands_resumes_and_draws_time_lines(tmp_path, capsys):
    def train(steps):
        config = dataclasses.replace(
            configured("model.depth=1"),
            steps=steps,
            workdir=str(tmp_path),
            sample_tokens=0,
        )
        layout = meshpar.layouts.parse("data=1")
        assert Trainer(config, layout, jax.devices()[:2]).run() == 0

    train(4)
    train(8)
    said = capsys.readouterr().out
    assert "going on from step 4" in said and "islands: 2 of 1 device(s)" in said
    rows = metrics.read(tmp_path / "metrics.jsonl")
    clocks = [row for row in rows if any(key.startswith("clock/") for key in row)]
    largest = max(row.get(f"clock/{i}", 0) for row in clocks for i in range(2))
    assert largest >= 6  # Clocks go on where the checkpoint had them.
    assert (tmp_path / "time_lines.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_run_in_ray_that_is_killed_resumes_with_every_clock(tmp_path):
    pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')
    words = ["host=ray", "workers=2", "servers=2", "replicas=2", "consistency=ssp:2"]
    settings = ["model.depth=1", "sample_tokens=0", "checkpoint_every=4"]
    settings += [f"workdir={tmp_path}", *(f"islands.{word}" for word in words)]
    command = [sys.executable, "-m", "experiments.run", "--recipe=tiny"]
    command += ["--optimizer_mode=islands", "--layout=data=1"]
    command += [f"--set={setting}" for setting in settings]

    def largest_step():
        path = tmp_path / "metrics.jsonl"
        rows = metrics.read(path) if path.exists() else []
        return max((row["step"] for row in rows), default=0)

    running = subprocess.Popen([*command, "--steps=4000"], cwd=ROOT)
    while largest_step() < 10:  # The checkpoint of step 4 is complete.
        assert running.poll() is None
        time.sleep(0.2)
    running.kill()
    running.wait()
    killed, steps = largest_step(), largest_step() + 40
    done = subprocess.run(
        [*command, f"--steps={steps}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (start,) = map(int, re.findall(r"going on from step (\d+)", done.stdout))
    assert 4 <= start <= killed
    rows = metrics.read(tmp_path / "metrics.jsonl")
    last = [max(row.get(f"clock/{i}", 0) for row in rows) for i in range(2)]
    # Every step is one push per island on average; the last two pushes of each island
    # may be missing in the metrics. Clocks from 0 on would count steps - start.
    assert sum(last) >= 2 * steps - 4 > 2 * (steps - start)


def test_the_program_of_an_island_can_be_sent_to_its_process():
    ray = pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')
    config = configured("islands.host=ray", "model.vocab=64")
    layout = meshpar.layouts.parse("data=1")
    made = config.make_program(layout, jax.devices()[:1])
    program = ray.cloudpickle.loads(ray.cloudpickle.dumps(made.build))()
    assert program.abstract_params == made.abstract_params


def swept(consistency, stragglers, update=None, seconds=12.0):
    update = update or updates.sgd(0.05)
    return simulated.simulate(
        consistency, stragglers, update, workers=8, seconds=seconds
    )


def test_waiting_falls_with_staleness_under_transient_stragglers():
    results = [swept(SSP(s), "transient") for s in (1, 3, 10)] + [
        swept(ASP(), "transient")
    ]
    waiting = [result.waiting for result in results]
    assert waiting == sorted(waiting, reverse=True) and waiting[0] > 3 * waiting[-1]
    fewest = min(result.curve[-1][2] for result in results)
    *ssp, asp = (result.loss_after(fewest) for result in results)
    assert max(ssp) <= asp + 0.05


@pytest.mark.parametrize("stragglers", ["transient", "permanent"])
def test_downpour_with_adagrad_beats_bsp_in_time_to_a_target(stragglers):
    bsp = swept(BSP(), stragglers, updates.sgd(0.05 * 8))._replace(case="BSP")
    downpour = swept(ASP(), stragglers, updates.adagrad(0.05))
    goal = islands.target([bsp], stragglers)
    print(bsp.seconds_to(goal), downpour.seconds_to(goal))
    assert downpour.seconds_to(goal) < 0.75 * bsp.seconds_to(goal)


def test_the_sweep_is_deterministic():
    assert swept(SSP(1), "transient", seconds=3.0) == swept(
        SSP(1), "transient", seconds=3.0
    )
