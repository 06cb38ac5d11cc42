r"""Compares steps of optimizers on one device with a plain loop of jax and optax.

    python -m experiments.benchmarks.optimizer_steps

The loop is what a user would write: the module, `jax.value_and_grad` and optax on the
module's own tensors. With `layers=` meshpar stacks the layers, runs them in one loop
and updates them on the stack, or by vmap over it. All take turns in one process; ratios
are of medians. Aim: at most 1.1, with `layers=` and without. The row of SGD, whose
update costs next to nothing, shows what the loop over layers takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import contrib

import meshpar
from experiments.benchmarks.timed_steps import Timed, define_layer_flags
from meshpar.commands import command_line

FLAGS = define_layer_flags(depth=12, rows=256, rounds=30)
OPTIMIZERS = {
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "muon": contrib.muon(1e-3),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3),
}


class Layer(nnx.Module):
    """A norm, and two matrices with a residual."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return x_BD + self.down(jax.nn.gelu(self.up(self.norm(x_BD))))


class Net(nnx.Module):
    """Layers in a list."""

    def __init__(self, rngs: nnx.Rngs):
        width = FLAGS.width.value
        self.layers = nnx.List([Layer(width, rngs) for _ in range(FLAGS.depth.value)])

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD


def loss(net: Net, batch: Any) -> jax.Array:
    """The mean of the squared errors."""
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def plain_step(
    optimizer: optax.GradientTransformation,
) -> tuple[Callable[[Any, Any], tuple[Any, jax.Array]], Any]:
    """A user's own step and its first state, (params, optimizer state)."""
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, inner = state
        value, grads = jax.value_and_grad(
            lambda params: loss(nnx.merge(graph, params), batch)
        )(params)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def seconds(optimizer: optax.GradientTransformation) -> list[float]:
    """Seconds of a step: of the plain loop, of meshpar, and of it with `layers=`."""
    rng, shape = np.random.default_rng(0), (FLAGS.rows.value, FLAGS.width.value)
    batch = {name: rng.normal(size=shape).astype(np.float32) for name in "xy"}
    device = jax.devices()[0]
    own, state = plain_step(optimizer)
    timed = [Timed(own, state, jax.device_put(batch, device))]
    start = jax.tree.map(np.asarray, state[0])
    for layers in ("", "layers"):
        model = meshpar.from_nnx(Net, loss, layers=layers)
        program = meshpar.lower(model, optimizer, "data=1", batch, devices=[device])

        def step(state: Any, batch: Any, program: Any = program) -> tuple[Any, Any]:
            state, metrics = program.step(state, batch)
            return state, metrics["loss"]

        own_batch = program.place_batch(batch)
        timed.append(Timed(step, program.init(params=start), own_batch))
    for round_ in range(FLAGS.rounds.value):
        losses = [one.run() for one in timed[:: 1 if round_ % 2 else -1]]
        if not round_:  # Later ones drift apart by rounding.
            np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    return [one.medians()[1] for one in timed]


def main(_: Sequence[str]) -> int:
    """Prints a row for each optimizer."""
    print("optimizer    plain loop     meshpar  ratio  with layers  ratio")
    for name, optimizer in OPTIMIZERS.items():
        plain, whole, stacked = (1000 * x for x in seconds(optimizer))
        print(
            f"{name:10} {plain:8.1f} ms {whole:8.1f} ms {whole / plain:6.2f} "
            f"{stacked:9.1f} ms {stacked / plain:6.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    command_line.run(main)
