"""Weights of seed 0, drawn once for each model and not by each program anew.

A compiled initialization takes longer than a step. Here each array is drawn by itself:
draws of one shape are compiled once in a process, for all models and layouts.
"""

import jax
import numpy as np

from meshpar import Model, TrainProgram

_drawn: dict[int, tuple[Model, dict[str, np.ndarray]]] = {}
_init = TrainProgram.init


def weights_of(program: TrainProgram) -> dict[str, np.ndarray] | None:
    """{path: array} of seed 0; None where the program itself has to draw them."""
    model = program.model
    # Where stages store layers in an order of their own, so does the program's model.
    if program.layer_order or model.given is not None:
        return None
    if id(model) not in _drawn:
        with jax.default_device(jax.devices()[0]):
            weights = jax.device_get(model.init(jax.random.key(0)))
        _drawn[id(model)] = model, weights
    return _drawn[id(model)][1]


def init(program: TrainProgram, seed: int = 0, params: object = None) -> object:
    """`TrainProgram.init` with the weights of `weights_of`."""
    if params is None and isinstance(seed, int) and seed == 0:
        params = weights_of(program)
    return _init(program, seed, params)
