r"""Compares predictions with compilers' figures on programs drawn at random.

    python -m experiments.benchmarks.drawn_programs --draws=1 --count=40
    python -m experiments.benchmarks.drawn_programs --draws=1 --count=0 --markdown

Draws programs from all that fit: a model, the length of its sequences, a machine, a
batch, sizes of axes and a layout with these sizes, each uniformly. Compiles each (one
to five minutes of a core), holds it to its contract, and stores the compiler's figures
beside those predicted before, in `drawn_programs.json`; what is there already is not
drawn again. Then prints a line for each program of the seed, the errors of memory and
time, and the number of violations. Numbers of draws are independent of each other, so
that --first and --count split the work.

Nothing is fitted to a seed before all of its programs are stored: what is stored says
how well the planner predicts programs that it has not seen.
"""

import dataclasses
import functools
import json
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

import meshpar
from experiments.benchmarks.compiled_programs import Compiled, compile_case
from experiments.benchmarks.predictor import Predictor, Row
from experiments.benchmarks.program_cases import PADDED, Case
from meshpar import mesh
from meshpar.commands import command_line
from meshpar.errors import LayoutError, MeshparError, shown
from meshpar.layouts.layout import Layout
from meshpar.layouts.wanted import Wanted
from meshpar.planner.space import layouts
from meshpar.settings import Number

FILE = pathlib.Path(__file__).with_suffix(".json")

FIRST = flags.DEFINE_integer("first", 0, "Number of the first draw.")
COUNT = flags.DEFINE_integer("count", 40, "Number of draws; 0 prints what is stored.")
MARKDOWN = flags.DEFINE_bool("markdown", False, "Print a table for the documentation.")
SEED = flags.DEFINE_integer("draws", 1, "Seed of the draws.")
command_line.limit(COUNT, Number(0, 1000, "programs", "0 to print what is stored"))

RECIPES = (
    PADDED,
    "llama-1b",
    "llama3.2-3b",
    "llama2-7b",
    "qwen3-30b-a3b model.depth=8",
    "mixtral-8x7b model.depth=4",
)
LENGTHS = 2048, 8192
TOPOLOGIES = "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v5e:4x4", "v6e:4x4"
BATCHES = 16, 32, 64
"""From which models, lengths, machines and sequences of a batch are drawn."""

_TRIES = 20
"""Layouts of one model and machine that are tried for one that fits."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A program that was drawn, what was predicted, and what its compiler says.

    Attributes:
      seed: of the draws.
      number: of the draw.
      predicted_bytes: memory of one device at the peak.
      predicted_seconds: of a step, without kernels and latency, as in `predictions`.
      compiled: the compiler's figures.
      refused: what was drawn before and did not compile, with the reasons.
    """

    seed: int
    number: int
    predicted_bytes: float
    predicted_seconds: float
    compiled: Compiled
    refused: tuple[str, ...] = ()

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "Drawn":
        """A program from its JSON."""
        compiled = entry["compiled"]
        case = Case(**compiled["case"])
        return cls(**{**entry, "compiled": Compiled(**{**compiled, "case": case})})

    @property
    def memory_error(self) -> float:
        """Predicted memory over that of the compiled program, less one."""
        return self.predicted_bytes / self.compiled.peak_bytes - 1

    @property
    def time_error(self) -> float:
        """Predicted time over that of the compiler's schedule, less one."""
        return self.predicted_seconds / self.compiled.seconds - 1


def read() -> list[Drawn]:
    """The programs that are stored, by seed and number."""
    return (
        [Drawn.read(x) for x in json.loads(FILE.read_text())] if FILE.exists() else []
    )


def write(drawn: Drawn) -> None:
    """Stores a program beside the others."""
    stored = {(d.seed, d.number): d for d in read()} | {
        (drawn.seed, drawn.number): drawn
    }
    lines = (json.dumps(dataclasses.asdict(stored[key])) for key in sorted(stored))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@functools.cache
