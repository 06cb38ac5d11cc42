r"""Time of `program.step` against hand-written programs of the same computation.

    python -m experiments.benchmarks.step_overhead --recipe=tiny --layout=fsdp=8

By hand is one plain jit, or under the explicit lowering one plain shard_map (for
`fsdp=N,zero=3`). Both run turn by turn in one process on the same devices; the last
line gives the ratio of the medians. Aim: 1.00, at most 1.03.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from experiments import building, command_line
from experiments.config import Config, ConfigError

flags.adopt_module_key_flags(command_line)
ROUNDS = flags.DEFINE_integer("rounds", 30, "Timed steps of each.")


def by_hand(
    config: Config, program: meshpar.TrainProgram
) -> tuple[Callable[..., Any], Any]:
    """The step and its state as one would write them without meshpar.

    The same loss and optimizer, parameters in the same shardings, one plain jit.
    """
    model, mesh = program.model, program.mesh
    explicit = program.lowering.name == "shard_map"
    value_and_grad = (_by_shard_map if explicit else _by_jit)(program)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm or float("inf")),
        building.make_optimizer(config.optimizer, config.steps, model),
    )
    specs = {
        path: leaf.partition_spec for path, leaf in program.plan.parameters.items()
    }
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}

    def step(state: Any, batch: Any) -> Any:
        params, optimizer_state = state

        loss, grads = value_and_grad(params, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        norm = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), optimizer_state), (loss, norm)

    params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    scalar = NamedSharding(mesh, PartitionSpec())
    optimizer_state = jax.tree.map(
        lambda x: x if x.ndim else jax.device_put(x, scalar), optimizer.init(params)
    )
    return jax.jit(step, donate_argnums=0), (params, optimizer_state)


def _by_jit(program: meshpar.TrainProgram) -> Callable[..., Any]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        with meshpar.layouts.use(program.layout, program.mesh):
            return program.model.loss(params, batch, jax.random.key(0))[0]

    return jax.value_and_grad(loss_fn)


def _by_shard_map(program: meshpar.TrainProgram) -> Callable[..., Any]:
    """ZeRO-3 as a page of code: gather in the layer, the transpose does the rest."""
    staged, specs = program.model.staged, program.plan.specs
    used = {axis for axis, size in program.mesh.shape.items() if size > 1}
    whole = [path for path, spec in specs.items() if "fsdp" not in spec]
    if used != {"fsdp"} or whole or program.layout.zero < 3:
        raise ConfigError(
            f"layout {program.layout}: the shard_map by hand is for fsdp=N,zero=3; add "
            "--lowering=jit for others"
        )

    def gather(params: Any, skip: int) -> Any:
        return {
            path: jax.lax.all_gather(
                x, "fsdp", axis=specs[path].index("fsdp") - skip, tiled=True
            )
            for path, x in params.items()
        }

    def scan(layer: Callable, stack: Any, x: Any, key: Any) -> Any:
        def body(x: Any, params: Any) -> Any:
            return layer(gather(params, 1), x, key), None

        full = program.layout.remat == "full"
        return jax.lax.scan(jax.checkpoint(body) if full else body, x, stack)[0]

    def local(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            shared, stack = staged.split(params)
            loss = staged.loss({**gather(shared, 0), **stack}, batch, None, scan)[0]
            return loss / program.layout.fsdp

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.lax.psum(loss, "fsdp"), grads

    batch_spec = PartitionSpec("fsdp")
    return jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(specs, batch_spec),
        out_specs=(PartitionSpec(), specs),
    )


def main(_: Sequence[str]) -> int:
    """Prints both medians and their ratio."""
    config = command_line.config_from_flags()
    layout, devices = command_line.start_devices(config)
    vocab = config.model.vocab or 256
    model = dataclasses.replace(config.model, vocab=vocab, dropout=0.0)
    config = dataclasses.replace(config, model=model)
    program = building.make_program(config, layout, devices)
    ids = np.random.default_rng(0).integers(
        0, vocab, (config.batch_size, model.length + 1), np.int32
    )
    batch = program.place_batch({"tokens": ids[:, :-1], "targets": ids[:, 1:]})
    state = program.init(0)
    step, own_state = by_hand(config, program)
    seconds: dict[str, list[float]] = {"program.step": [], "by hand": []}
    for round_ in range(ROUNDS.value + 3):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        middle = time.perf_counter()
        own_state, own_metrics = step(own_state, batch)
        jax.block_until_ready((own_state, own_metrics))
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
    command_line.run(main)
