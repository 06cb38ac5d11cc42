"""Eight simulated devices for all tests; quick compiles; nothing implicit."""

import atexit
import dataclasses
import gc
import os
import shutil
import sys
import tempfile

# Unoptimized machine code compiles several times faster; children inherit it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
# Otherwise every child process parses every module of meshpar anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # Others spin while they wait.

# Child processes share one compilation cache for as long as tests run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    cache = tempfile.mkdtemp(prefix="meshpar-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from support import compiled_once, drawn_weights, shared_context

import meshpar
from meshpar import TrainProgram

meshpar.simulate(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Few programs of one process come twice: writing all of them costs more than it saves.
jax.config.update("jax_enable_compilation_cache", False)
assert jax.device_count() == 8, jax.devices()
TrainProgram.init = drawn_weights.init
compiler.backend_compile_and_load = compiled_once.compiled
mlir.make_ir_context = shared_context.context
sys.dont_write_bytecode = False  # pytest keeps what it made of the tests' files.

# Traces make many objects that live long: with the defaults, a tenth of the time goes
# into looking for circles among them, most of all among those of the modules.
gc.freeze()
gc.set_threshold(100_000, 20, 50)


CALLERS = {"checker": 10, "collectives": 1, "contracts": 1}
"""Callers that programs name for each operation, in folders whose tests read them.

XLA carries them along: without any, programs compile a tenth faster.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    callers = CALLERS.get(item.path.parent.name, 0)
    jax.config.update("jax_traceback_in_locations_limit", callers)


def pytest_sessionfinish():
    gc.freeze()  # Otherwise pytest looks twice for circles in all that is left.


@pytest.fixture(params=["nnx", "linen"])
def framework(request):
    return request.param


def named(value):
    """A value as part of a test's name, the same in every process."""
    if isinstance(value, dict):
        return ",".join(f"{key}={named(x)}" for key, x in value.items()) or "nothing"
    if isinstance(value, set | frozenset):
        return ",".join(sorted(map(named, value))) or "nothing"
    if isinstance(value, list | tuple):
        return ",".join(map(named, value)) or "nothing"
    if isinstance(value, str | int | float | None):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def pytest_make_parametrize_id(val):
    """Names containers by what they hold: pytest would number them."""
    if isinstance(val, dict | list | tuple | set | frozenset):
        return named(val)[:60]
    record = dataclasses.is_dataclass(val) and not isinstance(val, type)
    if record or isinstance(val, BaseException):
        return type(val).__name__
    return None
