r"""Step time of every pipeline schedule against the tick model and the plain layout.

    python -m experiments.benchmarks.pipeline_schedules --recipe=bytes-llama

All programs train the same batch on the same devices, turn by turn in one process. The
plain layout is data=P; GPipe by plain autodiff differentiates the loop over ticks,
which keeps every microbatch. The tick model predicts 1/(1 - bubble) times the plain
layout: on devices that share cores masked lanes cost as much as busy ones, as waiting
does elsewhere; only ZB-H1 skips them, so there its bubble costs nothing.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import PartitionSpec

import meshpar
from experiments import building, command_line
from meshpar.collectives import microbatch

flags.adopt_module_key_flags(command_line)
STAGES = flags.DEFINE_integer("stages", 4, "P, stages and devices.")
MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "M.")
ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed steps of each.")


def gpipe_by_autodiff(program: meshpar.TrainProgram) -> Callable[..., Any]:
    """Gradients of the loop over ticks of a GPipe program, made by jax."""
    layered, num = program.model.layered, program.layout.microbatches
    stages, specs = program.layout.pipe, program.plan.specs

    def local(params: Any, batch: Any) -> Any:
        batches, stage = (
            microbatch.split_microbatches(batch, num),
            lax.axis_index("pipe"),
        )

        def part(m: jax.Array) -> Any:
            return jax.tree.map(lambda x: x[jnp.clip(m, 0, num - 1)], batches)

        def vary(x: jax.Array) -> jax.Array:
            varies = "pipe" in jax.typeof(x).manual_axis_type.varying
            return x if varies else lax.pcast(x, ("pipe",), to="varying")

        def loss_fn(params: Any) -> jax.Array:
            shared, stack = layered.split(params)

            def tick(x: Any, t: jax.Array) -> Any:
                embedded = layered.embed(shared, part(t), None)
                x = jnp.where(stage == 0, embedded, x)
                x = lax.scan(lambda x, w: (layered.layer(w, x, None), None), x, stack)[
                    0
                ]
                loss = layered.head_loss(shared, x, part(t - stages + 1), None)[0]
                on = (stage == stages - 1) & (t >= stages - 1)
                pairs = [(i, i + 1) for i in range(stages - 1)]
                return lax.ppermute(x, "pipe", pairs), jnp.where(on, loss / num, 0.0)

            x = jax.tree.map(vary, layered.embed(shared, part(jnp.int32(0)), None))
            ticks = jnp.arange(num + stages - 1)
            losses = lax.scan(tick, jnp.zeros_like(x), ticks)[1]
            return lax.psum(losses.sum(), "pipe")

        return jax.value_and_grad(loss_fn)(params)

    gradients = jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
        axis_names={"pipe"},
    )
    return jax.jit(gradients)


def main(_: Sequence[str]) -> int:
    """Prints a line per program: measured ratio, and what the tick model predicts."""
    config = command_line.config_from_flags()
    stages, num = STAGES.value, MICROBATCHES.value
    model = dataclasses.replace(config.model, vocab=config.model.vocab or 256)
    config = dataclasses.replace(config, model=model, layout=f"data={stages}")
    _, devices = command_line.start_devices(config)
    base = f"pipe={stages},microbatches={num},save=residuals"
    names = {"plain": f"data={stages}"}
    for schedule in ("gpipe", "1f1b", "interleaved,virtual_stages=2", "zb_h1"):
        names[schedule.split(",")[0]] = f"{base},schedule={schedule}"
    programs = {
        name: building.make_program(config, meshpar.layouts.parse(layout), devices)
        for name, layout in names.items()
    }
    shape = config.batch_size, model.length + 1
    ids = np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    states = {name: program.init(0) for name, program in programs.items()}
    placed = {name: program.place_batch(batch) for name, program in programs.items()}
    run: dict[str, Callable[[], Any]] = {
        name: functools.partial(program.gradients, states[name], placed[name])
        for name, program in programs.items()
    }
    gpipe, state = programs["gpipe"], states["gpipe"]
    by_autodiff = gpipe_by_autodiff(gpipe)

    def autodiff() -> Any:
        with jax.set_mesh(gpipe.mesh):
            return by_autodiff(state.params, placed["gpipe"])

    run["gpipe by autodiff"] = autodiff
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for round_ in range(ROUNDS.value + 2):
        for name, fn in run.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - start)
    plain = statistics.median(seconds["plain"])
    for name, times in seconds.items():
        median, predicted = statistics.median(times), ""
        if name in programs and programs[name].layout.pipe > 1:
            schedule = programs[name].lowering.runner.spec.schedule
            predicted = f", tick model {1 / (1 - schedule.bubble()):.2f}"
        print(
            f"{name}: {1000 * median:.0f} ms, {median / plain:.2f} x plain{predicted}"
        )
    return 0


if __name__ == "__main__":
    command_line.run(main)
