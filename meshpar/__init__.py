"""meshpar: train Flax models under parallel layouts with JAX SPMD."""

import importlib
import warnings
from typing import Any

from meshpar.checker import check
from meshpar.compose import lower
from meshpar.errors import LayoutError, MeshparError
from meshpar.explain.user_loop import verify
from meshpar.generation import generator
from meshpar.islands import Islands
from meshpar.layouts import Layout
from meshpar.local_sgd import LocalSGD
from meshpar.lowering.ema import with_ema
from meshpar.lowering.train_program import TrainProgram
from meshpar.mesh import simulate
from meshpar.models import LayerStack, Model, from_linen, from_nnx
from meshpar.planner import plan
from meshpar.replicated import Replicated

_ROOMS = (
    *("checkpoint", "collectives", "explain", "generation", "islands", "layouts"),
    *("local_sgd", "mesh", "metrics", "ops", "schedules"),
)
"""Modules that are imported when they are first used."""

_OF_RUNS = {"Run": "run", "train": "train"}
"""{name: module of `meshpar.runs`}, imported when it is first used."""

_MOVED = {
    **dict.fromkeys(("CachedModel", "Generator", "Sampling"), "generation"),
    **dict.fromkeys(("linen_cache", "nnx_cache"), "generation"),
    **dict.fromkeys(("Elastic", "Gossip", "Lerp", "Overwrite"), "local_sgd"),
    **dict.fromkeys(("Shift", "warm_up"), "local_sgd"),
    **dict.fromkeys(("Last", "Max", "Mean", "MetricSums", "Sum"), "metrics"),
    **dict.fromkeys(("Param", "Plan"), "layouts"),
    **dict.fromkeys(("tensor_parallel", "vocabulary"), "ops"),
    "Plans": "planner",
    "RowTable": "methods.row_table",
    "StalenessError": "errors",
    "TrainState": "lowering.state",
    "make_mesh": "mesh",
}
"""{former name here: the module that has it}, until the next version."""

_RENAMED = {"Stages": "LayerStack"}
"""{former name: name}, until the next version."""

__all__ = [
    "Islands",
    "LayerStack",
    "Layout",
    "LayoutError",
    "LocalSGD",
    "MeshparError",
    "Model",
    "Replicated",
    "TrainProgram",
    "check",
    "from_linen",
    "from_nnx",
    "generator",
    "lower",
    "plan",
    "simulate",
    "verify",
    "with_ema",
    *_OF_RUNS,
    *_ROOMS,
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"meshpar.{name}")
    if name in _OF_RUNS:
        return getattr(importlib.import_module(f"meshpar.runs.{_OF_RUNS[name]}"), name)
    if name in _MOVED:
        module = f"meshpar.{_MOVED[name]}"
        found = getattr(importlib.import_module(module), name)
        new = f"{module}.{name}"
    elif name in _RENAMED:
        found, new = globals()[_RENAMED[name]], f"meshpar.{_RENAMED[name]}"
    else:
        raise AttributeError(f"module 'meshpar' has no attribute {name!r}")
    warnings.warn(
        f"meshpar.{name} is now {new}, and goes with the next version",
        DeprecationWarning,
        stacklevel=2,
    )
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
