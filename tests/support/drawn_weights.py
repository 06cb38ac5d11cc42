"""Weights of seed 0, drawn once for each model and not by each program anew.

A compiled initialization takes longer than a step. Here each array is drawn by itself:
draws of one shape are compiled once in a process, for all models and layouts. Tests of
some folders prove that programs draw the same weights: there each draws its own, as in
all processes that tests start.
"""

import os

import jax
import numpy as np

from meshpar import Model, TrainProgram

DRAW_THEIR_OWN = "tests/examples/", "tests/experiments/", "tests/explain/"

_drawn: dict[int, tuple[Model, dict[str, np.ndarray]]] = {}
_init = TrainProgram.init


def weights_of(program: TrainProgram) -> dict[str, np.ndarray] | None:
    """{path: array} of seed 0; None for a model that has weights of its own."""
    model, order = program.model, program.layer_order
    if model.given is not None:
        return None
    if id(model) not in _drawn:
        with jax.default_device(jax.devices()[0]):
            weights = model.init(jax.random.key(0))
            weights = order.in_model_order(weights) if order else weights
        _drawn[id(model)] = model, jax.device_get(weights)
    return _drawn[id(model)][1]


def init(program: TrainProgram, seed: int = 0, params: object = None) -> object:
    """`TrainProgram.init`, for seed 0 with the weights of `weights_of`."""
    own = os.environ.get("PYTEST_CURRENT_TEST", "").startswith(DRAW_THEIR_OWN)
    if params is None and isinstance(seed, int) and seed == 0 and not own:
        params = weights_of(program)
    return _init(program, seed, params)
