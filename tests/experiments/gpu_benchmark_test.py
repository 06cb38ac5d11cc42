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
    gpu_torch,
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
    step = gpu_page.make_step(case.config(rehearsal=True).model, "full", 1, "xla")
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


@pytest.mark.parametrize("memory", [80, 141])
def test_what_matters_most_is_measured_first_and_in_time(memory):
    jobs = list(gpu.jobs(memory))
    parts = [(job.part, job.case.recipe) for job in jobs if job.case]
    assert parts[:2] == [(gpu.OURS, "llama3.2-3b"), (gpu.OURS, "llama-1b")]
    assert parts[2:4] == [(gpu.PAGE, "llama3.2-3b"), (gpu.PAGE, "llama-1b")]
    device, seconds, measured = 15, gpu.SECONDS.default, []
    for job in jobs:
        seconds -= job.expected
        if seconds > device:
            measured.append(job)
    assert {job.part for job in measured} == {job.part for job in jobs}
    assert any(job.case.float8 for job in measured if job.case)


def test_a_rehearsal_trains_every_case():
    """Tiny models have fewer layers than the policies of a case name."""
    jobs = [job for memory in (80, 141) for job in gpu.jobs(memory)]
    cases = [job.case.rehearsed() for job in jobs if job.case]
    for case in {case.remat: case for case in cases}.values():
        gpu_programs.make_program(case, True, jax.devices()[0])


def test_a_part_alone_measures_the_first_case(capsys, monkeypatch):
    seen = []
    monkeypatch.setitem(gpu._RUNNERS, gpu.OURS, lambda case, *_: seen.append(case))
    with flagsaver.flagsaver():
        flags.FLAGS(["gpu", "--rehearse", "--part=ours"])
        assert gpu.main([]) == 0
    assert seen == [gpu_cases.same_cases()[0].rehearsed()]


def test_other_first_losses_are_told():
    def row(program, loss):
        return dict(program=program, case="c", batch="b", first_loss=loss)

    ours = row(gpu_programs.OURS, 10.0)
    assert gpu.different_losses([ours, row(gpu_programs.PAGE, 10.05)]) == []
    (wrong,) = gpu.different_losses([ours, row(gpu_torch.PROGRAM, 10.2)])
    assert wrong["status"] == "WRONG: meshpar 10.0000, torch.compile 10.2000"


def test_the_table_has_the_card_as_its_title():
    rows = [dict(program="device", case="H200", status="ok", matmul_tflops=730.0)]
    rows += [dict(program="ours", case="c", status="ok", ms=12.34, spread=0.01)]
    table = gpu._table(rows)
    assert "H200" in table.title and "matmul_tflops=730.0" in table.title
    assert [list(column.cells) for column in table.columns[3:]] == [["12.3"], ["1.0%"]]


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
