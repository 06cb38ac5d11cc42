r"""Compares predictions with compilers' figures on programs drawn at random.

    python -m experiments.benchmarks.drawn_programs --draws=1 --count=40
    python -m experiments.benchmarks.drawn_programs --draws=1 --count=0 --markdown
    python -m experiments.benchmarks.drawn_programs --draws=1 --count=0 --predict

Draws a model, the length of its sequences, a machine and a batch, then sizes of axes
and a layout with these sizes, each with equal chances, until one is predicted to fit.
Compiles it (one to five minutes of a core), holds it to its contract, and stores the
compiler's figures beside the prediction in `drawn_programs.json`; what is there already
is not drawn again. A layout that does not compile is stored with the reason, and
another one is drawn.

Stored predictions are those of the draw; --predict replaces them by new ones, such as
after a fit (`planner_fit`).

Then prints a line for each program of the seed, the layouts that did not compile, the
errors of memory and time, and the number of programs that break their contract. Draws
do not depend on each other: --first and --count split the work.
"""

import dataclasses
import functools
import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

import meshpar
from experiments.benchmarks.compiled_programs import Compiled, compile_case
from experiments.benchmarks.predictor import MARKDOWN, Predictor, estimated_seconds
from experiments.benchmarks.program_cases import PADDED, Case
from meshpar.commands import command_line
from meshpar.errors import LayoutError, MeshparError, shown
from meshpar.layouts.layout import Layout
from meshpar.layouts.wanted import Wanted
from meshpar.planner.candidate import Candidate
from meshpar.planner.space import layouts
from meshpar.settings import Number

FILE = pathlib.Path(__file__).with_suffix(".json")

DRAWS = flags.DEFINE_integer("draws", 1, "Seed of the draws.")
FIRST = flags.DEFINE_integer("first", 0, "Number of the first draw.")
COUNT = flags.DEFINE_integer("count", 40, "Number of draws; 0 prints what is stored.")
PREDICT = flags.DEFINE_bool("predict", False, "Predict what is stored anew.")
flags.declare_key_flag(MARKDOWN.name)
command_line.limit(FIRST, Number(0, 10_000, "draws before it"))
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
"""What models, lengths, machines and sequences of a batch are drawn from."""

_TRIES = 20
"""Layouts that are tried on one model and machine before others are drawn."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A program that was drawn, with its prediction and its compiler's figures.

    Attributes:
      seed: of the draws.
      number: of the draw.
      predicted_bytes: memory of one device at the peak.
      predicted_seconds: of a step, as `predictor.estimated_seconds`.
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
    def of(cls, entry: dict[str, Any]) -> "Drawn":
        """The program that a JSON object states."""
        compiled = Compiled.of(entry["compiled"])
        return cls(
            **{**entry, "compiled": compiled, "refused": tuple(entry["refused"])}
        )

    @property
    def memory_error(self) -> float:
        """Predicted memory over that of the compiled program, less one."""
        return self.predicted_bytes / self.compiled.peak_bytes - 1

    @property
    def time_error(self) -> float:
        """Predicted time over that of the compiler's schedule, less one."""
        return self.predicted_seconds / self.compiled.seconds - 1


def read(seed: int | None = None) -> list[Drawn]:
    """The stored programs of a seed, or of all of them, in order."""
    entries = json.loads(FILE.read_text()) if FILE.exists() else []
    return [d for d in map(Drawn.of, entries) if seed in (None, d.seed)]


def write(drawn: Drawn) -> None:
    """Stores a program beside the others."""
    stored = {(d.seed, d.number): d for d in (*read(), drawn)}
    lines = (json.dumps(dataclasses.asdict(stored[key])) for key in sorted(stored))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


