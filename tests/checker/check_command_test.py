"""The command `check`: exit codes, the page, and errors with a remedy."""

import subprocess
import sys

from support import commands

FILE = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def make_step():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))

    def step(weight, x):
        return weight - jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(weight)

    x = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("rows")))
    weight = jax.device_put(jnp.ones((32, 16)), NamedSharding(mesh, P()))
    return jax.jit(step), weight, x


def nothing():
    return 3
"""


def run(tmp_path, name, *flags):
    file = tmp_path / "my_step.py"
    file.write_text(FILE)
    words = [sys.executable, "-m", "experiments.check", f"{file}:{name}", *flags]
    return subprocess.run(words, cwd=commands.ROOT, capture_output=True, text=True)


def test_what_is_forbidden_ends_with_code_one(tmp_path):
    page = tmp_path / "step.html"
    flags = f"--html={page}", "--assert_no=donation>1kB", "--against=one device"
    done = run(tmp_path, "make_step", *flags)
    assert done.returncode == 1, done.stderr
    assert "forbidden: donation>1kB: [donation] weight float32[32, 16]" in done.stdout
    assert "EQUAL to the same step on one device: 1 steps, 1 tensors" in done.stdout
    assert "all_reduce" in page.read_text()


def test_a_function_that_returns_no_step_is_an_error(tmp_path):
    done = run(tmp_path, "nothing")
    assert done.returncode == 2
    assert "nothing has to return (step, *arguments)" in done.stderr
