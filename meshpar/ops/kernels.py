"""Kernels that no compiler can partition (Pallas, cuDNN), run on each device's shard.

Under the jit lowering such a kernel would see a global array, under the shard_map
lowering an array that the compiler still splits over `tensor`. `on_shards` makes the
remaining axes manual around the kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from meshpar.arrays import Array
from meshpar.collectives.varying import vary
from meshpar.layouts.scope import activation_spec, constrain, current_scope


def on_shards(
    kernel: Callable[..., Array], names: Sequence[str | None], *arrays: Array
) -> Array:
    """Runs a kernel on the shards of arrays under the layout in use.

    The forward pass keeps only the arguments; the backward pass runs the kernel again
    and differentiates it as a whole.

    Args:
      kernel: differentiable function of arrays to one array, all with the same dim
        names; it gets shards and returns a shard.
      names: dim names of every array and of the result.
      *arrays: the arguments.

    Returns:
      The global result, or its shard over the axes that were manual before.

    Raises:
      LayoutError: a wrong number of names, a name without a rule, a dim that does not
        divide, or an axis that two dims ask for.
    """
    scope = current_scope()
    if scope is None:
        return kernel(*arrays)
    arrays = tuple(constrain(x, *names) for x in arrays)
    axes = set(scope.mesh.axis_names) - scope.manual_axes
    if not axes:
        return kernel(*arrays)
    spec = activation_spec(scope, arrays[0].shape, names)
    manual_axes = scope.manual_axes

    def mapped(fn: Callable) -> Callable:
        # Kernels do not type the axes over which their results vary; `vary` does.
        return jax.shard_map(
            _untyped(fn),
            mesh=None if manual_axes else scope.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=axes,
            check_vma=False,
        )

    @jax.custom_vjp
    def run(*arrays: Array) -> Array:
        return vary(mapped(kernel)(*arrays), tuple(manual_axes))

    def forward(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        return run(*arrays), arrays

    def backward(arrays: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
        def transposed(gradient: Array, *arrays: Array) -> tuple[Array, ...]:
            return jax.vjp(kernel, *arrays)[1](gradient)

        gradients = mapped(transposed)(gradient, *arrays)
        return tuple(vary(x, tuple(manual_axes)) for x in gradients)

    run.defvjp(forward, backward)
    return run(*arrays)


def _untyped(fn: Callable) -> Callable:
    """The function traced on arrays whose types have no varying axes.

    The derivatives inside a traced kernel would fail their checks of such types.
    """

    def call(*arrays: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
        return jax.tree.unflatten(
            jax.tree.structure(out), jaxpr_as_fun(closed)(*arrays)
        )

    return call
