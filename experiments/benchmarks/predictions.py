r"""The planner's predictions against what compilers say of the same programs.

    python -m experiments.benchmarks.predictions --only=llama-1b
    python -m experiments.benchmarks.predictions --only=v5p:2x2x1 --compile

Predicts every program of `compiled_programs.json` in seconds; --compile compiles those
that match anew before (half a minute to three minutes of a core each, with the
installed version of jax). Prints one line a program, the mean and the worst error of
the memory, how well the order of the times agrees (Kendall's tau), how far the layout
that the planner would take is from the best one of an exhaustive set, and between what
found values lie over predicted ones for each kind of layouts
(`meshpar.planner.uncertainty`). --markdown prints the table of docs/planning.md.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from scipy import stats

import meshpar
from experiments import command_line
from experiments.benchmarks import compiled_programs
from experiments.benchmarks.compiled_programs import EXHAUSTIVE, Case, Compiled
from experiments.recipes import building
from meshpar import mesh
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.uncertainty import kind_of

ONLY = flags.DEFINE_string("only", "", "Programs whose line matches this regex.")
COMPILE = flags.DEFINE_bool("compile", False, "Compile them anew, and store that.")
MARKDOWN = flags.DEFINE_bool("markdown", False, "Print a table for the documentation.")


class Row(NamedTuple):
    """One program: what was predicted, and what its compiler said."""

    compiled: Compiled
    candidate: Candidate

    @property
    def error(self) -> float:
        """Predicted memory over that of the compiled program, less one."""
        return self.candidate.memory.total / self.compiled.peak_bytes - 1

    @property
    def seconds(self) -> float:
        """Predicted time without the kernels, which compilers' estimates leave out."""
        return self.candidate.seconds.total - self.candidate.seconds.kernels

    @property
    def kind(self) -> tuple[str, str]:
        """Platform, and kind of layouts, whose predictions err alike."""
        platform = mesh.topology(self.compiled.case.topology)[0].platform
        layout = self.candidate.layout
        return platform, kind_of(layout)


@functools.cache
def _facts(recipe: str, batch_size: int, device: jax.Device) -> Facts:
    """Facts about a recipe for devices of a kind."""
    config = Case(recipe, "", batch_size, "").config
    model = building.make_model(config)
    return Facts(
        model,
        building.make_optimizer(config.optimizer, config.steps, model),
        building.abstract_batch(config),
        building.compute_dtype(config),
        device,
    )


@functools.cache
def _device(topology: str) -> jax.Device:
    """The first device of the first topology asked for that has devices of its kind."""
    device = mesh.topology(topology)[0]
    return _FIRST.setdefault(device.device_kind, device)


_FIRST: dict[str, jax.Device] = {}


def predict(case: Case) -> Candidate:
    """What the planner says of a program."""
    facts = _facts(case.recipe, case.batch_size, _device(case.topology))
    made = Candidates(facts, machine_of(mesh.topology(case.topology)))
    return made.candidate(meshpar.layouts.parse(case.layout))


def predicted(compiled: Iterable[Compiled]) -> list[Row]:
    """Rows of programs that were compiled."""
    return [Row(program, predict(program.case)) for program in compiled]


def kendall_tau(rows: Iterable[Row]) -> tuple[float, int]:
    """Kendall's tau of the times, and the number of programs that have one."""
    times = [(row.seconds, row.compiled.seconds) for row in rows]
    times = [pair for pair in times if pair[1] is not None]
    return stats.kendalltau(*zip(*times, strict=True)).statistic, len(times)


def loss_of_choice(rows: Iterable[Row]) -> float:
    """Time of the exhaustive set's predicted best layout over its best one, less one.

    Times are the compiler's.
    """
    chosen = [
        row for row in rows if row.compiled.case in compiled_programs.exhaustive()
    ]
    choice = min(chosen, key=lambda row: row.candidate.seconds.total)
    return choice.compiled.seconds / min(r.compiled.seconds for r in chosen) - 1


def _line(row: Row) -> str:
    compiled, candidate = row.compiled, row.candidate
    estimated = compiled.seconds
    time = f"step {1e3 * row.seconds:.0f} ms"
    if estimated is not None:
        time += f", estimated {1e3 * estimated:.0f} ({row.seconds / estimated - 1:+.0%})"
    return (
        f"{compiled.case}, jax {compiled.jax_line}: memory "
        f"{candidate.memory.total / 1e9:.2f} GB, compiled "
        f"{compiled.peak_bytes / 1e9:.2f} ({row.error:+.1%}); {time}; "
        f"{compiled.violations} violations"
    )


def _markdown(row: Row) -> str:
    case, estimated = row.compiled.case, row.compiled.seconds
    found = "-" if estimated is None else f"{1e3 * estimated:.0f}"
    return (
        f"| {case.recipe}, {case.topology}, {case.batch_size}, `{case.layout}` | "
        f"{row.compiled.jax_line} | {row.compiled.peak_bytes / 1e9:.2f} | "
        f"{row.error:+.1%} | {found} | {1e3 * row.seconds:.0f} |"
    )


def _print_ranges(rows: Sequence[Row]) -> None:
    """Prints found over predicted values by kind of layouts."""
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        memory = [1 / (1 + row.error) for row in own]
        line = f"{', '.join(kind)}: found over predicted: memory "
        line += f"{min(memory):.2f} to {max(memory):.2f}"
        times = [r.compiled.seconds / r.seconds for r in own if r.compiled.seconds]
        if times:
            line += f", time {min(times):.2f} to {max(times):.2f}"
        print(f"{line}; {len(own)} programs")


def main(_: Sequence[str]) -> int:
    """Predicts the programs, and prints the errors."""
    meshpar.simulate(1)
    cases = list(compiled_programs.matching(ONLY.value))
    if COMPILE.value:
        for case in cases:
            compiled_programs.write([compiled_programs.compile_case(case)])
    rows = predicted(c for c in compiled_programs.read() if c.case in cases)
    for row in rows:
        print(_markdown(row) if MARKDOWN.value else _line(row), flush=True)
    errors = [row.error for row in rows]
    mean = float(np.mean(np.abs(errors)))
    print(
        f"memory: mean error {mean:.1%}, {min(errors):+.1%} to {max(errors):+.1%} over "
        f"{len(errors)} programs"
    )
    if sum(row.compiled.seconds is not None for row in rows) > 1:
        tau, count = kendall_tau(rows)
        print(f"time: Kendall's tau {tau:.2f} over {count} programs")
    if set(compiled_programs.exhaustive()) <= {row.compiled.case for row in rows}:
        loss = loss_of_choice(rows)
        print(f"{', '.join(map(str, EXHAUSTIVE[:3]))}: {len(EXHAUSTIVE[3])} layouts, ")
        print(f"the predicted best one takes {loss:+.1%} of the best one's time")
    _print_ranges(rows)
    return 0


if __name__ == "__main__":
    command_line.run(main)
