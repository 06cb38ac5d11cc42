"""Every optimizer under every kind of layout equals a plain loop, or is refused.

The outcomes stand in a table of docs/optimizers.md. A row that differs is written anew,
and its test fails once.
"""

import fcntl
import functools
import pathlib

import jax
import numpy as np
import pytest
from support import optimizer_models
from support.optimizer_models import Layer, Mixture

from meshpar import layouts
from meshpar.commands.optimizers import OPTIMIZERS
from meshpar.errors import MeshparError
from meshpar.explain.judge import PlainLoop

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md"
STEPS = 3
LAYOUTS = [
    "data=8",
    "fsdp=8,zero=1",
    "fsdp=8,zero=2",
    "fsdp=8,zero=3",
    "data=2,fsdp=2,tensor=2",
    "pipe=2,fsdp=2,tensor=2,microbatches=4",
    "fsdp=2,expert=2",
]
BATCHES = [optimizer_models.batch(i) for i in range(STEPS)]


def is_equal(program, judge):
    """Whether losses and weights are those of the judge, within rounding."""
    state = program.init(0)
    for data, step in zip(BATCHES, judge, strict=True):
        state, metrics = program.step(state, data)
        wanted = float(step.metrics["loss"])
        if not abs(float(metrics["loss"]) - wanted) <= 1e-5 * abs(wanted):
            return False
    found = program.weights(state)
    for path, wanted in judge[-1].variables.items():
        error = np.abs(jax.device_get(found[path]) - wanted).max()
        if not error <= 1e-4 * np.abs(wanted).max():
            return False
    return True


def outcomes(name):
    """For each layout, (without layers, with them): "equal", "refused" or "WRONG"."""
    lower = functools.partial(optimizer_models.lower, optimizer=OPTIMIZERS[name])
    judges = {}
    for layout in LAYOUTS:
        pair = []
        for layers in ("", "layers"):
            layer = Mixture if layouts.parse(layout).expert > 1 else Layer
            try:
                program = lower(layout, layer=layer, layers=layers)
            except MeshparError:
                pair.append("refused")
                continue
            if layer not in judges:
                loop = PlainLoop.of(program)
                judges[layer] = list(loop.run(loop.init(0), BATCHES))
            equal = is_equal(program, judges[layer])
            pair.append("equal" if equal else "WRONG")
        yield tuple(pair)


def cell(pair):
    return pair[0] if pair[0] == pair[1] else f"{pair[0]}, with layers {pair[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_of_layouts_says_what_an_optimizer_does(name):
    with jax.numpy_rank_promotion("allow"):
        found = list(outcomes(name))
    assert not any("WRONG" in pair for pair in found), dict(
        zip(LAYOUTS, found, strict=True)
    )
    row = " | ".join([f"| {name}", *map(cell, found)]) + " |"
    with PAGE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        (at,) = (i for i, s in enumerate(lines) if s.startswith(f"| {name} |"))
        old, lines[at] = lines[at], row
        if old != row:
            file.seek(0)
            file.truncate()
            file.write("\n".join(lines) + "\n")
    assert row == old, f"{PAGE.name} had another row; it is written anew"


def test_the_table_of_layouts_has_every_optimizer():
    text = PAGE.read_text()
    rows = {line.split(" |")[0].removeprefix("| ") for line in text.splitlines()}
    assert rows >= {*OPTIMIZERS}
    assert all(f"| `{layout}` " in text for layout in LAYOUTS)
