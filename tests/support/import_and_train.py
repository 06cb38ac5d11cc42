r"""Imports every module of an installed meshpar and trains one step.

    PYTHONPATH=FOLDER python tests/support/import_and_train.py FOLDER

FOLDER is where the wheel was unpacked.
"""

import importlib
import pathlib
import pkgutil
import sys

import jax
import jax.numpy as jnp
import optax
from absl import flags
from flax import nnx

import meshpar


def import_all():
    """Returns the names of all modules, each imported.

    Commands have flags with equal names: those of one are gone before the next.
    """
    names = []
    for module in pkgutil.walk_packages(meshpar.__path__, "meshpar."):
        names.append(importlib.import_module(module.name).__name__)
        for flag in [*flags.FLAGS.flags_by_module_dict().get(module.name, [])]:
            if not module.name.endswith(".command_line"):
                delattr(flags.FLAGS, flag.name)
    return names


class Line(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((4, 4)), out_sharding=("embed", None))


def loss(line, batch):
    return jnp.square(batch["x"] @ line.w[...]).mean()


def train_step():
    """Returns the losses before and after one step on two devices."""
    rows = {"x": jnp.ones((8, 4))}
    line = meshpar.from_nnx(Line, loss)
    program = meshpar.lower(line, optax.sgd(0.1), "fsdp=2", rows)
    state, before = program.step(program.init(0), rows)
    return float(before["loss"]), float(program.evaluate(state, rows)["loss"])


if __name__ == "__main__":
    assert pathlib.Path(meshpar.__file__).is_relative_to(sys.argv[1]), meshpar.__file__
    meshpar.simulate(2)
    print(*import_all(), sep="\n")
    before, after = train_step()
    assert after < before, (before, after)
    assert jax.device_count() == 2
