"""Steps of a program inside a jit or a scan of the user's own."""

from typing import Any

import jax
from jax.sharding import Mesh

from meshpar.arrays import other_leaf
from meshpar.errors import MeshparError
from meshpar.jaxprs.walk import Written
from meshpar.mesh.order import after
from meshpar.mesh.platform import platform_of


def is_traced(tree: Any) -> bool:
    """Whether a tree has values of a trace: of a jit or scan around the caller."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def not_in_trace(why: str) -> str:
    """The error of a function that a user's own program cannot hold."""
    return (
        f"{why}, so it is no part of a program of your own: call it outside of "
        "jax.jit, jax.lax.scan and the like"
    )


def step_in_trace(
    traced: jax.stages.Traced, mesh: Mesh, wanted: tuple, state: Any, batch: Any
) -> tuple[Any, Any]:
    """(next state, metrics) of a step inside the trace of a user's program.

    Nothing is traced anew, so that it has the collectives that are declared.

    Args:
      traced: the one trace of the step.
      mesh: the device mesh.
      wanted: (state, batch) as ShapeDtypeStructs with shardings.
      state: the state.
      batch: the batch.

    Raises:
      MeshparError: state or batch are others than the program's.
    """
    arguments = _sharded((state, batch), wanted)
    outputs = Written(traced.jaxpr, traced.out_info)(*arguments)
    state, metrics = _sharded(outputs[0], wanted[0]), outputs[1]
    if platform_of(mesh).mixes_collectives:
        # Another step in the same program would not wait for these collectives.
        state = state._replace(params=after(metrics, state.params))
    return state, metrics


def _sharded(tree: Any, like: Any) -> Any:
    """Values of a trace, sharded as a program has them.

    Raises:
      MeshparError: they are others.
    """
    if found := other_leaf(tree, like):
        path, given, wanted = found
        raise MeshparError(
            f"(state, batch){path} is {given} inside your jit, and the program was "
            f"lowered for {wanted}"
        )

    def constrain(x: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, leaf.sharding)

    return jax.tree.map(constrain, tree, like)
