"""The benchmark on a GPU, as far as it runs without one."""

import sys

import jax
import numpy as np
import pytest

from experiments.benchmarks import gpu, gpu_cases, gpu_page, gpu_programs
from experiments.benchmarks.gpu_cases import Case


def test_flops_count_causal_attention_by_half():
    model = Case("llama-1b", 4096, 4).config(rehearsal=False).model
    attention = 2048 * 64 * 2 * (32 + 4)
    weights = 22 * (attention + 3 * 2048 * 5632) + 2048 * 32000
    want = 6 * weights + 6 * 22 * 32 * 64 * 4096
    assert gpu_cases.flops_per_token(model) == want


@pytest.mark.parametrize("recipe", gpu_cases.RECIPES)
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


def test_cases_without_time_or_memory_have_a_row(capsys):
    budget, case = gpu_cases.Budget(100), Case("llama-1b", 4096, 4)

    def too_large():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert budget.run("ours", case, too_large) == 0
    budget._longest = 1000
    assert budget.run("ours", case, lambda: 1.0) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert '"out of memory"' in first and '"no time left"' in second
