r"""One process of a run: restores, compares its shards, and reads its program back.

    launch/local.sh N -- python tests/support/restored_shards.py \
        LAYOUT FOLDER REFERENCE OUT

REFERENCE is a .npz of all leaves; process 0 writes the step's collectives to OUT.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
from absl import flags

from experiments import recipes
from meshpar.checkpoint import persistent
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.commands.devices import start_devices


def main(layout, folder, reference, out):
    """Raises AssertionError if a shard differs or the contract is broken."""
    newest = persistent.find_checkpoints(folder)[-1]
    config = recipes.stored(newest.metadata["config"])
    config = dataclasses.replace(config, layout=layout)
    layout, devices = start_devices(config)
    program = config.make_program(layout, devices)
    with contextlib.closing(Checkpoints(folder, program.portable_state)) as opened:
        state = opened.restore().state
    with np.load(reference) as want:
        for number, leaf in enumerate(jax.tree.leaves(state)):
            whole = want[str(number)]
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), whole[shard.index]
                )
    assert program.violations() == []
    rows = sorted(
        [c.kind, c.axes, c.payload_bytes, c.executions] for c in program.collectives
    )
    if jax.process_index() == 0:
        pathlib.Path(out).write_text(json.dumps([newest.step, rows]))


if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    main(*sys.argv[1:])
