"""GPUs that need not be there, and what the planner predicts for one."""

import jax
import pytest

from experiments.benchmarks.gpu_cases import Case
from meshpar import compat, mesh
from meshpar.errors import MeshparError
from meshpar.layouts import parse
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.facts import Facts
from meshpar.runs import programs


def card_of(name: str) -> list[jax.Device]:
    """One GPU by the name of its chip; skips the test without its compiler."""
    try:
        devices = mesh.topology(f"{name}:1")
    except MeshparError:
        pytest.skip('the GPU compiler comes with pip install -e ".[aot-gpu]"')
    if not compat.has_cudnn():
        pytest.skip("cuDNN's attention needs nvidia-cudnn-cu12")
    return devices


def model_of(case: Case) -> tuple:
    """(model, optimizer, abstract batch, compute dtype) of a case."""
    config, run = case.config(rehearsal=False).prepared()
    batch = run.data.abstract_batch(case.rows)
    return run.model, run.optimizer, batch, programs.compute_dtype(config)


def predicted(case: Case, devices: list[jax.Device]) -> Candidate:
    """The planner's prediction of a case."""
    made = Candidates(Facts(*model_of(case), devices), machine_of(devices))
    return made.candidate(parse(case.layout))
