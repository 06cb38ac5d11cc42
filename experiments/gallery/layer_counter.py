"""Counts the layers that a program really runs, by callbacks."""

import dataclasses
import threading
from typing import Any

import jax

import meshpar


class LayerCounter:
    """Counts the layers that a program really runs, by a callback in each layer."""

    def __init__(self):
        self._lock, self._count = threading.Lock(), 0

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def take(self) -> int:
        """The count since the last call."""
        jax.effects_barrier()
        with self._lock:
            count, self._count = self._count, 0
        return count

    def counted(self, model: meshpar.Model) -> meshpar.Model:
        """The model, whose layers report that they run in training."""
        layered = model.layered

        def layer(params: Any, x: Any, key: Any, context: Any) -> Any:
            jax.debug.callback(self.add)
            return layered.layer(params, x, key, context)

        layered_counted = dataclasses.replace(layered, layer=layer)
        return dataclasses.replace(
            model, layered=layered_counted, loss=layered_counted.loss
        )
