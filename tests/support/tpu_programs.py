"""A small model for the real TPU compiler, and the mark of tests that need it."""

import dataclasses
import importlib.util

import pytest

from experiments import recipes
from meshpar.runs.config import with_settings

SETTINGS = [
    "model.vocab=1024",
    "model.length=256",
    "model.depth=3",
    "model.embed=512",
    "model.heads=4",
    "model.kv_heads=4",
    "model.mlp=2048",
]
tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='the TPU compiler comes with pip install -e ".[aot-tpu]"',
)


def small(batch_size=32):
    config = with_settings(recipes.get("bytes-llama"), SETTINGS)
    return dataclasses.replace(config, compute_dtype="bfloat16", batch_size=batch_size)
