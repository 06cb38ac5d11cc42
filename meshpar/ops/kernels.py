"""Kernels that no compiler can partition (Pallas, cuDNN), run on each device's shard.

Under the jit lowering such a kernel would see a global array, under the shard_map
lowering an array that the compiler still splits over `tensor`. `on_shards` makes the
remaining axes manual around the kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from meshpar.arrays import Array, vary
from meshpar.layouts.scope import activation_spec, constrain, current_scope

Names = Sequence[str | None]
"""Names of the dims of an array; None for a dim without a rule."""


def on_shards(
    kernel: Callable[..., Array],
    names: Names,
    *arrays: Array,
    others: Sequence[tuple[Array, Names]] = (),
) -> Array:
    """Runs a kernel on the shards of arrays under the layout in use.

    The forward pass keeps only the arguments; the backward pass runs the kernel again
    and differentiates it as a whole.

    Args:
      kernel: differentiable function of arrays to one array, all with the same dim
        names; it gets shards and returns a shard.
      names: dim names of every array and of the result.
      *arrays: the arguments.
      others: (array, its dim names) of more arguments, which have no gradients.

    Returns:
      The global result, or its shard over the axes that were manual before.

    Raises:
      LayoutError: a wrong number of names, a name without a rule, a dim that does not
        divide, or an axis that two dims ask for.
    """
    scope = current_scope()
    more = [x for x, _ in others]
    if scope is None:
        return kernel(*arrays, *more)
    arrays = tuple(constrain(x, *names) for x in arrays)
    axes = set(scope.mesh.axis_names) - scope.manual_axes
    if not axes:
        return kernel(*arrays, *more)
    spec = activation_spec(scope, arrays[0].shape, names)
    more_specs = [activation_spec(scope, x.shape, names) for x, names in others]
    num, manual_axes = len(arrays), scope.manual_axes

    def mapped(fn: Callable, num: int, out_specs: Any) -> Callable:
        # Kernels do not type the axes over which their results vary; `vary` does.
        return jax.shard_map(
            _untyped(fn),
            mesh=None if manual_axes else scope.mesh,
            in_specs=(*[spec] * num, *more_specs),
            out_specs=out_specs,
            axis_names=axes,
            check_vma=False,
        )

    @jax.custom_vjp
    def run(*arrays: Array) -> Array:
        return vary(mapped(kernel, num, spec)(*arrays), tuple(manual_axes))

    def forward(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        return run(*arrays), arrays

    def backward(arrays: tuple[Array, ...], gradient: Array) -> tuple[Any, ...]:
        def transposed(gradient: Array, *arrays: Array) -> tuple[Array, ...]:
            of_arrays = functools.partial(_with_last, kernel, arrays[num:])
            return jax.vjp(of_arrays, *arrays[:num])[1](gradient)

        gradients = mapped(transposed, num + 1, (spec,) * num)(gradient, *arrays)
        gradients = (vary(x, tuple(manual_axes)) for x in gradients)
        return *gradients, *[None] * len(more)

    run.defvjp(forward, backward)
    return run(*arrays, *more)


def _with_last(kernel: Callable, last: Sequence[Array], *first: Array) -> Array:
    return kernel(*first, *last)


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
