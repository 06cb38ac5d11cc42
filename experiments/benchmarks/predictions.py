r"""Compares the planner's predictions with the compilers' figures.

    python -m experiments.benchmarks.predictions --only=llama-1b
    python -m experiments.benchmarks.predictions --only=v5p:2x2x1 --compile

Predicts every program of `compiled_programs.json` in one to two minutes; --compile
compiles those that match anew before (one to three minutes of a core each, by the
installed version of jax), and stores what the compiler says. Prints one line a program,
the mean and the worst error of the memory, how well the order of the times agrees
(Kendall's tau), how far the layout that the planner takes is from the best one of an
exhaustive set, and between what found values lie over predicted ones for each kind of
layouts (`meshpar.planner.uncertainty`). --markdown prints the rows of
docs/measured_plans.md that the installed line of jax compiled.
"""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from absl import flags
from scipy import stats

import meshpar
from experiments.benchmarks import compiled_programs
from experiments.benchmarks.compiled_programs import Compiled
from experiments.benchmarks.predictor import MARKDOWN, Predictor, Row
from experiments.benchmarks.program_cases import EXHAUSTIVE, Case, matching
from meshpar.commands import command_line
from meshpar.planner.uncertainty import kind_of

flags.declare_key_flag(MARKDOWN.name)
ONLY = flags.DEFINE_string("only", "", "Programs whose line matches this regex.")
COMPILE = flags.DEFINE_bool("compile", False, "Compile them anew, and store that.")


def predicted(cases: Iterable[Case]) -> list[Row]:
    """Predicts the programs that were compiled; one row each."""
    wanted, predictor = set(cases), Predictor()
    return [predictor.row(c) for c in compiled_programs.read() if c.case in wanted]


def kendall_tau(rows: Iterable[Row]) -> tuple[float, int]:
    """Kendall's tau of the times, and the number of programs that have one."""
    times = [(row.seconds, row.compiled.seconds) for row in rows]
    times = [pair for pair in times if pair[1] is not None]
    return stats.kendalltau(*zip(*times, strict=True)).statistic, len(times)


def loss_of_choice(rows: Sequence[Row]) -> float:
    """Time of the layout that is predicted to be fastest over the least time, less one.

    Both times are the compiler's.
    """
    choice = min(rows, key=lambda row: row.seconds)
    return choice.compiled.seconds / min(r.compiled.seconds for r in rows) - 1


def _line(row: Row) -> str:
    compiled, estimated = row.compiled, row.compiled.seconds
    memory = row.candidate.memory.total / 1e9
    time = f"step {1e3 * row.seconds:.0f} ms"
    if estimated is not None:
        time += f", estimated {1e3 * estimated:.0f}"
        time += f" ({row.seconds / estimated - 1:+.0%})"
    return (
        f"{compiled.case}, jax {compiled.jax_line}: memory {memory:.2f} GB, compiled "
        f"{compiled.peak_bytes / 1e9:.2f} ({row.error:+.1%}); {time}; "
        f"{compiled.violations} violations"
    )


def begin_of_markdown(compiled: Compiled) -> str:
    """The compiler's word on a program, as rows of the table begin with it."""
    case = compiled.case
    return (
        f"| {case.recipe}, {case.topology}, {case.batch_size}, `{case.layout}` | "
        f"{compiled.peak_bytes / 1e9:.2f} | "
    )


def _markdown(row: Row) -> str:
    estimated = row.compiled.seconds
    found = "-" if estimated is None else f"{1e3 * estimated:.0f}"
    begin = begin_of_markdown(row.compiled)
    return f"{begin}{row.error:+.1%} | {found} | {1e3 * row.seconds:.0f} |"


def _print(rows: Sequence[Row]) -> None:
    installed = ".".join(jax.__version__.split(".")[:2])
    for row in rows:
        if not MARKDOWN.value:
            print(_line(row), flush=True)
        elif row.compiled.jax_line == installed:
            print(_markdown(row), flush=True)


def _print_ranges(rows: Sequence[Row]) -> None:
    """Prints found over predicted values by platform and kind of layouts."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = row.platform, kind_of(row.candidate.layout)
        kinds.setdefault(key, []).append(row)
    for kind, own in kinds.items():
        memory = [1 / (1 + row.error) for row in own]
        line = f"{', '.join(kind)}: {len(own)} programs, found over predicted: memory "
        line += f"{min(memory):.2f} to {max(memory):.2f}"
        times = [r.compiled.seconds / r.seconds for r in own if r.compiled.seconds]
        if times:
            line += f", time {min(times):.2f} to {max(times):.2f}"
        print(line)


def main(_: Sequence[str]) -> int:
    """Predicts the programs, and prints the errors."""
    command_line.use_cpu()
    meshpar.simulate(1)
    cases = matching(ONLY.value)
    if COMPILE.value:
        for case in cases:
            compiled_programs.write([compiled_programs.compile_case(case)])
    rows = predicted(cases)
    _print(rows)
    errors = [row.error for row in rows]
    mean = float(np.mean(np.abs(errors)))
    low, high = min(errors), max(errors)
    print(f"memory: mean error {mean:.1%}, {low:+.1%} to {high:+.1%}, {len(rows)} rows")
    if sum(row.compiled.seconds is not None for row in rows) > 1:
        tau, count = kendall_tau(rows)
        print(f"time: Kendall's tau {tau:.2f} over {count} programs")
    every = [row for row in rows if row.compiled.case in EXHAUSTIVE]
    if len(every) == len(EXHAUSTIVE):
        print(
            f"{every[0].compiled.case.recipe}, {every[0].compiled.case.topology}: the "
            f"predicted best of {len(every)} layouts takes {loss_of_choice(every):.1%} "
            "more than the best one"
        )
    _print_ranges(rows)
    return 0


if __name__ == "__main__":
    command_line.run(main)
