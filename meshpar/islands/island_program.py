"""The part of a program that an island needs, as a file that a process can load.

A process that takes the place of a dead one loads the file: it makes no model, and
traces, lowers and compiles nothing.
"""

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.islands.mode import GRADIENTS, Islands
from meshpar.islands.weights_vector import WeightsVector, weights_vector
from meshpar.lowering.inspection import read_collectives
from meshpar.lowering.state import Metrics, TrainState
from meshpar.lowering.train_program import TrainProgram
from meshpar.models.model_scope import model_scope


@dataclasses.dataclass(frozen=True)
class IslandProgram:
    """The part of a program that an island needs.

    Attributes:
      run: (state, placed batch) -> (metrics, gradients) for algorithms that push
        gradients; (next state, metrics) for the others.
      place: puts a host batch onto the devices.
      abstract_batch: the batch, as ShapeDtypeStructs.
      vector: the weights as one vector.
      abstract_state: the training state as ShapeDtypeStructs with shardings.
      clip_norm: to which gradients are clipped; None if they are not.
    """

    run: Callable[[TrainState, Any], tuple[Any, Any]]
    place: Callable[[Any], Any]
    abstract_batch: Any
    vector: WeightsVector
    abstract_state: TrainState
    clip_norm: float | None

    def placed(self, leaves: Sequence[np.ndarray]) -> TrainState:
        """The training state of leaves on the host, copied to the devices."""
        like, structure = jax.tree.flatten(self.abstract_state)
        found = [
            jax.device_put(np.asarray(x).astype(leaf.dtype), leaf.sharding)
            for x, leaf in zip(leaves, like, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def zeros(self) -> Any:
        """A host batch of zeros."""
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.abstract_batch)

    def __call__(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """Runs on a host batch."""
        return self.run(state, self.place(batch))


def island_program(program: TrainProgram, mode: Islands) -> IslandProgram:
    """Makes the part that an island needs; it is compiled when it is first used."""
    return IslandProgram(
        program.gradients if mode.algorithm in GRADIENTS else program.step,
        program.place_batch,
        program.step_batch,
        weights_vector(program),
        program.abstract_state,
        program.lowering.clip_norm,
    )


def compile_island(program: TrainProgram, mode: Islands) -> IslandProgram:
    """Compiles the programs of an island, for `save`.

    Raises:
      MeshparError: it could deadlock.
    """
    island = island_program(program, mode)
    if mode.algorithm in GRADIENTS:
        run = _compiled_gradients(program, island.vector)
    else:
        run = program.compiled
    return dataclasses.replace(island, run=run, place=program.batches.place)


def _compiled_gradients(
    program: TrainProgram, vector: WeightsVector
) -> jax.stages.Compiled:
    def gradients(state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        with model_scope(program.layout, program.mesh):
            totals, grads, _ = program.lowering.gradients(state, batch)
            return totals.reported(), grads

    whole = NamedSharding(program.mesh, PartitionSpec())
    shardings = whole, {path: leaf.sharding for path, leaf in vector.like.items()}
    jitted = jax.jit(gradients, out_shardings=shardings)
    with jax.set_mesh(program.mesh):
        lowered = jitted.lower(program.abstract_state, program.abstract_batch)
        compiled = lowered.compile()
    if program.lowering.may_deadlock:
        collectives = read_collectives(compiled, program.mesh)
        program.lowering.check_compiled(collectives)
    return compiled


_NOT_SERIALIZABLE = (
    *(AttributeError, TypeError, pickle.PicklingError),  # Python: of a class.
    *(NotImplementedError, ValueError),  # jax: of a compiled program.
)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Device):
            return "device", obj.id
        if isinstance(obj, jax.stages.Compiled):
            # Structures of trees cannot be pickled; trees can.
            code, *structures = serialize_executable.serialize(obj)
            return "compiled", code, *map(_example, structures)
        return None


def _example(structure: Any) -> Any:
    return jax.tree.unflatten(structure, range(structure.num_leaves))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, devices: Sequence[jax.Device]):
        super().__init__(file)
        self._devices = list(devices)

    def persistent_load(self, pid: Any) -> Any:
        kind, value, *examples = pid
        if kind == "device":
            return next(device for device in self._devices if device.id == value)
        structures = map(jax.tree.structure, examples)
        return serialize_executable.deserialize_and_load(
            value, *structures, execution_devices=self._devices
        )


def save(program: IslandProgram, path: str) -> None:
    """Writes a result of `compile_island` to a file, at once for all readers.

    Writes none if jax or Python cannot serialize a part of it; other processes then
    compile for themselves. Nothing of it may come from jax's compilation cache, because
    XLA:CPU writes what it has read incompletely (jaxlib 0.10.2).
    """
    content = io.BytesIO()
    try:
        _Pickler(content).dump(program)
    except _NOT_SERIALIZABLE:
        return
    own = f"{path}.{os.getpid()}"
    with open(own, "wb") as file:
        file.write(content.getvalue())
    os.replace(own, path)


def load(path: str, devices: Sequence[jax.Device]) -> IslandProgram:
    """Reads what `save` wrote; the file is trusted like code.

    Args:
      path: of the file.
      devices: those of the island; their ids are the same in the process that wrote it.
    """
    with open(path, "rb") as file:
        return _Unpickler(file, devices).load()
