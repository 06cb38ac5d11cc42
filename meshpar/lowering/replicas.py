"""Training states of R replicas as states of another number: through their average."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.lowering.state import TrainState


def with_replicas(
    state: TrainState, ours: int, theirs: int, axis: str | None = None
) -> TrainState:
    """The abstract state of another number of replicas.

    Args:
      state: ShapeDtypeStructs with shardings; weights and optimizer state have `ours`
        replicas in front, unless that is 1.
      ours: replicas of `state`.
      theirs: replicas of the result.
      axis: mesh axis that holds them; None keeps all of them on every device.
    """

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, spec = leaf.shape, leaf.sharding.spec
        if ours > 1:
            shape, spec = shape[1:], spec[1:]
        if theirs > 1:
            shape, spec = (theirs, *shape), (axis, *spec)
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
        return leaf.update(shape=shape, sharding=sharding)

    apart = state.params, state.optimizer_state
    return state._replace(**_named(jax.tree.map(one, apart)))


def _named(apart: tuple[Any, Any]) -> dict[str, Any]:
    return dict(zip(("params", "optimizer_state"), apart, strict=True))


def converted(
    state: TrainState, theirs: int, like: TrainState, ours: int
) -> TrainState:
    """The average of `theirs` replicas, once for each of `ours`.

    Counters of the optimizer are those of the first replica.

    Args:
      state: arrays shaped as `with_replicas` says.
      theirs: replicas of `state`.
      like: the abstract state to make.
      ours: replicas of `like`.
    """

    def one(x: jax.Array) -> jax.Array:
        if theirs > 1:
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            x = x.mean(axis=0).astype(x.dtype) if floating else x[0]
        return jnp.broadcast_to(x, (ours, *x.shape)) if ours > 1 else x

    def all_of_it(state: TrainState) -> TrainState:
        apart = state.params, state.optimizer_state
        return state._replace(**_named(jax.tree.map(one, apart)))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(all_of_it, out_shardings=shardings)(state)
