"""The command that watches a long run: what it calls a leak, and what it finds."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from support import commands
from support.tiny_runs import ROOT

from experiments.benchmarks import long_run
from experiments.benchmarks.long_run import Growth, left_behind, sample
from meshpar.errors import ConfigError

NOISE = np.random.default_rng(0).normal(0, 1e6, 300)


@pytest.mark.parametrize(
    "values, is_leak",
    [
        (3e8 + NOISE, False),
        (np.full(300, 25.0), False),
        (3e8 + NOISE + 2e8 * np.exp(-np.arange(300) / 20), False),  # The start.
        (3e8 + NOISE + np.linspace(0, 3e7, 300), True),
        (np.linspace(25, 60, 300), True),
        (3e8 - np.linspace(0, 3e7, 300), False),
    ],
    ids=["noise", "constant", "start", "leak", "files", "less"],
)
def test_what_rises_by_more_than_its_scatter_is_a_leak(values, is_leak):
    assert Growth.of(values).is_leak is is_leak


def test_memory_files_and_threads_are_those_of_the_process():
    """Memory of its own, since a heap may give out pages that it holds already."""
    before = sample(os.getpid())
    with mmap.mmap(-1, 2**26, mmap.MAP_PRIVATE) as held, open(os.devnull):
        held.write(b"1" * len(held))
        after = sample(os.getpid())
        assert after.memory - before.memory > 0.9 * len(held)
    assert after.files == before.files + 1 and after.threads >= 1
    assert sample(2**22 + 1) is None


def test_temporary_files_and_halves_are_left_behind(tmp_path):
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    (folder / "metrics.jsonl").touch()
    assert left_behind(folder, temporary) == []
    (folder / "run_id.partial").touch()
    (folder / "4.orbax-checkpoint-tmp-7").mkdir()
    (temporary / "something").touch()
    assert len(left_behind(folder, temporary)) == 3


def test_a_leak_is_exit_code_1_and_is_named(capsys):
    flat = [long_run.Sample(10**8, 20, 8)] * 30
    assert long_run._report(flat, []) == 0
    assert "LEAK" not in capsys.readouterr().out
    more = [x._replace(files=20 + n) for n, x in enumerate(flat)]
    assert long_run._report(more, []) == 1
    assert capsys.readouterr().out.count("LEAK") == 1
    assert long_run._report(flat, [ROOT]) == 1


@pytest.mark.slow
def test_a_run_keeps_its_memory_files_and_threads():
    words = ["--recipe=tiny", "--steps=3000", "--every=100"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.long_run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_starts_the_run_that_is_asked_for(monkeypatch, capsys):
    def start(words, **_):
        raise ConfigError(" ".join(words))

    monkeypatch.setattr(subprocess, "Popen", start)
    words = ["--recipe=tiny", "--steps=7", "--every=3"]
    done = commands.run("benchmarks.long_run", words, monkeypatch, capsys)
    assert done.code == 2
    assert "experiments.run --recipe=tiny --layout=data=1 --steps=7" in done.err
    assert "--set=checkpoint_every=3" in done.err
