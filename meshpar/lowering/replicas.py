"""Conversion of a training state to another number of replicas, through the average."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.lowering.state import TrainState


def with_replicas(
    state: TrainState, num_replicas: int, new_num_replicas: int, axis: str | None = None
) -> TrainState:
    """The abstract state with another number of replicas.

    Weights and optimizer state have a leading dim of replicas, unless there is 1.

    Args:
      state: ShapeDtypeStructs with shardings.
      num_replicas: replicas of `state`.
      new_num_replicas: replicas of the result.
      axis: mesh axis that splits the replicas; None holds all of them on every device.
    """

    def convert(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, spec = leaf.shape, leaf.sharding.spec
        if num_replicas > 1:
            shape, spec = shape[1:], spec[1:]
        if new_num_replicas > 1:
            shape, spec = (new_num_replicas, *shape), (axis, *spec)
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
        return leaf.update(shape=shape, sharding=sharding)

    return _map_replicated(convert, state)


def replica_average(x: jax.Array) -> jax.Array:
    """[R, ...] -> [...], the mean of floating-point numbers, the first row of others.

    Integers are counters and constants, which all replicas have alike.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.mean(axis=0).astype(x.dtype)
    return x[0]


def converted(
    state: TrainState,
    num_replicas: int,
    abstract_state: TrainState,
    new_num_replicas: int,
) -> TrainState:
    """The average of a state's replicas, repeated for each new replica.

    Integers, such as the optimizer's counters, are those of the first replica.

    Args:
      state: arrays shaped as `with_replicas` describes.
      num_replicas: replicas of `state`.
      abstract_state: the result's shapes, dtypes and shardings.
      new_num_replicas: replicas of the result.
    """

    def convert(x: jax.Array) -> jax.Array:
        if num_replicas > 1:
            x = replica_average(x)
        if new_num_replicas > 1:
            x = jnp.broadcast_to(x, (new_num_replicas, *x.shape))
        return x

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    program = jax.jit(
        lambda state: _map_replicated(convert, state), out_shardings=shardings
    )
    return program(state)


def _map_replicated(function: Callable, state: TrainState) -> TrainState:
    """Maps the leaves that each replica has of its own."""
    params, optimizer_state = jax.tree.map(
        function, (state.params, state.optimizer_state)
    )
    return state._replace(params=params, optimizer_state=optimizer_state)
