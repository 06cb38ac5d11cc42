"""Bits that flip in the memory of one device: planted, and counted by numpy.

python tests/support/planted_flips.py FLAGS trains by `experiments.run`; after step 5
the last device of all processes holds a flipped bit of a parameter.
"""

import collections

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshpar.lowering.train_program import TrainProgram

WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def flipped(x, device, word=0, bit=20):
    """The array with one bit flipped in the shard of one device."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            words = data.reshape(-1).view(WORD[data.itemsize])
            words[word % words.size] ^= words.dtype.type(1 << bit % (8 * data.itemsize))
        kind = x.sharding.memory_kind
        place = SingleDeviceSharding(shard.device, memory_kind=kind)
        shards.append(jax.device_put(data, place))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def planted(state, tensor, device, word=0, bit=20):
    """The state with one bit flipped; `tensor` is the number of a leaf."""
    leaves, structure = jax.tree.flatten(state)
    leaves[tensor] = flipped(leaves[tensor], device, word, bit)
    return structure.unflatten(leaves)


def differing(state):
    """Numbers of the leaves whose copies differ, by their bytes on the host."""
    found = set()
    for number, x in enumerate(jax.tree.leaves(state)):
        copies = collections.defaultdict(set)
        for shard in x.addressable_shards:
            copies[str(shard.index)].add(np.asarray(shard.data).tobytes())
        if any(len(values) > 1 for values in copies.values()):
            found.add(number)
    return found


def flip_after(step):
    """Makes programs flip a bit of a parameter after a step, on their last device.

    Returns:
      A function that undoes it.
    """
    original = TrainProgram.step

    def flipping(self, state, batch):
        state, metrics = original(self, state, batch)
        if int(state.step) == step:
            path = list(state.params)[-1]
            x = flipped(state.params[path], self.mesh.devices.flat[-1])
            state = state._replace(params={**state.params, path: x})
        return state, metrics

    TrainProgram.step = flipping
    return lambda: setattr(TrainProgram, "step", original)


if __name__ == "__main__":
    from experiments.recipes import CATALOG
    from meshpar.commands import run

    flip_after(5)
    run.start(CATALOG)
