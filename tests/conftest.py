"""Eight simulated devices for all tests; quick compiles; nothing implicit."""

import atexit
import os
import shutil
import tempfile

import jaxlib

# Unoptimized machine code compiles several times faster; children inherit it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
if jaxlib.__version__.startswith("0.10."):  # Later ones have no other emitters.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PLATFORMS"] = "cpu"

# Workers and child processes share one compilation cache for as long as tests run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    cache = tempfile.mkdtemp(prefix="meshpar-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

import meshpar

meshpar.simulate(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8, jax.devices()


@pytest.fixture(params=["nnx", "linen"])
def framework(request):
    return request.param
