"""When weights are gathered and gradients reduced, told to compilers by dependencies.

A dependency is a 0 that is computed from what comes first and added to what comes
later: compilers drop barriers before they schedule.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, is_number, zero_after
from meshpar.fsdp.sharding import ManualSharding


def after(first: Params, shardings: Mapping[str, ManualSharding], later: Any) -> Any:
    """The numbers of a tree, which then cannot be computed before some tensors.

    Args:
      first: {path: tensor, whole or a shard}; call inside shard_map.
      shardings: {path: how manual axes split it, and automatic ones}; these split no
        tensor that has none.
      later: any tree of arrays. No gradient passes from it to `first`.
    """
    zero = _zero_after(lax.stop_gradient(first), shardings)

    def wait(x: Array) -> Array:
        return x + zero.astype(x.dtype) if is_number(x) else x

    return jax.tree.map(wait, later)


def _zero_after(
    tensors: Params, shardings: Mapping[str, ManualSharding]
) -> float | Array:
    """A 0 that comes after all of these; every device reads what it holds."""

    def zero(tensors: Params) -> Array:
        numbers = filter(is_number, tensors.values())
        total = sum(map(zero_after, numbers), jnp.float32(0))
        return jnp.nan_to_num(total)

    specs = {
        path: shardings[path].automatic if path in shardings else PartitionSpec()
        for path in tensors
    }
    if not any(map(any, specs.values())):
        return zero(tensors)
    mesh = jax.sharding.get_abstract_mesh()
    # All devices have the same 0: nothing has to be checked, nor to move.
    return jax.shard_map(
        zero,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(tensors)


def gather_with(
    gather: Callable[[Params], Params], reduce: Callable[[Params], Params]
) -> Callable[[Params], Params]:
    """Makes a function leaves -> whole weights whose gradient is `reduce`.

    The leaves get the gradient of the whole weights even if `gather` returns weights
    that were gathered before (ZeRO-2).

    Args:
      gather: leaves -> whole weights.
      reduce: gradient of the whole weights -> gradient of the leaves.
    """

    @jax.custom_vjp
    def whole(leaves: Params) -> Params:
        return gather(leaves)

    whole.defvjp(lambda leaves: (gather(leaves), None), lambda _, g: (reduce(g),))
    return whole


def gather_beside(
    gather: Callable[[Params], Params],
    reduce: Callable[[Params], Params],
    shardings: Mapping[str, ManualSharding],
) -> Callable[[Any, Params], tuple[Any, Params]]:
    """Makes a function (x, leaves) -> (x, whole weights) that orders its gradients.

    The gradient of x waits until those of the leaves are reduced; otherwise as
    `gather_with`.

    Args:
      gather: leaves -> whole weights.
      reduce: gradient of the whole weights -> gradient of the leaves.
      shardings: {path of a leaf: how axes split it}.
    """

    def backward(_: None, gradients: tuple[Any, Params]) -> tuple[Any, Params]:
        grads = reduce(gradients[1])
        return after(grads, shardings, gradients[0]), grads

    @jax.custom_vjp
    def run(x: Any, leaves: Params) -> tuple[Any, Params]:
        return x, gather(leaves)

    run.defvjp(lambda x, leaves: ((x, gather(leaves)), None), backward)
    return run
