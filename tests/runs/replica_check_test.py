"""Flipped bits in one copy of a training state are found, and the device is named."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import planted_flips, tiny_models
from support.marks import slow

import meshpar
from meshpar.runs.replica_check import ReplicaCheck, describe, hash_of

NAMED_ALONE = re.compile(r"So device (\d+) of process (\d+) is wrong")


def names_of(check):
    return [tensor.name for tensor in check._tensors]


SGD = optax.sgd(0.3, momentum=0.9)
LAYOUTS = [
    ("data=2,fsdp=4", {}),
    slow("data=8", {}),
    slow("pipe=2,data=2,tensor=2,microbatches=2", {}),
    slow("data=2,tensor=4", {}),
    slow("data=2,fsdp=2,tensor=2", dict(lowering="jit")),
    slow("data=2,context=4", {}),
    slow("replica=2,data=4", dict(mode=meshpar.LocalSGD(period=2))),
    slow("pipe=2,data=4,microbatches=4,schedule=pipedream", dict(optimizer=SGD)),
    slow("data=4,fsdp=2,offload=optimizer", {}),
    slow("data=4,fsdp=2", dict(optimizer=optax.lamb(1e-2))),  # Norms spread an error.
]
PLANTS = 6
"""Random flips of each layout, in parameters, optimizer state, counts and seeds."""


@pytest.mark.parametrize("layout, options", LAYOUTS)
def test_random_flips_are_found_and_no_device_is_blamed_wrongly(layout, options):
    """The judge compares bytes on the host. Half of the flips are trained on."""
    rng = np.random.default_rng(zlib.crc32(layout.encode()))
    options = {"optimizer": optax.adamw(1e-2), **options}
    program = tiny_models.lower(layout, **options)
    check = ReplicaCheck(program)
    state = program.init(0)
    state, _ = program.step(state, tiny_models.batch())
    assert check.differences(state) == [] == check.violations()
    names = names_of(check)
    copied = [
        number
        for number, tensor in enumerate(check._tensors)
        if tensor.copy_axes(program.mesh)
    ]
    kept, blamed = jax.tree.map(np.asarray, state), 0
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for trial in range(PLANTS):
        tensor, word, bit = (
            int(rng.choice(copied)),
            *map(int, rng.integers(0, 2**31, 2)),
        )
        device = jax.devices()[int(rng.integers(8))]
        state = jax.device_put(kept, shardings)
        state = planted_flips.planted(state, tensor, device, word, bit)
        for step in range(trial % 2 * 2):
            state, _ = program.step(state, tiny_models.batch(step))
        expected = {names[n] for n in planted_flips.differing(state)}
        found = check.differences(state)
        assert {difference.tensor for difference in found} == expected
        if trial % 2 == 0:
            assert expected == {names[tensor]}
            assert device in found[0].devices
            assert found[0].minority == ((device,) if len(found[0].devices) > 2 else ())
        if found and (alone := NAMED_ALONE.search(describe(found))):
            assert int(alone[1]) == device.id
            blamed += 1
    assert check.differences(jax.device_put(kept, shardings)) == []
    assert blamed or layout == "data=2,fsdp=4"  # Of two copies none is blamed.


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "bool", "complex64", "int32"]
)
def test_one_changed_word_changes_the_hash_and_so_does_another_order(dtype):
    hashed = jax.jit(lambda bits: hash_of(bits.astype(dtype)))
    bits = np.random.default_rng(0).integers(0, 2, (5, 7))
    seen = {int(hashed(bits))}
    for i, j in np.ndindex(5, 7):
        one = np.zeros_like(bits)
        one[i, j] = 1
        seen.add(int(hashed(bits ^ one)))
    assert len(seen) == 36
    bits[0, :2] = 0, 1
    seen = {int(hashed(bits)), int(hashed(bits[:, [1, 0, 2, 3, 4, 5, 6]]))}
    assert len(seen) == 2


def test_an_even_number_of_flipped_signs_does_not_cancel():
    """A sum whose weights are odd would not see it: the top bit knows no weight."""
    x = jnp.arange(1.0, 9.0)
    assert hash_of(x) != hash_of(x.at[2:4].multiply(-1))
