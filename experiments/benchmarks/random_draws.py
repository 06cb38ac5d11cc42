r"""Measures the cost of random numbers that belong to rows.

    python -m experiments.benchmarks.random_draws

A step of layers with dropout draws from a plain key of jax, and from a key that knows
the place of its rows in the batch, as parts of a batch have it. Both take turns in one
process; the ratio is of medians. Aim: at most 1.02.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.timed_steps import Timed, define_layer_flags
from meshpar.collectives import shard_keys
from meshpar.commands import command_line

FLAGS = define_layer_flags(depth=6, rows=1024, rounds=60)


def loss(params: Any, x_BD: jax.Array, key: jax.Array) -> jax.Array:
    """The mean square of the output of layers with dropout."""
    for i, (up_DF, down_FD) in enumerate(params):
        y_BD = jax.nn.gelu(x_BD @ up_DF) @ down_FD
        kept_BD = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, y_BD.shape)
        x_BD += jnp.where(kept_BD, y_BD / 0.9, 0.0)
    return jnp.square(x_BD).mean()


@jax.jit
def plain_step(state: Any, x_BD: jax.Array) -> tuple[Any, jax.Array]:
    """A step that draws from a plain key."""
    return _step(state, x_BD, state[1])


@jax.jit
def step_by_row(state: Any, x_BD: jax.Array) -> tuple[Any, jax.Array]:
    """A step that draws from a key of rows."""
    first = jnp.zeros((), jnp.uint32)
    return _step(state, x_BD, shard_keys.for_shard(state[1], first, len(x_BD)))


def _step(state: Any, x_BD: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
    params, next_key = state[0], jax.random.fold_in(state[1], 1)
    value, grads = jax.value_and_grad(loss)(params, x_BD, key)
    params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
    return (params, next_key), value


def main(_: Sequence[str]) -> int:
    """Prints both medians and their ratio."""
    width, keys = (
        FLAGS.width.value,
        jax.random.split(jax.random.key(0), 2 * FLAGS.depth.value + 1),
    )
    params = [
        (
            jax.random.normal(up, (width, 4 * width)) / width**0.5,
            jax.random.normal(down, (4 * width, width)) / width**0.5 / 2,
        )
        for up, down in zip(keys[1::2], keys[2::2], strict=True)
    ]
    x_BD = jax.random.normal(keys[0], (FLAGS.rows.value, width))
    kinds = {"plain keys": plain_step, "keys of rows": step_by_row}
    timed = {
        name: Timed(step, (params, jax.random.key(1)), x_BD)
        for name, step in kinds.items()
    }
    for round_ in range(FLAGS.rounds.value):
        order = list(timed.values())[:: 1 if round_ % 2 else -1]
        losses = [one.run() for one in order]
        if losses[0] != losses[1]:
            raise AssertionError(f"the keys draw other numbers: {losses}")
    seconds = {name: one.medians()[1] for name, one in timed.items()}
    for name, median in seconds.items():
        print(f"{name}: {1000 * median:.2f} ms")
    print(f"ratio: {seconds['keys of rows'] / seconds['plain keys']:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
