r"""Compares decoders with a page of plain JAX, on simulated CPU devices.

    python -m experiments.benchmarks.decoder_on_cpu
    python -m experiments.benchmarks.decoder_on_cpu --only=llama/fsdp=8 --rounds=60

Trains a small GPT-2 and a small Llama under four layouts, each in turns with the page
of `experiments.benchmarks.decoder_page`, which begins with the same weights: the losses
are compared. Prints medians of CPU seconds and of wall time of a step, and the ratio of
the page's over ours. Aim: 1.00, at least 0.98.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import rich.table
from absl import flags

import meshpar
from experiments.benchmarks import decoder_page
from experiments.benchmarks.timed_steps import WARM_STEPS, Timed
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.settings import Number

ROUNDS = flags.DEFINE_integer("rounds", 30, "Timed steps of each program.")
ONLY = flags.DEFINE_string("only", "", "Rows whose name holds this text.")
command_line.limit(ROUNDS, Number(1, 10**6, "steps"))

_DEVICES, _ROWS = 8, 8
_SIZES = dict(vocab=1024, embed=256, depth=4, mlp=1024, length=256, heads=4, kv_heads=4)
_MODELS = {
    "gpt2": DecoderConfig(**_SIZES, **GPT2_KIND),
    "llama": DecoderConfig(**_SIZES),
}
_LAYOUTS = "data=1", "data=8", "fsdp=8", "fsdp=2,tensor=4"
_TOLERANCE = 1e-4


def _pair(config: DecoderConfig, layout: str) -> tuple[Timed, Timed]:
    """(meshpar's program, the page) with the same weights and batch."""
    ids = np.random.default_rng(0).integers(
        0, config.vocab, (_ROWS, config.length + 1), np.int32
    )
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    parsed = meshpar.layouts.parse(layout)
    program = meshpar.lower(
        language_model(config),
        optax.adam(3e-4, b1=0.9, b2=0.95),
        layout,
        batch,
        devices=jax.devices()[: parsed.num_devices],
    )
    state = program.init(0)
    names = {path: param.names for path, param in program.model.params.items()}
    page = decoder_page.Page(config, decoder_page.specs_of(names), program.mesh)
    weights = jax.device_get(state.params)

    def step(state: Any, batch: Any) -> Any:
        state, metrics = program.step(state, batch)
        return state, metrics["loss"]

    return (
        Timed(step, state, program.place_batch(batch)),
        Timed(page.step(), page.state(weights), page.place_batch(batch)),
    )


def main(_: Sequence[str]) -> int:
    """Prints the table; returns 1 if losses differ."""
    command_line.use_cpu()
    meshpar.simulate(_DEVICES)
    columns = "row", "ours, CPU ms", "page", "ratio", "ours, ms", "page", "ratio"
    table = rich.table.Table(*columns)
    differ = []
    for kind, config in _MODELS.items():
        for layout in _LAYOUTS:
            if ONLY.value not in (name := f"{kind}/{layout}"):
                continue
            pair = _pair(config, layout)
            for _ in range(ROUNDS.value + WARM_STEPS):
                ours, theirs = (timed.run() for timed in pair)
                if abs(ours - theirs) > _TOLERANCE:
                    differ.append(f"{name}: loss {ours:.6f}, page {theirs:.6f}")
            cells = []
            for own, page in zip(*(timed.medians() for timed in pair), strict=True):
                cells += [f"{1e3 * own:.0f}", f"{1e3 * page:.0f}", f"{page / own:.2f}"]
            table.add_row(name, *cells)
    console = terminal.wide_console()
    console.print(table)
    for line in differ[:1]:
        console.print(f"DIFFERENT: {line}")
    return 1 if differ else 0


if __name__ == "__main__":
    command_line.run(main)
