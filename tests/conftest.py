"""Eight simulated devices for all tests; quick compiles; nothing implicit."""

import os

# Unoptimized machine code compiles several times faster; children inherit it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

import meshpar

meshpar.simulate(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8, jax.devices()


@pytest.fixture(params=["nnx", "linen"])
def framework(request):
    return request.param
