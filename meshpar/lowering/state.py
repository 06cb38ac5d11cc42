"""The training state, and the dtype in which a step computes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array, Params, to_device
from meshpar.errors import MeshparError
from meshpar.layouts.plan import Plan
from meshpar.lowering.in_trace import is_traced
from meshpar.models.model import STEP

Metrics = dict[str, Array]
"""Scalars by name."""


class TrainState(NamedTuple):
    """All that training carries from step to step.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar; dropout keys follow from seed and step.
      params: {path: array}, the master weights.
      optimizer_state: the optax state.
    """

    step: Array
    seed: Array
    params: Params
    optimizer_state: Any

    def after_step(self, params: Params, optimizer_state: Any) -> "TrainState":
        """The state after a step that gave these variables."""
        step = self.step + 1
        if STEP in params:
            params = {**params, STEP: step}
        return TrainState(step, self.seed, params, optimizer_state)

    def with_params(self, params: Params) -> "TrainState":
        """This state with other variables, and its own step and optimizer state.

        Two programs train one set of variables in turn so. The next step donates the
        variables, so that the state they come from needs new ones before its next step.

        Args:
          params: the `params` of a state of the same model under the same layout.

        Raises:
          MeshparError: they are not the variables of the same model.
        """
        for path in {**self.params, **params}:
            own, new = (
                f"{x.dtype}{list(x.shape)}" if x is not None else "missing"
                for x in (self.params.get(path), params.get(path))
            )
            if own != new:
                raise MeshparError(
                    f"{path} is {new} in the given variables and {own} in the state; "
                    "give the params of a state of the same model"
                )
        if STEP in params:
            params = {**params, STEP: jnp.copy(self.step)}
        return self._replace(params=params)

    def key(self) -> Array:
        """The random key of this step."""
        return jax.random.fold_in(
            jax.random.key(self.seed, impl="threefry2x32"), self.step
        )


def check_alive(state: Any) -> None:
    """Checks that no step has taken the memory of a state.

    Compiled programs read freed memory without a check of their own (jax 0.10).

    Raises:
      MeshparError: a step has.
    """
    arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    if any(not is_traced(x) and x.is_deleted() for x in arrays):
        raise MeshparError(
            "this state was given to a step before, which took its memory for the next "
            "one: go on with the state that the step returned, or keep a copy "
            "(jax.tree.map(jnp.copy, state)) before you call it"
        )


def cast_params(params: Params, plan: Plan) -> Params:
    """Parameters in the dtype in which the loss computes with them."""
    return {path: x.astype(plan.weights[path].dtype) for path, x in params.items()}


def fetched_params(params: Params, plan: Plan) -> Params:
    """`cast_params` of the whole model on the device, also from host memory.

    Parameters come from host memory layer by layer, so that the device holds one layer
    of them in their own dtype.
    """
    if not (moved := plan.paths_on_host):
        return cast_params(params, plan)
    rest = cast_params({p: x for p, x in params.items() if p not in moved}, plan)
    stack = {path: params[path] for path in moved}
    return rest | jax.lax.map(lambda row: cast_params(to_device(row), plan), stack)


def abstract_state(
    params: Any, optimizer_state: Any, plan: Plan, mesh: Mesh
) -> TrainState:
    """The training state as ShapeDtypeStructs with shardings."""

    def sharded(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves, structure = jax.tree.flatten(optimizer_state)
    shardings = [leaf.sharding(mesh) for leaf in plan.optimizer]
    whole = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        sharded(jax.ShapeDtypeStruct((), jnp.int32), whole),
        sharded(jax.ShapeDtypeStruct((), jnp.uint32), whole),
        {
            path: sharded(leaf, plan.parameters[path].sharding(mesh))
            for path, leaf in params.items()
        },
        structure.unflatten(map(sharded, leaves, shardings)),
    )
