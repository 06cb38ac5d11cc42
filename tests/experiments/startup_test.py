"""Startups of processes: their parts, and the programs that a restart loads."""

import gc
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.runs import startup
from meshpar.runs.startup import COMPILING, IMPORTS, SETUP, TRACING, Startup

ROOT = pathlib.Path(__file__).parents[2]


TIMED = """
import time
begin = time.time()
from meshpar.runs.startup import Startup
with Startup() as clock:
    print(sum(clock.finish().values()), time.time() - begin)
"""


def test_the_clock_begins_with_the_process():
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-c", TIMED], cwd=ROOT, capture_output=True, text=True
    )
    around = time.time() - begin
    total, imports = map(float, done.stdout.split())
    assert imports < total < around + 0.02  # The system counts in ticks of 0.01 s.


def test_the_parts_add_up():
    with Startup() as clock:
        begin = clock._entered[0][1]
        clock.enter(SETUP)
        assert not gc.isenabled()
        jax.jit(lambda x: jnp.sin(x) * 3 + 4)(jnp.ones(3))
        seconds = clock.finish()
        assert gc.isenabled()
        assert sum(seconds.values()) == pytest.approx(time.time() - begin, abs=0.5)
        assert clock.finish() == {}
    assert clock.num_compiled and min(seconds[COMPILING], seconds[TRACING]) > 0
    assert seconds[IMPORTS] > 0 and seconds[SETUP] > 0


def test_nested_spans_count_once_and_compiling_is_no_tracing():
    with Startup() as clock:
        now = time.time()
        clock._entered = [(IMPORTS, now - 20)]  # The process itself may be younger.
        for begin, end in ((-10, -6), (-9, -8), (-3, -1)):
            clock._hear_span(startup.TRACE_EVENTS[0], now + begin, now + end)
        clock._hear_span(startup.COMPILE_EVENT, now - 7, now - 5)
        seconds = clock.finish()
    assert seconds[TRACING] == pytest.approx(3 + 2)
    assert seconds[COMPILING] == pytest.approx(2)
    assert "of CPU" in clock.describe(seconds)


@pytest.mark.slow
def test_a_restart_loads_its_programs_from_the_folder_of_the_run(tmp_path):
    """Also small ones; a half that a kill left is compiled anew, and replaced."""
    text = tmp_path / "text.txt"
    words = ["alpha ", "beta ", "gamma ", "delta "]
    text.write_text("".join(np.random.default_rng(0).choice(words, 20_000)))
    run = [
        *(sys.executable, "-m", "experiments.run", "--recipe=tiny", "--devices=1"),
        *("--steps=4", "--set=checkpoint_every=2", "--set=sample_tokens=0"),
        *(f"--data={text}", f"--workdir={tmp_path}"),
    ]
    own = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    lines = []
    for _ in range(2):
        done = subprocess.run(
            run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert "compilation cache" not in done.stderr
        lines.append(re.search("first step after.*", done.stdout)[0])
        (step,) = (tmp_path / "compiled").glob("jit_step-*")
        if len(lines) == 1:
            size = step.stat().st_size
            os.truncate(step, size // 2)
            shutil.rmtree(tmp_path / "checkpoints/4")
    assert step.stat().st_size > size * 0.9
    assert "cached" not in lines[0]
    counts = re.search(r"(\d+) of (\d+) programs", lines[1])
    cached, num_programs = map(int, counts.groups())
    assert cached == num_programs - 1
    for line in lines:
        total, cpu, *parts = map(float, re.findall(r"\b\d+\.\d\b", line))
        assert cpu > 0
        assert sum(parts) == pytest.approx(total, abs=0.05 * len(parts) + 0.06)