class Draws:
    """Draws programs; those of one model and machine share what is traced of it."""

    def __init__(self):
        self._predictor = Predictor()
        self._spaces = functools.cache(self._space)

    def draw(self, seed: int, number: int) -> Drawn:
        """Draws a program that is predicted to fit, and compiles it.

        Args:
          seed: of the draws.
          number: of this one.
        """
        refused, fitting = [], self._fitting(random.Random(f"{seed}/{number}"))
        while True:
            case, candidate = next(fitting)
            try:
                compiled = compile_case(case)
            except (MeshparError, jax.errors.JaxRuntimeError) as error:
                # Of the lowering, or of a compiler that finds too little memory.
                refused.append(f"{case}: {shown(str(error), 200)}")
                continue
            memory, seconds = candidate.memory.total, estimated_seconds(candidate)
            return Drawn(seed, number, memory, seconds, compiled, tuple(refused))

    def _fitting(self, rng: random.Random) -> Iterator[tuple[Case, Candidate]]:
        """Generates programs that are predicted to fit, without end."""
        while True:
            recipe = f"{rng.choice(RECIPES)} model.length={rng.choice(LENGTHS)}"
            case = Case(recipe, rng.choice(TOPOLOGIES), rng.choice(BATCHES), "")
            made, space = self._predictor.candidates(case), self._spaces(case)
            for _ in range(_TRIES):
                layout = rng.choice(rng.choice(space))
                try:
                    candidate = made.candidate(layout)
                except LayoutError:
                    continue  # The planner leaves it out as well.
                if candidate.memory.total <= made.machine.memory_bytes:
                    yield dataclasses.replace(case, layout=str(layout)), candidate

    def _space(self, case: Case) -> list[list[Layout]]:
        """All layouts of a model on a machine, in lists of equal sizes of axes."""
        made = self._predictor.candidates(case)
        facts, count = made.facts, len(made.machine.devices)
        sizes = count, facts.model, case.batch_size, facts.length
        found: dict[tuple, list[Layout]] = {}
        for layout in layouts(*sizes, Wanted.of("", ""), lambda: facts.used):
            found.setdefault(tuple(layout.sizes.values()), []).append(layout)
        return list(found.values())


def _line(drawn: Drawn) -> str:
    found = drawn.compiled
    return (
        f"{drawn.number}: {found.case}, jax {found.jax_line}: memory "
        f"{found.peak_bytes / 1e9:.2f} GB ({drawn.memory_error:+.1%}); step "
        f"{1e3 * found.seconds:.0f} ms ({drawn.time_error:+.1%}); "
        f"{found.violations} violations"
    )


def markdown(drawn: Drawn) -> str:
    """The row of a program in the table of the documentation."""
    found = drawn.compiled
    cells = (
        drawn.number,
        f"{found.case.recipe}, {found.case.topology}, {found.case.batch_size}, "
        f"`{found.case.layout}`",
        found.jax_line,
        f"{found.peak_bytes / 1e9:.2f}",
        f"{drawn.memory_error:+.1%}",
        f"{1e3 * found.seconds:.0f}",
        f"{drawn.time_error:+.1%}",
        found.violations,
    )
    return f"| {' | '.join(map(str, cells))} |"


def summary(rows: Sequence[Drawn]) -> list[str]:
    """Lines on all programs: what did not compile, errors, and broken contracts."""
    lines = [f"{d.number}, did not compile: {text}" for d in rows for text in d.refused]
    for name in ("memory", "time"):
        errors = [getattr(row, f"{name}_error") for row in rows]
        mean, low, high = np.mean(np.abs(errors)), min(errors), max(errors)
        lines.append(f"{name}: mean error {mean:.1%}, {low:+.1%} to {high:+.1%}")
    broken = sum(row.compiled.violations > 0 for row in rows)
    lines.append(f"{broken} of {len(rows)} programs break their contract")
    return lines


def _predict_anew(seed: int) -> None:
    """Replaces the stored predictions of a seed."""
    predictor = Predictor()
    for drawn in read(seed):
        row = predictor.row(drawn.compiled)
        memory, seconds = row.candidate.memory.total, row.seconds
        write(
            dataclasses.replace(
                drawn, predicted_bytes=memory, predicted_seconds=seconds
            )
        )


def main(_: Sequence[str]) -> int:
    """Draws and compiles, and prints the errors; 1 if a program breaks its contract."""
    command_line.use_cpu()
    meshpar.simulate(1)
    seed, draws = DRAWS.value, Draws()
    stored = {d.number for d in read(seed)}
    for number in range(FIRST.value, FIRST.value + COUNT.value):
        if number not in stored:
            drawn = draws.draw(seed, number)
            write(drawn)
            print(_line(drawn), flush=True)
    if PREDICT.value:
        _predict_anew(seed)
    rows = read(seed)
    if not rows:
        print(f"--draws={seed}: nothing is stored; draw with --count=40")
        return 0
    for row in rows:
        print(markdown(row) if MARKDOWN.value else _line(row))
    print("\n".join(summary(rows)))
    return 1 if any(row.compiled.violations for row in rows) else 0


if __name__ == "__main__":
    command_line.run(main)
