r"""Times the comparison of all copies of a state (--check_replicas) against a step.

    python -m experiments.benchmarks.replica_check --recipe=bytes-llama --layout=data=8

Steps and comparisons take turns in one process, and each waits for the other. The last
line gives what a comparison every 100 steps adds to them. Aim: below 0.5%.
"""

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from experiments import recipes
from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.runs.config import with_settings
from meshpar.runs.replica_check import ReplicaCheck
from meshpar.settings import Number

ROUNDS = flags.DEFINE_integer("rounds", 30, "Timed steps and comparisons.")
command_line.limit(ROUNDS, Number(1, 10**6, "steps"))

EVERY = 100
"""Steps between comparisons."""
WARM = 3
"""First rounds that do not count."""


def main(_: Sequence[str]) -> int:
    """Prints both medians and their ratio."""
    config = recipes.of_decoder(command_line.config_from_flags())
    layout, devices = start_devices(config)
    vocab = config.model.vocab or 256
    config = with_settings(config, [f"model.vocab={vocab}"])
    program = config.make_program(layout, devices)
    shape = config.batch_size, config.model.length + 1
    ids = np.random.default_rng(0).integers(0, vocab, shape, np.int32)
    batch = program.place_batch({"tokens": ids[:, :-1], "targets": ids[:, 1:]})
    check, state = ReplicaCheck(program), program.init(0)
    print(check)
    seconds: dict[str, list[float]] = {"step": [], "comparison": []}
    for _ in range(ROUNDS.value + WARM):
        begin = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        middle = time.perf_counter()
        assert check.differences(state) == []
        seconds["step"].append(middle - begin)
        seconds["comparison"].append(time.perf_counter() - middle)
    medians = {name: statistics.median(x[WARM:]) for name, x in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.2f} ms")
    added = medians["comparison"] / medians["step"] / EVERY
    print(f"a comparison every {EVERY} steps adds {added:.3%}")
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        (
            *command_line.of_config_but(
                command_line.OPTIMIZER_MODE,
                command_line.DATA,
                command_line.TOKENIZER,
                command_line.SEED,
            ),
            *command_line.OF_DEVICES,
        ),
        known=recipes.CATALOG,
    )
