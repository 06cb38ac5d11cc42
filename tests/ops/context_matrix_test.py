"""Layouts that split sequences train a decoder as one device does."""

import functools

import jax
import numpy as np
import optax
import pytest
from support import equality
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, batch, lower_standard, model

import meshpar
from experiments import data
from experiments.data import padded_unevenly
from meshpar import layouts
from meshpar.lowering.jit import JitLowering

STEPS = 2

LAYOUTS = [
    slow("fsdp=2,context=4,params.embed=fsdp+context"),
    slow("fsdp=2,context=2,tensor=2,context_mode=ulysses,remat=full"),
    slow("pipe=2,fsdp=2,context=2,microbatches=4,context_mode=ring"),
    slow("data=2,context=2 jit"),
    slow("fsdp=4,context=2,zero=1,params.embed=fsdp+context"),
    slow("fsdp=2,context=2,zero=2,microbatches=2,remat=dots"),
    "context=8,context_mode=ring,context_heads=2",
    slow("fsdp=2,context=4,context_order=striped"),
    slow("fsdp=2,context=4,context_order=contiguous"),
    slow("context=8,context_mode=ulysses"),
    slow("context=2,tensor=4,context_mode=ring,remat=full"),
    slow("fsdp=2,context=2,context_mode=ring jit"),
    slow("pipe=2,context=4,microbatches=4,context_mode=ulysses,save=residuals"),
    slow("pipe=2,context=2,tensor=2,microbatches=4,virtual_stages=2"),
    slow("pipe=2,fsdp=2,context=2,zero=3,microbatches=4,vocab=pipe,remat=full"),
]


def program(layout, depth, lowering=""):
    of = model(depth=depth, kv_heads=4, dropout=0.1, position="learned")
    return lower_standard(layout, of, lowering=lowering)


@functools.cache
def one_device(depth):
    alone = program("data=1", depth)
    return equality.record(alone, [batch(i) for i in range(STEPS)])


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_equals_one_device(case):
    text, *lowering = case.split()
    layout = layouts.parse(text)
    depth = 2 * layout.virtual_stages
    tested = program(layout, depth, *lowering)
    assert isinstance(tested.lowering, JitLowering) == (lowering == ["jit"])
    report = equality.compare(
        tested, one_device(depth), [batch(i) for i in range(STEPS)]
    )
    assert report.ok, report.problem


PACKED = [
    "context=4",
    slow("fsdp=2,context=2,context_mode=ring,context_order=striped,remat=full"),
    slow("data=2,context=2,context_mode=ulysses,tensor=2"),
    slow("pipe=2,context=4,microbatches=2,context_mode=ring,context_heads=2"),
]


@functools.cache
def packed(number):
    """Documents of 1 to 12 tokens, some longer than a device's part."""
    random = np.random.default_rng(number)
    starts = np.append(0, np.cumsum(random.integers(2, 14, 60)))
    tokens = random.integers(0, 64, starts[-1] + 9)
    samples = data.PackedSamples(tokens, starts, LENGTH)
    rows = [samples[i] for i in range(BATCH)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", PACKED)
def test_packed_documents_train_alike(layout):
    """With layers whose attention has a window, and layers without one."""
    batches = [packed(i) for i in range(STEPS)]
    num = layouts.parse(layout).microbatches
    of = model(depth=4, window=5, global_every=2, kv_heads=4)

    def program(text):
        devices = jax.devices()[: layouts.parse(text).num_devices]
        optimizer = optax.adamw(1e-2, eps=1e-2)
        return meshpar.lower(of, optimizer, text, batches[0], devices=devices)

    report = equality.compare(program(layout), program(f"microbatches={num}"), batches)
    assert report.ok, report.problem


@pytest.mark.slow
def test_parts_of_sequences_weigh_as_their_tokens_do():
    """One part may have no token at all."""
    batches = [padded_unevenly(batch(i)) for i in range(STEPS)]
    with_block = model(loss_block=4)

    def weighed(layout):
        devices = jax.devices()[: layouts.parse(layout).num_devices]
        optimizer = optax.adamw(1e-2, eps=1e-2)
        return meshpar.lower(with_block, optimizer, layout, batches[0], devices=devices)

    report = equality.compare(weighed("context=4"), weighed("data=1"), batches)
    assert report.ok, report.problem
