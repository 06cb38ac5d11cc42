"""Every layout resumes from every other's checkpoint, bit for bit."""

import contextlib
import functools
import itertools
import json
import pathlib
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
from support import tiny_models, tiny_stack
from support.equality import start
from support.marks import slow
from support.processes import environment
from support.tiny_models import host

import meshpar
from experiments import recipes
from meshpar.checkpoint import persistent
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.runs import metrics

ROOT = pathlib.Path(__file__).parents[2]
LAYOUTS = [
    "data=8",
    "fsdp=8,zero=1",
    "fsdp=8,zero=2",
    "fsdp=8,zero=3",
    "tensor=4",
    "fsdp=2,tensor=4",
    "pipe=4,data=2,microbatches=4",
    "pipe=2,fsdp=2,schedule=interleaved,virtual_stages=2,microbatches=2,tensor=2",
]
SAVED, STEPS = 2, 4


LOWER = {"stack": tiny_stack.lower, "decoder": tiny_models.lower_standard}
BATCH = {"stack": tiny_stack.batch, "decoder": tiny_models.batch}


@functools.cache
def program(of, layout):
    return LOWER[of](layout)


def trained(of, layout, state, first):
    """The state after the last step, and the losses of the steps."""
    losses = []
    for step in range(first, STEPS + 1):
        state, step_metrics = program(of, layout).step(state, BATCH[of](step))
        losses.append(float(step_metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(of, layout)`: folder, saved state, losses of a run without a restart."""

    @functools.cache
    def save(of, layout):
        before, folder = program(of, layout), tmp_path_factory.mktemp("run") / "c"
        state = start(before)
        for step in range(1, SAVED + 1):
            state, _ = before.step(state, BATCH[of](step))
        portable = before.in_model_order(state)
        with open_checkpoints(folder, before) as checkpoints:
            checkpoints.save(SAVED, portable, {"position": 16 * SAVED})
        on_host = host(portable)
        return folder, on_host, trained(of, layout, state, SAVED + 1)[1]

    return save


def open_checkpoints(folder, program):
    return contextlib.closing(Checkpoints(folder, program.portable_state))


CIRCLE = [LAYOUTS[i] for i in (1, 5, 6)]
"""Layouts of every form of stored state: split, split twice, by stages."""


AROUND = list(itertools.pairwise([*CIRCLE, CIRCLE[0]]))
PAIRS = [("stack", *pair) for pair in AROUND]
PAIRS += [slow("decoder", *pair) for pair in itertools.permutations(LAYOUTS, 2)]


@pytest.mark.parametrize("of, before, after", PAIRS)
def test_any_layout_resumes_from_any_other(of, before, after, saved):
    folder, want, unbroken = saved(of, before)
    with open_checkpoints(folder, program(of, after)) as checkpoints:
        restored = checkpoints.restore()
    assert restored.metadata["position"] == 16 * SAVED
    chex.assert_trees_all_equal(host(restored.state), want)
    state = program(of, after).as_stored(restored.state)
    _, losses = trained(of, after, state, SAVED + 1)
    np.testing.assert_allclose(losses, unbroken, rtol=1e-5)


def launched(num, logs, *command):
    launch = ["launch/local.sh", f"--log_dir={logs}", str(num), "--"]
    done = subprocess.run(
        [*launch, sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_any_number_of_processes_resumes_from_any_other(tmp_path):
    """1, 2 and 4 real processes in every order give one program and one run."""
    layout, constant = "data=2,fsdp=2,tensor=2", "--set=optimizer.final_fraction=1"
    flags = ["--recipe=tiny", f"--layout={layout}", constant, "--set=sample_tokens=0"]
    flags += ["--set=optimizer.warmup_steps=0"]  # No rate depends on the last step.
    run = ["-m", "experiments.run", *flags]
    launched(1, tmp_path / "logs", *run, f"--workdir={tmp_path}/unbroken", "--steps=14")
    folder, by_processes = tmp_path / "run" / "checkpoints", {}
    for number, processes in enumerate((1, 2, 4, 1, 4, 2, 1), 1):
        logs = tmp_path / f"logs{number}"
        if number > 1:
            reference, out = tmp_path / "reference.npz", tmp_path / f"{number}.json"
            np.savez(reference, **stored_leaves(folder))
            check = ["tests/support/restored_shards.py", layout, folder, reference, out]
            launched(processes, logs, *check)
            step, collectives = json.loads(out.read_text())
            assert step == 2 * number - 2
            by_processes.setdefault(processes, collectives)
        launched(
            processes, logs, *run, f"--workdir={tmp_path}/run", f"--steps={2 * number}"
        )
    assert by_processes[1]
    assert by_processes[1] == by_processes[2] == by_processes[4]
    losses = [
        [row["loss"] for row in metrics.read(path / "metrics.jsonl") if "loss" in row]
        for path in (tmp_path / "run", tmp_path / "unbroken")
    ]
    assert len(losses[0]) == 14
    np.testing.assert_allclose(*losses, rtol=1e-5)


def stored_leaves(folder):
    """{number: array} of the newest checkpoint, read by this process alone."""
    newest = persistent.find_checkpoints(folder)[-1]
    config = recipes.stored(newest.metadata["config"])
    layout = meshpar.layouts.parse("data=1")
    single = config.make_program(layout, jax.devices()[:1])
    state, _ = persistent.read_checkpoint(newest.path, single.portable_state, None)
    return {str(n): np.asarray(x) for n, x in enumerate(jax.tree.leaves(state))}
