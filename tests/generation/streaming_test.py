"""Weights that come from host memory layer by layer generate what resident ones do."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow
from support.tiny_models import model

import meshpar
from meshpar.explain.generation import explain_generation
from meshpar.generation import GREEDY
from meshpar.layouts.plan import HOST_MEMORY
from meshpar.ops import over_layers

LENGTH, ROWS = 16, 4
KINDS = {
    "llama": dict(kv_heads=4),
    "windows": dict(kv_heads=4, window=3, global_every=2),
    "experts": dict(kv_heads=4, num_experts=4, mlp=32, capacity_factor=8.0),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]


@functools.cache
def weights(kind):
    of_kind = model(**KINDS[kind])
    return of_kind, jax.device_get(jax.jit(of_kind.init)(jax.random.key(0)))


def make(kind, layout):
    of_kind, params = weights(kind)
    layout = meshpar.layouts.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    generator = meshpar.generator(
        of_kind, layout, max_length=LENGTH, batch_size=ROWS, devices=devices
    )
    return generator, generator.place(params)


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("llama", "data=1"),
        slow("llama", "fsdp=2,tensor=2"),
        slow("llama", "context=2"),
        slow("windows", "fsdp=4"),
        slow("experts", "fsdp=2,expert=2"),
    ],
)
def test_streamed_equals_resident_bit_for_bit(kind, layout):
    resident, streamed = make(kind, layout), make(kind, f"{layout},offload=parameters")
    states = [g.prefill(params, PROMPTS, 8) for g, params in (resident, streamed)]
    for _ in range(8):
        logits = []
        for number, (generator, params) in enumerate((resident, streamed)):
            sampling = generator.sampling_arrays(GREEDY)
            states[number], found = generator.decode(params, states[number], sampling)
            logits.append(np.asarray(found))
        np.testing.assert_array_equal(*logits)
    np.testing.assert_array_equal(states[0].tokens, states[1].tokens)
    check_weights_and_contract(*streamed)


def check_weights_and_contract(generator, params):
    on_host = {p for p, x in params.items() if x.sharding.memory_kind == HOST_MEMORY}
    assert on_host == {p for p, x in params.items() if "blocks" in p and x.ndim > 2}
    assert generator.violations() == []
    size = sum(params[path].addressable_shards[0].data.nbytes for path in on_host)
    depth = len(params[min(on_host)])
    prefill, decoding = explain_generation(generator)
    assert (prefill.name, decoding.name) == ("prefill", "decoding")
    for found in (prefill, decoding):
        (transfer,) = found.host
        assert (transfer.to_device, transfer.to_host) == (size + size // depth, 0)
        assert found.violations == ()
    cache = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in generator.programs.abstract_cache.values()
    )
    others = [x for path, x in params.items() if path not in on_host]
    rest = sum(x.addressable_shards[0].data.nbytes for x in others)
    assert decoding.state_bytes == cache + rest


def test_layers_run_alone_as_they_do_under_a_layout():
    stack = {"w": jnp.arange(12.0).reshape(3, 2, 2)}
    found = over_layers(lambda x, layer: x @ layer["w"], jnp.eye(2), stack)
    w = np.asarray(stack["w"])
    np.testing.assert_array_equal(found, w[0] @ w[1] @ w[2])


def test_a_model_that_cannot_stream_is_an_error():
    of_kind, _ = weights("llama")
    cached = dataclasses.replace(of_kind.cached, streams=False)
    unnamed = {
        path: dataclasses.replace(param, names=("mlp",) * len(param.shape))
        for path, param in of_kind.params.items()
    }
    for options, words in [
        (dict(cached=cached), "run its layers by meshpar.ops.over_layers"),
        (dict(params=unnamed), "first dim is named 'layers', and the model has none"),
    ]:
        with pytest.raises(meshpar.LayoutError, match=words):
            meshpar.generator(
                dataclasses.replace(of_kind, **options),
                "data=1,offload=parameters",
                max_length=LENGTH,
                devices=jax.devices()[:1],
            )
