r"""Trains logistic regression on sparse rows of hashed text, by several workers.

    python -m experiments.sparse --data=stdlib --algorithm=hogwild --workers=4

Hogwild trains by 1, 2, 4, ... processes without locks, on the rows of the text and on
dense rows that it draws, and prints how far each objective is from that of one process.
"""

import dataclasses
import json
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from experiments.convex import lock_free
from experiments.data import hashed_text
from experiments.recipes import allowed
from experiments.recipes.ranges import Choice, Number
from experiments.reports import convex, terminal
from meshpar.islands import hogwild

HOGWILD = "hogwild"

ALGORITHM = flags.DEFINE_string("algorithm", HOGWILD, "hogwild.")
WORKERS = flags.DEFINE_integer("workers", 4, "Number of workers.")
PASSES = flags.DEFINE_integer("passes", 5, "Passes over all rows.")
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.05, "Step of hogwild in its first pass; 0.9 of it in the next."
)
L2 = flags.DEFINE_float("l2", 1.0, "Weight of half the squared norm, for hogwild.")
ROWS = flags.DEFINE_integer("rows", 0, "Rows that are drawn; 0 for all.")
HASH_BITS = flags.DEFINE_integer("hash_bits", 18, "Of 2**hash_bits features.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
flags.declare_key_flag("data")
flags.declare_key_flag("seed")
command_line.limit(ALGORITHM, Choice((HOGWILD,)))
command_line.limit(WORKERS, Number(1, 256, "workers"))
command_line.limit(PASSES, Number(1, 10**6, "passes"))
command_line.limit(LEARNING_RATE, Number(0, 1e6, whole=False, above=True))
command_line.limit(L2, Number(0, 1e12, whole=False))
command_line.limit(ROWS, Number(0, 2**31 - 1, "rows", "0 for all"))
command_line.limit(HASH_BITS, Number(1, 28, "bits"))


def main(_: Sequence[str]) -> int:
    """Trains, and returns the exit code."""
    command_line.refuse_unread(command_line.DATA, command_line.SEED)
    seed = command_line.SEED.value or 0
    allowed.check("seed", seed)
    data = command_line.DATA.value or hashed_text.STANDARD_LIBRARY
    settings = hogwild.Settings(
        processes=WORKERS.value,
        passes=PASSES.value,
        learning_rate=LEARNING_RATE.value,
        l2=L2.value,
        seed=seed,
    )
    text = hashed_text.load(data, HASH_BITS.value, ROWS.value, seed)
    console = terminal.plain_console()

    def say(row: lock_free.Row) -> None:
        if not JSON.value:
            console.print(
                f"{row.data} rows, {row.processes} process(es): {row.objective:,.2f}"
            )

    found = lock_free.compare(text.rows, text.labels, settings, say)
    if JSON.value:
        print(json.dumps([dataclasses.asdict(row) for row in found]))
    else:
        console.print(text.name)
        console.print(convex.hogwild_table(found))
    return 0


if __name__ == "__main__":
    command_line.run(main)
