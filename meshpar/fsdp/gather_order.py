"""When weights are gathered and gradients reduced: derivatives that order the two."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshpar.arrays import Params
from meshpar.fsdp.sharding import ManualSharding, automatic_specs
from meshpar.mesh.order import after


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
        return after(grads, gradients[0], automatic_specs(shardings)), grads

    @jax.custom_vjp
    def run(x: Any, leaves: Params) -> tuple[Any, Params]:
        return x, gather(leaves)

    run.defvjp(lambda x, leaves: ((x, gather(leaves)), None), backward)
    return run
