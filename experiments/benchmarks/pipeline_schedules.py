r"""Compares the step time of pipeline schedules with the tick model and plain layouts.

    python -m experiments.benchmarks.pipeline_schedules --recipe=bytes-llama

All programs train the same batch on the same devices, alternately in one process. The
plain layout is data=P. "gpipe by autodiff" differentiates the loop over ticks, which
saves every microbatch. The tick model predicts 1/(1 - bubble) times the plain layout:
where devices share cores, idle stages that compute masked results cost as much as busy
ones. ZB-H1 skips idle stages, so its bubble costs nothing there.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import PartitionSpec

import meshpar
from experiments import recipes
from meshpar.arrays import Array
from meshpar.collectives import microbatch
from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.layouts.axes import DATA, PIPE
from meshpar.settings import Number

STAGES = flags.DEFINE_integer("stages", 4, "P, number of stages and devices.")
MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "M, number of microbatches.")
ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed steps of each program.")
command_line.limit(STAGES, Number(2, 4096, "stages"))
command_line.limit(MICROBATCHES, Number(1, 2**20, "microbatches"))
command_line.limit(ROUNDS, Number(1, 10**6, "steps"))

WARM_UP_ROUNDS = 2
BY_AUTODIFF = "gpipe by autodiff"
Run = Callable[[], Any]


def gpipe_by_autodiff(program: meshpar.TrainProgram) -> Callable[..., Any]:
    """Gradients of a GPipe program, by differentiating its loop over ticks.

    Returns:
      (params, batch) -> (loss, gradients), jitted.
    """
    layered, num = program.model.layered, program.layout.microbatches
    stages, specs = program.layout.pipe, program.plan.specs

    def local(params: Any, batch: Any) -> Any:
        batches = microbatch.split_microbatches(batch, num)
        stage = lax.axis_index(PIPE)

        def microbatch_at(m: Array) -> Any:
            return jax.tree.map(lambda x: x[jnp.clip(m, 0, num - 1)], batches)

        def vary(x: Array) -> Array:
            varies = PIPE in jax.typeof(x).manual_axis_type.varying
            return x if varies else lax.pcast(x, (PIPE,), to="varying")

        def loss_fn(params: Any) -> Array:
            shared, stack = layered.split(params)

            def layer(x: Any, weights: Any) -> Any:
                return layered.layer(weights, x, None, ()), None

            def tick(x: Any, t: Array) -> Any:
                embedded = layered.embed(shared, microbatch_at(t), None)
                x = jnp.where(stage == 0, embedded, x)
                x = lax.scan(layer, x, stack)[0]
                targets = microbatch_at(t - stages + 1)
                loss = layered.head_loss(shared, x, targets, None)[0]
                valid = (stage == stages - 1) & (t >= stages - 1)
                pairs = [(i, i + 1) for i in range(stages - 1)]
                return lax.ppermute(x, PIPE, pairs), jnp.where(valid, loss / num, 0.0)

            first = layered.embed(shared, microbatch_at(jnp.int32(0)), None)
            x = jnp.zeros_like(jax.tree.map(vary, first))
            losses = lax.scan(tick, x, jnp.arange(num + stages - 1))[1]
            return lax.psum(losses.sum(), PIPE)

        return jax.value_and_grad(loss_fn)(params)

    gradients = jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
        axis_names={PIPE},
    )
    return jax.jit(gradients)


def make_programs() -> tuple[dict[str, meshpar.TrainProgram], dict[str, np.ndarray]]:
    """The programs by name, and a batch for all of them."""
    config = recipes.of_decoder(command_line.config_from_flags())
    stages, num = STAGES.value, MICROBATCHES.value
    model = dataclasses.replace(config.model, vocab=config.model.vocab or 256)
    plain = f"{DATA}={stages}"
    config = dataclasses.replace(config, model=model, layout=plain)
    _, devices = start_devices(config)
    base = f"{PIPE}={stages},microbatches={num},save=residuals"
    layouts = {"plain": plain}
    for schedule in ("gpipe", "1f1b", "interleaved,virtual_stages=2", "zb_h1"):
        layouts[schedule.split(",")[0]] = f"{base},schedule={schedule}"
    programs = {
        name: config.make_program(meshpar.layouts.parse(layout), devices)
        for name, layout in layouts.items()
    }
    shape = config.batch_size, model.length + 1
    ids = np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)
    return programs, {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def make_runs(
    programs: Mapping[str, meshpar.TrainProgram], batch: Mapping[str, np.ndarray]
) -> dict[str, Run]:
    """{name: function that computes gradients once}, with GPipe by autodiff."""
    states = {name: program.init(0) for name, program in programs.items()}
    placed = {name: program.place_batch(batch) for name, program in programs.items()}
    runs: dict[str, Run] = {
        name: functools.partial(program.gradients, states[name], placed[name])
        for name, program in programs.items()
    }
    gpipe, params = programs["gpipe"], states["gpipe"].params
    gradients = gpipe_by_autodiff(gpipe)

    def by_autodiff() -> Any:
        with jax.set_mesh(gpipe.mesh):
            return gradients(params, placed["gpipe"])

    return runs | {BY_AUTODIFF: by_autodiff}


def time_runs(runs: Mapping[str, Run]) -> dict[str, float]:
    """{name: median seconds} of runs that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS.value + WARM_UP_ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if round_ >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main(_: Sequence[str]) -> int:
    """Prints a line per program: the measured ratio, and that of the tick model."""
    programs, batch = make_programs()
    medians = time_runs(make_runs(programs, batch))
    for name, median in medians.items():
        prediction = ""
        report = programs[name].lowering.report(batch) if name in programs else {}
        if pipeline := report.get("pipeline"):
            prediction = f", tick model {1 / (1 - pipeline.bubble):.2f}"
        ratio = median / medians["plain"]
        print(f"{name}: {1000 * median:.0f} ms, {ratio:.2f} x plain{prediction}")
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        (
            command_line.RECIPE,
            command_line.STEPS,
            command_line.BATCH_SIZE,
            command_line.SET,
            *command_line.OF_DEVICES,
        ),
        known=recipes.CATALOG,
    )
