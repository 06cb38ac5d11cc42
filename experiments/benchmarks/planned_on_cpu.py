r"""The planner's order of layouts against measured steps on simulated CPU devices.

    python -m experiments.benchmarks.planned_on_cpu --rounds=5
    python -m experiments.benchmarks.planned_on_cpu --rounds=5 --case=unseen

Trains a small Llama under a dozen layouts on eight simulated devices, all in turns, and
prints the median of the CPU seconds of a step beside the predicted time, and how well
the two orders agree (Kendall's tau). Simulated devices share the cores of one machine,
so that a step costs the work of all of them; the prediction is that of a device with a
core of its own. Aim: at least 0.8.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
import rich.table
from absl import flags
from scipy import stats

import meshpar
from experiments.benchmarks.timed_steps import WARM_STEPS, Timed
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.settings import Number

ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed steps of each layout.")
command_line.limit(ROUNDS, Number(1, 10**6, "steps"))

_DEVICES = 8


class _Case(NamedTuple):
    """A model and the layouts that train it.

    Attributes:
      model: its sizes.
      rows: sequences of a batch.
      layouts: layout strings.
    """

    model: DecoderConfig
    rows: int
    layouts: tuple[str, ...]


_CASES = {
    "fitted": _Case(
        DecoderConfig(
            vocab=1024, embed=256, depth=8, mlp=1024, length=256, heads=4, kv_heads=4
        ),
        rows=32,
        layouts=(
            "data=8",
            "data=8,remat=full",
            "data=8,remat=dots",
            "fsdp=8",
            "fsdp=8,remat=full",
            "fsdp=8,microbatches=4",
            "fsdp=2,tensor=4",
            "fsdp=4,tensor=2,remat=full",
            "pipe=2,data=4,microbatches=4",
            "pipe=4,fsdp=2,microbatches=8,remat=full",
            "pipe=4,data=2,microbatches=8,schedule=gpipe",
            "pipe=2,fsdp=4,microbatches=8,save=residuals,remat=full",
        ),
    ),
    "unseen": _Case(
        DecoderConfig(
            vocab=2048, embed=512, depth=4, mlp=1536, length=128, heads=8, kv_heads=4
        ),
        rows=64,
        layouts=(
            "data=8",
            "fsdp=8",
            "fsdp=8,remat=dots",
            "data=2,fsdp=4,remat=full",
            "fsdp=8,microbatches=2",
            "fsdp=8,zero=1",
            "fsdp=4,tensor=2",
            "data=2,tensor=4",
            "fsdp=2,tensor=4,remat=full",
            "pipe=2,fsdp=4,microbatches=4",
            "pipe=2,data=2,tensor=2,microbatches=4",
            "pipe=4,data=2,microbatches=4,remat=full",
            "pipe=2,data=4,microbatches=8,schedule=gpipe",
            "pipe=2,fsdp=4,microbatches=4,schedule=interleaved,virtual_stages=2",
        ),
    ),
}
"""The rates of a CPU were fitted to the first model, and not to the second."""

CASE = flags.DEFINE_enum("case", "fitted", list(_CASES), "Model and layouts.")


def main(_: Sequence[str]) -> int:
    """Prints the table and the rank correlation."""
    command_line.use_cpu()
    meshpar.simulate(_DEVICES)
    devices = jax.devices()[:_DEVICES]
    case = _CASES[CASE.value]
    shape = case.rows, case.model.length + 1
    ids = np.random.default_rng(0).integers(0, case.model.vocab, shape, np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    model, optimizer = language_model(case.model), optax.adam(3e-4)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    facts = Facts(model, optimizer, shapes, None, devices)
    made = Candidates(facts, machine_of(devices))
    predicted, timed = {}, {}
    for layout in case.layouts:
        predicted[layout] = made.candidate(meshpar.layouts.parse(layout)).seconds.total
        program = meshpar.lower(model, optimizer, layout, batch, devices=devices)

        def step(state, batch, program=program):
            state, metrics = program.step(state, batch)
            return state, metrics["loss"]

        timed[layout] = Timed(step, program.init(0), program.place_batch(batch))
    for _ in range(ROUNDS.value + WARM_STEPS):
        for run in timed.values():
            run.run()
    table = rich.table.Table("layout", "CPU ms of a step", "predicted ms")
    measured = {layout: run.medians()[0] for layout, run in timed.items()}
    for layout in sorted(case.layouts, key=measured.get):
        cells = 1e3 * measured[layout], 1e3 * predicted[layout]
        table.add_row(layout, *(f"{cell:.0f}" for cell in cells))
    console = terminal.wide_console()
    console.print(table)
    pairs = [(measured[layout], predicted[layout]) for layout in case.layouts]
    tau = stats.kendalltau(*zip(*pairs, strict=True)).statistic
    console.print(f"Kendall's tau {tau:.2f} over {len(case.layouts)} layouts")
    return 0


if __name__ == "__main__":
    command_line.run(main)