def _by_sizes(case: Case) -> list[list[Layout]]:
    """All layouts of a model on a machine, those of the same sizes of axes together."""
    facts = _PREDICTOR.candidates(case).facts
    count = len(mesh.topology(case.topology))
    found: dict[tuple, list[Layout]] = {}
    rows, length = case.batch_size, facts.length
    space = layouts(
        count, facts.model, rows, length, Wanted.of("", ""), lambda: facts.used
    )
    for layout in space:
        found.setdefault(tuple(layout.sizes.values()), []).append(layout)
    return list(found.values())


_PREDICTOR = Predictor()


def draw(seed: int, number: int) -> Drawn:
    """Draws a program that fits its machine, and compiles it.

    Args:
      seed: of the draws.
      number: of this one.
    """
    rng, refused = random.Random(f"{seed}/{number}"), []
    while True:
        recipe = f"{rng.choice(RECIPES)} model.length={rng.choice(LENGTHS)}"
        case = Case(recipe, rng.choice(TOPOLOGIES), rng.choice(BATCHES), "")
        made, space = _PREDICTOR.candidates(case), _by_sizes(case)
        for _ in range(_TRIES):
            layout = rng.choice(rng.choice(space))
            try:
                candidate = made.candidate(layout)
            except LayoutError:
                continue  # As the planner sets it aside.
            if candidate.memory.total > made.machine.memory_bytes:
                continue
            chosen = dataclasses.replace(case, layout=str(layout))
            try:
                compiled = compile_case(chosen)
            except (MeshparError, jax.errors.JaxRuntimeError) as error:
                # Of the lowering, or of a compiler that finds too little memory.
                refused.append(f"{chosen}: {shown(str(error), 200)}")
                continue
            row = Row(compiled, candidate, "")
            memory = candidate.memory.total
            return Drawn(seed, number, memory, row.seconds, compiled, tuple(refused))


def _line(drawn: Drawn) -> str:
    found = drawn.compiled
    return (
        f"{drawn.number}: {found.case}, jax {found.jax_line}: memory "
        f"{found.peak_bytes / 1e9:.2f} GB ({drawn.memory_error:+.1%}); step "
        f"{1e3 * found.seconds:.0f} ms ({drawn.time_error:+.1%}); "
        f"{found.violations} violations"
    )


def _markdown(drawn: Drawn) -> str:
    found = drawn.compiled
    return (
        f"| {found.case.recipe}, {found.case.topology}, {found.case.batch_size}, "
        f"`{found.case.layout}` | {found.peak_bytes / 1e9:.2f} | "
        f"{drawn.memory_error:+.1%} | {1e3 * found.seconds:.0f} | "
        f"{drawn.time_error:+.1%} |"
    )


def main(_: Sequence[str]) -> int:
    """Draws and compiles, and prints the errors; 1 if a program breaks its contract."""
    command_line.use_cpu()
    meshpar.simulate(1)
    stored = {d.number for d in read() if d.seed == SEED.value}
    for number in range(FIRST.value, FIRST.value + COUNT.value):
        if number not in stored:
            drawn = draw(SEED.value, number)
            write(drawn)
            print(_line(drawn), flush=True)
    rows = [d for d in read() if d.seed == SEED.value]
    if not rows:
        print(f"--draws={SEED.value}: nothing is stored; draw with --count=40")
        return 0
    for row in rows:
        print(_markdown(row) if MARKDOWN.value else _line(row))
    for name in ("memory", "time"):
        errors = [getattr(row, f"{name}_error") for row in rows]
        mean = float(np.mean(np.abs(errors)))
        print(
            f"{name}: mean error {mean:.1%}, {min(errors):+.1%} to {max(errors):+.1%}, "
            f"{len(rows)} programs"
        )
    broken = sum(row.compiled.violations > 0 for row in rows)
    print(f"{broken} of {len(rows)} programs break their contract")
    return 1 if broken else 0


if __name__ == "__main__":
    command_line.run(main)
