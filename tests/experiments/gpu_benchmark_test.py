"""The benchmark on a GPU, as far as it runs without one."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from support.marks import first

from experiments.benchmarks import (
    gpu,
    gpu_cases,
    gpu_kernels,
    gpu_page,
    gpu_programs,
)
from experiments.benchmarks.gpu_cases import Case


def test_flops_count_causal_attention_by_half():
    model = Case("llama-1b", 4096, 4).config(rehearsal=False).model
    attention = 2048 * 64 * 2 * (32 + 4)
    weights = 22 * (attention + 3 * 2048 * 5632) + 2048 * 32000
    want = 6 * weights + 6 * 22 * 32 * 64 * 4096
    assert gpu_cases.flops_per_token(model) == want


@pytest.mark.slow
@pytest.mark.parametrize("recipe", first(1, gpu_cases.RECIPES))
def test_the_page_has_the_loss_of_meshpar(recipe):
    case = Case(recipe, 4096, 2)
    program = gpu_programs.make_program(case, True, jax.devices()[0])
    batch = gpu_cases.random_batch(case.config(rehearsal=True))
    # Initial weights are so small that the loss hardly depends on the layers.
    params = {path: 5 * np.asarray(x) for path, x in program.init(0).params.items()}
    step = gpu_page.make_step(case.config(rehearsal=True).model, "full", "xla")
    with jax.numpy_rank_promotion("allow"):
        _, loss = step(gpu_page.make_state(params), batch)
    want = program.evaluate(program.init(params=params), batch)["loss"]
    assert float(loss) == pytest.approx(float(want), rel=5e-4)


@pytest.mark.parametrize(
    "code, seconds, want",
    [
        ("print('a'); print('b')", 30, ["a", "b"]),
        ("print('a'); raise SystemExit(3)", 30, ["a", "failed: exit code 3: a"]),
        ("import time; time.sleep(60)", 1, ["failed: not done after 1 s"]),
    ],
)
def test_parts_that_fail_or_hang_are_told(code, seconds, want):
    assert list(gpu._lines([sys.executable, "-c", code], seconds)) == want


def test_what_matters_most_is_measured_first():
    for memory in (80, 141):
        jobs = list(gpu.jobs(memory))
        parts = [(job.part, job.case.recipe) for job in jobs if job.case]
        assert parts[:2] == [(gpu.OURS, "llama3.2-3b"), (gpu.OURS, "llama-1b")]
        assert parts[2:4] == [(gpu.PAGE, "llama3.2-3b"), (gpu.PAGE, "llama-1b")]
        assert all(job.case is None or job.case.describe() for job in jobs)


def test_a_job_without_time_or_memory_has_a_row(capsys, monkeypatch):
    case = Case("llama-1b", 4096, 4)
    (row,) = gpu._rows_of(gpu.Job(gpu.OURS, 60, case), end=0.0)
    assert row["status"] == "no time left"

    def too_large(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setitem(gpu._RUNNERS, gpu.OURS, too_large)
    with flagsaver.flagsaver():
        flags.FLAGS(["gpu", f"--case={json.dumps(case._asdict())}", "--rehearse"])
        gpu._run_part(gpu.OURS)
    assert '"out of memory"' in capsys.readouterr().out


def test_kernels_have_classes():
    names = "nvjet_hsh_128x256", "cudnn_generated_fort_native_sdpa", "loop_copy_fusion"
    assert list(map(gpu_kernels.class_of, names)) == ["matmul", "attention", "copy"]
    assert gpu_kernels.class_of("loop_add_fusion") == "other"


@pytest.mark.slow
def test_it_needs_no_package_that_it_does_not_use():
    """Images of GPU machines have jax and few others."""
    code = """
import sys
from importlib import abc

class Absent(abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"grain", "tensorboardX", "qwix", "ray"}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
import jax
from meshpar.runs import trainer
from experiments.benchmarks import gpu, gpu_cases, gpu_programs
case = gpu_cases.Case("llama-1b", 4096, 2)
gpu_programs.make_program(case, True, jax.devices()[0])
gpu_programs.run_verify()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE
    )
    (row,) = done.stdout.decode().splitlines()
    assert json.loads(row.removeprefix(gpu_cases.ROW))["status"] == "ok"
