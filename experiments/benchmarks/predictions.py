r"""Predicted memory and time of many programs against what compilers say of them.

    python -m experiments.benchmarks.predictions --only=llama-1b

Every row is planned, and then compiled ahead of time for a machine that need not be
present; a row takes one to four minutes of a core. Prints one line a row, the mean and
the worst error of the memory, how well the order of the times agrees (Kendall's tau),
and between what found values lie over predicted ones for each kind of layouts
(`meshpar.planner.uncertainty`). The table stands in docs/planning.md.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from scipy import stats

import meshpar
from experiments import command_line, recipes
from experiments.recipes import building
from experiments.recipes.config import Config
from experiments.recipes.errors import ConfigError
from meshpar import mesh
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.uncertainty import kind_of

ONLY = flags.DEFINE_string("only", "", "Rows whose line matches this regex.")


class Row(NamedTuple):
    """A program: recipe, sequences of a batch, layout and machine."""

    recipe: str
    batch_size: int
    layout: str
    topology: str
    vocab: int = 0
    held_out: bool = False
    """Whether the shares of the prediction were fitted without it."""


GPT, LLAMA = "gpt2-124m", "llama-1b"
_PADDED = 50304
"""A vocabulary of GPT-2 that `tensor` and `vocab=pipe` can split."""

ROWS = (
    Row(GPT, 32, "fsdp=8,remat=full", "v5e:2x4"),
    Row(GPT, 32, "fsdp=8,remat=dots", "v5e:2x4"),
    Row(GPT, 32, "data=8", "v5e:2x4"),
    Row(GPT, 32, "fsdp=8,microbatches=4", "v5e:2x4"),
    Row(GPT, 32, "fsdp=2,tensor=4", "v5e:2x4", _PADDED),
    Row(GPT, 32, "data=2,fsdp=2,tensor=2,remat=full", "v5e:2x4", _PADDED),
    Row(GPT, 16, "tensor=4", "v5e:2x2", _PADDED),
    Row(GPT, 32, "fsdp=4", "v5p:2x2x1"),
    Row(GPT, 32, "fsdp=4,remat=full", "v6e:2x2"),
    Row(GPT, 64, "pipe=4,fsdp=4,microbatches=8,remat=full", "v5e:4x4"),
    Row(GPT, 64, "pipe=4,data=2,microbatches=8,schedule=gpipe,remat=full", "v5e:2x4"),
    Row(
        GPT,
        64,
        "pipe=4,data=2,microbatches=8,schedule=interleaved,virtual_stages=3",
        "v5e:2x4",
    ),
    Row(GPT, 64, "pipe=4,data=2,microbatches=8,schedule=zb_h1", "v5e:2x4"),
    Row(GPT, 64, "pipe=2,data=4,microbatches=4,save=residuals,remat=full", "v5e:2x4"),
    Row(GPT, 64, "pipe=2,fsdp=4,microbatches=4,vocab=pipe", "v5e:2x4", _PADDED),
    Row(GPT, 64, "pipe=4,fsdp=2,microbatches=8,zero=1", "v5e:2x4"),
    Row(GPT, 64, "pipe=4,fsdp=2,microbatches=8,zero=3", "v5e:2x4"),
    Row(LLAMA, 16, "fsdp=8,remat=full", "v5e:2x4"),
    Row(LLAMA, 16, "fsdp=8,remat=dots", "v5e:2x4"),
    Row(LLAMA, 8, "fsdp=8", "v5e:2x4"),
    Row(LLAMA, 16, "fsdp=2,tensor=4,remat=full", "v5e:2x4"),
    Row(LLAMA, 32, "pipe=2,fsdp=4,microbatches=8,remat=full", "v5e:2x4"),
    Row(LLAMA, 32, "fsdp=4,zero=2,remat=full", "v5p:2x2x1"),
    Row(LLAMA, 32, "fsdp=4,zero=1,remat=full", "v5p:2x2x1"),
    Row(LLAMA, 32, "data=4,remat=full", "v5p:2x2x1"),
    Row(LLAMA, 32, "fsdp=4,tensor=2,remat=full", "v6e:2x4"),
    Row(LLAMA, 16, "fsdp=4,context=2,remat=full", "v5p:2x2x2"),
    Row(GPT, 64, "pipe=2,fsdp=4,microbatches=4", "v5e:2x4", held_out=True),
    Row(LLAMA, 16, "data=2,fsdp=4,remat=full", "v5e:2x4", held_out=True),
    Row(LLAMA, 16, "fsdp=4,tensor=2,remat=dots", "v5e:2x4", held_out=True),
    Row(
        LLAMA,
        32,
        "pipe=2,data=4,microbatches=8,remat=full",
        "v5e:2x4",
        held_out=True,
    ),
    Row(GPT, 32, "fsdp=8,zero=2,remat=full", "v5e:2x4", held_out=True),
)


def _config(row: Row) -> Config:
    """The configuration of a row."""
    config = recipes.get(row.recipe)
    vocab = row.vocab or config.model.vocab
    model = dataclasses.replace(config.model, vocab=vocab)
    return dataclasses.replace(config, model=model, batch_size=row.batch_size)


def predict(row: Row, devices: Sequence[jax.Device]) -> Candidate:
    """What the planner says of a row."""
    config = _config(row)
    model = building.make_model(config)
    facts = Facts(
        model,
        building.make_optimizer(config.optimizer, config.steps, model),
        building.abstract_batch(config),
        building.compute_dtype(config),
        devices[0],
    )
    made = Candidates(facts, machine_of(devices))
    return made.candidate(meshpar.layouts.parse(row.layout))


def main(_: Sequence[str]) -> int:
    """Predicts and compiles the rows, and prints the errors."""
    meshpar.simulate(1)
    errors, times = [], []
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in ROWS:
        name = f"{row.recipe}, {row.topology}, {row.batch_size}, {row.layout}"
        name += ", held out" if row.held_out else ""
        if not re.search(ONLY.value, name):
            continue
        devices = mesh.topology(row.topology)
        candidate = predict(row, devices)
        layout = meshpar.layouts.parse(row.layout)
        program = building.make_program(_config(row), layout, devices)
        peak, time = program.inspection.peak_bytes, program.inspection.time
        errors.append(candidate.memory.total / peak - 1)
        estimated = time.seconds if time else float("nan")
        times.append((candidate.seconds.total, estimated))
        over = peak / candidate.memory.total, estimated / candidate.seconds.total
        kinds.setdefault(kind_of(layout), []).append(over)
        print(
            f"{name}: memory {candidate.memory.total / 1e9:.2f} GB, compiled "
            f"{peak / 1e9:.2f} ({errors[-1]:+.1%}); step "
            f"{1e3 * candidate.seconds.total:.0f} ms, estimated {1e3 * estimated:.0f}; "
            f"{len(program.violations())} violations",
            flush=True,
        )
    if not errors:
        raise ConfigError(
            f"--only={ONLY.value} matches no row; rows are lines such as {name!r}"
        )
    mean = float(np.mean(np.abs(errors)))
    print(f"memory: mean error {mean:.1%}, {min(errors):+.1%} to {max(errors):+.1%}")
    if len(times) > 1:
        tau = stats.kendalltau(*zip(*times, strict=True)).statistic
        print(f"time: Kendall's tau {tau:.2f} over {len(times)} programs")
    for kind, ratios in kinds.items():
        memory, seconds = zip(*ratios, strict=True)
        print(
            f"{kind}: found over predicted: memory {min(memory):.2f} to "
            f"{max(memory):.2f}, time {min(seconds):.2f} to {max(seconds):.2f}"
        )
    return 0


if __name__ == "__main__":
    command_line.run(main)
