r"""Trains logistic regression on sparse rows of hashed text, by several workers.

    python -m experiments.sparse --algorithm=dbpg --kkt_filter --servers=2 --workers=4
    python -m experiments.sparse --algorithm=hogwild --workers=4

DBPG has an L1 penalty, and filters what it sends; Hogwild's processes take no locks.
"""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from absl import flags

from experiments.convex import lock_free, reference
from experiments.data import hashed_text
from experiments.reports import convex
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.methods.dbpg import worker as dbpg
from meshpar.methods.dbpg.filters import COMPRESSIONS
from meshpar.methods.dbpg.training import Training
from meshpar.methods.hogwild import training as hogwild
from meshpar.runs.config import check_setting
from meshpar.settings import Choice, Number

DBPG, HOGWILD = "dbpg", "hogwild"
HELD_OUT = 0.2
"""Share of the rows that DBPG does not train on."""

ALGORITHM = flags.DEFINE_string("algorithm", DBPG, "dbpg or hogwild.")
WORKERS = flags.DEFINE_integer("workers", 4, "Number of workers.")
PASSES = flags.DEFINE_integer("passes", None, "Over all rows; 20 for dbpg, else 5.")
ROWS = flags.DEFINE_integer("rows", 0, "Rows that are drawn; 0 for all.")
HASH_BITS = flags.DEFINE_integer("hash_bits", 18, "Of 2**hash_bits features.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
SERVERS = flags.DEFINE_integer("servers", 2, "dbpg: servers of the store.")
L1 = flags.DEFINE_float("l1", 1.0, "dbpg: weight of the sum of absolute weights.")
BLOCKS = flags.DEFINE_integer("blocks", 64, "dbpg: blocks of features.")
DELAY = flags.DEFINE_integer("delay", 2, "dbpg: late tasks while another one runs.")
KKT_FILTER = flags.DEFINE_bool("kkt_filter", False, "dbpg: leave out far zeros.")
KKT_RATIO = flags.DEFINE_float(
    "kkt_ratio", 0.05, "dbpg: threshold of the KKT filter over the largest violation."
)
SIGNIFICANT = flags.DEFINE_float(
    "significant", 0.0, "dbpg: smallest change that is sent back; -1 to send all."
)
RANDOM_SKIP = flags.DEFINE_float(
    "random_skip", 0.0, "dbpg: probability that a key is skipped in a task."
)
KEY_CACHING = flags.DEFINE_bool("key_caching", True, "dbpg: send hashes of keys.")
COMPRESSION = flags.DEFINE_string(
    "compression", "zlib", "dbpg: of numbers, zlib, bf16 or none."
)
REFERENCE = flags.DEFINE_bool(
    "reference", False, "dbpg: also solve with liblinear, or SciPy without it."
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.05, "hogwild: step of the first pass; later ones decay."
)
L2 = flags.DEFINE_float("l2", 1.0, "hogwild: weight of half the squared norm.")
flags.declare_key_flag("data")
flags.declare_key_flag("seed")
command_line.limit(ALGORITHM, Choice((DBPG, HOGWILD)))
command_line.limit(WORKERS, Number(1, 256, "workers"))
command_line.limit(PASSES, Number(1, 10**6, "passes"))
command_line.limit(ROWS, Number(0, 2**31 - 1, "rows", "0 for all"))
command_line.limit(HASH_BITS, Number(1, 28, "bits"))
command_line.limit(SERVERS, Number(1, 256, "servers"))
command_line.limit(L1, Number(0, 1e12, whole=False, above=True))
command_line.limit(BLOCKS, Number(1, 2**16, "blocks"))
command_line.limit(DELAY, Number(0, 2**16, "tasks"))
command_line.limit(KKT_RATIO, Number(0, 1e6, whole=False))
command_line.limit(SIGNIFICANT, Number(-1, 1e6, note="-1 for off", whole=False))
command_line.limit(RANDOM_SKIP, Number(0, 1, whole=False, below=True))
command_line.limit(COMPRESSION, Choice((*COMPRESSIONS, "none")))
command_line.limit(LEARNING_RATE, Number(0, 1e6, whole=False, above=True))
command_line.limit(L2, Number(0, 1e12, whole=False))

_OF_DBPG = (
    *(SERVERS, L1, BLOCKS, DELAY, KKT_FILTER, KKT_RATIO, SIGNIFICANT, RANDOM_SKIP),
    *(KEY_CACHING, COMPRESSION, REFERENCE),
)
_OF_OTHERS = {DBPG: (LEARNING_RATE, L2), HOGWILD: _OF_DBPG}
"""{algorithm: flags that it does not read}."""


def _settings(seed: int) -> dbpg.Settings:
    compression = COMPRESSION.value
    return dbpg.Settings(
        l1=L1.value,
        passes=PASSES.value or 20,
        blocks=BLOCKS.value,
        delay=DELAY.value,
        kkt_filter=KKT_FILTER.value,
        kkt_ratio=KKT_RATIO.value,
        skip=RANDOM_SKIP.value,
        significant=SIGNIFICANT.value if SIGNIFICANT.value >= 0 else None,
        key_caching=KEY_CACHING.value,
        compression="" if compression == "none" else compression,
        seed=seed,
    )


def _train_dbpg(text: hashed_text.HashedText, settings: dbpg.Settings) -> None:
    train, held_out = hashed_text.split(text, HELD_OUT, settings.seed)
    rows, labels = train.rows, train.labels
    training = Training(rows, labels, settings, WORKERS.value, SERVERS.value)
    console = terminal.plain_console()

    def say(done) -> None:
        if not JSON.value:
            console.print(convex.pass_line(done), soft_wrap=True)

    result = training.run(say)
    right = (held_out.rows @ result.weights > 0) == (held_out.labels > 0)
    found = {
        "objective": result.passes[-1].objective,
        "held_out_accuracy": float(np.mean(right)) if len(right) else None,
    }
    if REFERENCE.value:
        solver = reference.best_solver()
        value = reference.minimum(solver, rows, labels, settings.l1, 1e-4)
        found |= {"solver": solver, "reference": value}
    if JSON.value:
        print(json.dumps(found | dataclasses.asdict(result) | {"weights": None}))
    else:
        convex.print_dbpg(text.name, rows, result, found)


def _train_hogwild(text: hashed_text.HashedText, settings: hogwild.Settings) -> None:
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


def main(_: Sequence[str]) -> int:
    """Trains, and returns the exit code."""
    command_line.refuse_flags_of_others(ALGORITHM, _OF_OTHERS)
    if ALGORITHM.value == DBPG and BLOCKS.value > 2**HASH_BITS.value:
        raise ConfigError(
            f"--blocks={BLOCKS.value} for {2**HASH_BITS.value} features: use at most "
            "one block per feature, or more --hash_bits"
        )
    seed = command_line.SEED.value or 0
    check_setting("seed", seed)
    if ALGORITHM.value == DBPG:
        settings, train = _settings(seed), _train_dbpg
    else:
        train = _train_hogwild
        settings = hogwild.Settings(
            processes=WORKERS.value,
            passes=PASSES.value or 5,
            learning_rate=LEARNING_RATE.value,
            l2=L2.value,
            seed=seed,
        )
    data = command_line.DATA.value or hashed_text.STANDARD_LIBRARY
    train(hashed_text.load(data, HASH_BITS.value, ROWS.value, seed), settings)
    return 0


if __name__ == "__main__":
    command_line.run(main, (command_line.DATA, command_line.SEED))
