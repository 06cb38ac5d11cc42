r"""Trains logistic regression on whole batches, with stragglers among the workers.

    python -m experiments.batch --algorithm=lbfgs --workers=4 --backup
    python -m experiments.batch --algorithm=gradient_descent --workers=6 --tolerate=2

L-BFGS runs as in Sandblaster: a coordinator without vectors, servers with ranges of
them, and workers that take small portions of the batch. It is compared with SciPy's
L-BFGS-B, iteration by iteration. Gradient descent waits for all workers, ignores the
last ones, or uses a gradient code. Time is simulated.
"""

import dataclasses
import json
from collections.abc import Sequence

from absl import flags

from experiments.convex import batch
from experiments.data import hashed_text
from experiments.reports import convex
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs.config import check_setting
from meshpar.settings import Choice, Number

LBFGS, GRADIENT_DESCENT = "lbfgs", "gradient_descent"

ALGORITHM = flags.DEFINE_string("algorithm", LBFGS, "lbfgs or gradient_descent.")
WORKERS = flags.DEFINE_integer("workers", 4, "Number of workers.")
ITERATIONS = flags.DEFINE_integer("iterations", 50, "Most iterations.")
L2 = flags.DEFINE_float("l2", 1.0, "Weight of half the squared norm of the weights.")
ROWS = flags.DEFINE_integer("rows", 20_000, "Rows that are drawn; 0 for all.")
HASH_BITS = flags.DEFINE_integer("hash_bits", 14, "Of 2**hash_bits features.")
SLOWDOWN = flags.DEFINE_float("slowdown", 10.0, "How much slower a straggler is.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
SERVERS = flags.DEFINE_integer("servers", 2, "lbfgs: servers of the vectors.")
MEMORY = flags.DEFINE_integer("memory", 10, "lbfgs: pairs of differences kept.")
PORTIONS = flags.DEFINE_integer("portions", 200, "lbfgs: portions per worker.")
BACKUP = flags.DEFINE_bool("backup", False, "lbfgs: copies of the last portions.")
TOLERATE = flags.DEFINE_integer(
    "tolerate", 1, "gradient_descent: stragglers per round, which codes tolerate."
)
flags.declare_key_flag("data")
flags.declare_key_flag("seed")
command_line.limit(ALGORITHM, Choice((LBFGS, GRADIENT_DESCENT)))
command_line.limit(WORKERS, Number(2, 256, "workers"))
command_line.limit(ITERATIONS, Number(1, 10**6, "iterations"))
command_line.limit(L2, Number(0, 1e12, whole=False))
command_line.limit(ROWS, Number(0, 2**31 - 1, "rows", "0 for all"))
command_line.limit(HASH_BITS, Number(1, 24, "bits"))
command_line.limit(SLOWDOWN, Number(1, 1e6, whole=False))
command_line.limit(SERVERS, Number(1, 256, "servers"))
command_line.limit(MEMORY, Number(1, 1000, "pairs"))
command_line.limit(PORTIONS, Number(1, 10**5, "portions"))
command_line.limit(TOLERATE, Number(0, 255, "workers"))

_OF_OTHERS = {
    LBFGS: (TOLERATE,),
    GRADIENT_DESCENT: (SERVERS, MEMORY, PORTIONS, BACKUP),
}
"""{algorithm: flags that it does not read}."""


def _run_lbfgs(name: str, problem: batch.Problem, seed: int) -> None:
    del seed  # Nothing is drawn.
    slow = [1.0] * (WORKERS.value - 1) + [1 / SLOWDOWN.value]
    workers = batch.Workers(slow, PORTIONS.value, BACKUP.value)
    trained = batch.Sandblaster(problem, workers, SERVERS.value, MEMORY.value)
    iterations = []
    console = terminal.plain_console()
    for done in trained.coordinator.run(ITERATIONS.value):
        iterations.append(done)
        if not JSON.value:
            console.print(
                f"iteration {done.number}: objective {done.value:,.6f}, "
                f"{done.evaluations} batches, {trained.seconds:,.1f} simulated s",
                soft_wrap=True,
            )
    values = batch.scipy_values(problem, MEMORY.value, ITERATIONS.value)
    pairs = zip((done.value for done in iterations), values, strict=False)
    difference = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    costs = dict(batch.straggler_costs(WORKERS.value, PORTIONS.value, SLOWDOWN.value))
    if JSON.value:
        found = {
            "iterations": [dataclasses.asdict(done) for done in iterations],
            "scipy": values,
            "largest_difference": difference,
            "simulated_seconds": trained.seconds,
            "straggler_costs": costs,
        }
        print(json.dumps(found))
        return
    console.print(name)
    console.print(
        f"SciPy's L-BFGS-B: {values[-1]:,.6f} after {len(values)} iterations; largest "
        f"difference in any iteration {difference:.1e}, relative",
        soft_wrap=True,
    )
    console.print(convex.costs_table(costs, SLOWDOWN.value))


def _run_descent(name: str, problem: batch.Problem, seed: int) -> None:
    n, s = WORKERS.value, TOLERATE.value
    methods = [batch.NAIVE, batch.IGNORE, batch.CYCLIC]
    if n % (s + 1) == 0:
        methods.append(batch.REPETITION)
    slowdown, rounds = SLOWDOWN.value, ITERATIONS.value
    found = [
        batch.descend(problem, method, n, s, slowdown, rounds, seed)
        for method in methods
    ]
    if JSON.value:
        rows = [dataclasses.asdict(row) | {"weights": None} for row in found]
        print(json.dumps(rows))
        return
    console = terminal.wide_console()
    console.print(name)
    console.print(convex.descents_table(found))


def main(_: Sequence[str]) -> int:
    """Trains, and returns the exit code."""
    command_line.refuse_flags_of_others(ALGORITHM, _OF_OTHERS)
    if ALGORITHM.value == GRADIENT_DESCENT and TOLERATE.value >= WORKERS.value:
        raise ConfigError(
            f"--tolerate={TOLERATE.value} of --workers={WORKERS.value}: use fewer "
            "stragglers than workers"
        )
    seed = command_line.SEED.value or 0
    check_setting("seed", seed)
    data = command_line.DATA.value or hashed_text.STANDARD_LIBRARY
    text = hashed_text.load(data, HASH_BITS.value, ROWS.value, seed)
    if len(text.labels) < WORKERS.value:
        raise ConfigError(
            f"--workers={WORKERS.value} for {len(text.labels)} rows: use at most one "
            "worker per row"
        )
    run = _run_lbfgs if ALGORITHM.value == LBFGS else _run_descent
    run(text.name, batch.Problem(text.rows, text.labels, L2.value), seed)
    return 0


if __name__ == "__main__":
    command_line.run(main, (command_line.DATA, command_line.SEED))
