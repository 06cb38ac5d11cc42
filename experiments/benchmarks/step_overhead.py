r"""Compares the time of `program.step` with a hand-written step of the same model.

    python -m experiments.benchmarks.step_overhead --recipe=tiny --layout=fsdp=8

The hand-written step is one plain jit, or for lowering=shard_map one plain shard_map
(for `fsdp=N,zero=3`). Both run alternately in one process on the same devices; the last
line gives the ratio of the medians. Aim: 1.00, at most 1.03.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from experiments import recipes
from experiments.benchmarks import by_hand
from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.settings import Number

ROUNDS = flags.DEFINE_integer("rounds", 30, "Timed steps of each program.")
command_line.limit(ROUNDS, Number(1, 10**6, "steps"))


def main(_: Sequence[str]) -> int:
    """Prints both medians and their ratio."""
    config = recipes.of_decoder(command_line.config_from_flags())
    layout, devices = start_devices(config)
    vocab = config.model.vocab or 256
    model = dataclasses.replace(config.model, vocab=vocab, dropout=0.0)
    config = dataclasses.replace(config, model=model)
    program = config.make_program(layout, devices)
    ids = np.random.default_rng(0).integers(
        0, vocab, (config.batch_size, model.length + 1), np.int32
    )
    step, init = by_hand.step_and_init(config, program)
    batch = program.place_batch({"tokens": ids[:, :-1], "targets": ids[:, 1:]})
    state = program.init(0)
    hand_state = init()
    seconds: dict[str, list[float]] = {"program.step": [], "by hand": []}
    for round_ in range(ROUNDS.value + 3):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        middle = time.perf_counter()
        hand_state, hand_metrics = step(hand_state, batch)
        jax.block_until_ready((hand_state, hand_metrics))
        end = time.perf_counter()
        if round_ >= 3:
            seconds["program.step"].append(middle - start)
            seconds["by hand"].append(end - middle)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.2f} ms")
    print(f"ratio: {medians['program.step'] / medians['by hand']:.3f}")
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
