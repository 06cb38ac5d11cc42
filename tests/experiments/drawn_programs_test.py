"""Programs drawn at random are stored with what did not compile, and never lost."""

import pathlib
import re

import jax
import pytest
from support.tpu_programs import tpu

from experiments.benchmarks import drawn_programs
from experiments.benchmarks.compiled_programs import Compiled
from meshpar.layouts import parse

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def draws(monkeypatch, tmp_path):
    """Draws of a small model on one machine, stored in a file of their own."""
    recipe = "llama-1b model.depth=2 model.embed=128 model.heads=2 model.kv_heads=2"
    monkeypatch.setattr(drawn_programs, "RECIPES", (recipe,))
    monkeypatch.setattr(drawn_programs, "LENGTHS", (256,))
    monkeypatch.setattr(drawn_programs, "TOPOLOGIES", ("v5e:2x4",))
    monkeypatch.setattr(drawn_programs, "FILE", tmp_path / "drawn.json")
    return drawn_programs.Draws()


def compiler(cases, refuses=0):
    """A stand-in for the compiler, which refuses the first few programs."""

    def compile_case(case):
        cases.append(case)
        if len(cases) <= refuses:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17.2G of 15.75G")
        return Compiled(case, "0.12.0", "2026-11-28", 10**9, 0.5, 0.1, len(cases) - 1)

    return compile_case


@tpu
def test_programs_are_drawn_until_one_compiles(draws, monkeypatch):
    cases = []
    monkeypatch.setattr(drawn_programs, "compile_case", compiler(cases, refuses=1))
    first = draws.draw(1, 0)
    assert first.compiled.case == cases[1] and first.compiled.violations == 1
    assert first.refused == (f"{cases[0]}: RESOURCE_EXHAUSTED: 17.2G of 15.75G",)
    for case in cases:
        assert parse(case.layout).num_devices == 8
    again = draws.draw(1, 0)  # All of its programs compile.
    assert again.compiled.case == cases[0] and not again.refused
    drawn_programs.write(first)
    drawn_programs.write(draws.draw(2, 7))
    drawn_programs.write(again)
    assert drawn_programs.read(1) == [again] and len(drawn_programs.read()) == 2
    drawn_programs.write(first)
    *refused, memory, time, broken = drawn_programs.summary(drawn_programs.read(1))
    assert refused == [f"0, did not compile: {first.refused[0]}"]
    error = first.predicted_bytes / 1e9 - 1
    assert (
        memory == f"memory: mean error {abs(error):.1%}, {error:+.1%} to {error:+.1%}"
    )
    error = first.predicted_seconds / 0.6 - 1
    assert time == f"time: mean error {abs(error):.1%}, {error:+.1%} to {error:+.1%}"
    assert broken == "1 of 1 programs break their contract"


def test_the_table_is_what_is_stored():
    page = (ROOT / "docs/measured_plans.md").read_text()
    _, section = page.split("## Drawn at random")
    section = section.split("\n## ")[0]
    table = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    assert table == list(map(drawn_programs.markdown, drawn_programs.read()))
