"""Kernels that no compiler can partition (Pallas, cuDNN), run on each device's shard.

Under the jit lowering such a kernel would see a global array, under the shard_map
lowering an array that the compiler still splits over `tensor`. `on_shards` makes the
remaining axes manual around the kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary
from meshpar.jaxprs.walk import written
from meshpar.layouts.scope import Scope, activation_spec, constrain, current_scope

Names = Sequence[str | None]
"""Names of the dims of an array; None for a dim without a rule."""


class Packed(NamedTuple):
    """A form of an array in which it takes less memory.

    Attributes:
      pack: brings an array into this form.
      unpack: its inverse.
      names: dim names of the form.
    """

    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]
    names: Names


def on_shards(
    kernel: Callable[..., Array],
    names: Names,
    *arrays: Array,
    others: Sequence[tuple[Array, Names]] = (),
    saves: str = "",
    packed: Packed | None = None,
    derivative: Callable[[Callable], Callable] = lambda fn: fn,
) -> Array:
    """Runs a kernel on the shards of arrays under the layout in use.

    Args:
      kernel: differentiable function of arrays to one array, all with the same dim
        names; it gets shards and returns a shard.
      names: dim names of every array and of the result.
      *arrays: the arguments.
      others: (array, its dim names) of more arguments, which have no gradients.
      saves: a name for the result and for what the kernel's own derivative saves, by
        which a policy of rematerialization keeps them; the forward pass saves both. By
        default it saves only the arguments: the backward pass runs the kernel again and
        differentiates it as a whole.
      packed: the form in which the result is saved, if not as it is.
      derivative: changes how the kernel's own derivative runs, which is a function of
        the gradient of the result.

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
    if not axes and not saves:
        return kernel(*arrays, *more)
    spec = activation_spec(scope, arrays[0].shape, names)
    specs = (
        *[spec] * len(arrays),
        *(activation_spec(scope, x.shape, names) for x, names in others),
    )
    mapped = functools.partial(_mapped, scope, frozenset(axes))
    # What a kernel saves has a row for each device.
    rows = PartitionSpec(tuple(axis for axis in scope.mesh.axis_names if axis in axes))
    vjp = _KernelVjp(kernel, len(arrays), len(specs), bool(saves), derivative)

    pack = unpack = lambda x: x
    if packed:  # On shards too: compilers move arrays whose dims are merged.
        shape = jax.eval_shape(packed.pack, arrays[0]).shape
        small_spec = activation_spec(scope, shape, packed.names)
        pack = mapped(packed.pack, (spec,), small_spec)
        unpack = mapped(packed.unpack, (small_spec,), spec)

    def named(x: Array) -> Array:
        # Integers are tables of the kernel, which cost nothing to make again.
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return checkpoint_name(x, saves) if is_float else x

    @jax.custom_vjp
    def run(*arrays: Array) -> Array:
        y = mapped(kernel, specs, spec)(*arrays)
        return named(y) if saves else y

    def forward(*arrays: Array) -> tuple[Array, tuple]:
        if not saves:
            return run(*arrays), (arrays, [])
        y, saved = mapped(vjp.forward, specs, (spec, rows))(*arrays)
        small = named(pack(y))
        # What reads the result reads what is saved, so that it is saved once.
        kept = tuple((*arrays, small)[i] for i in vjp.kept)
        return unpack(small), (kept, jax.tree.map(named, saved))

    def backward(residuals: tuple, gradient: Array) -> tuple[Any, ...]:
        kept, saved = residuals
        kept = [
            unpack(x) if i == len(specs) else x
            for i, x in zip(vjp.kept, kept, strict=True)
        ]
        in_specs = spec, *((*specs, spec)[i] for i in vjp.kept), *[rows] * len(saved)
        run_backward = mapped(vjp.backward, in_specs, (spec,) * vjp.num)
        gradients = run_backward(gradient, *kept, *saved)
        return *gradients, *[None] * len(more)

    run.defvjp(forward, backward)
    return run(*arrays, *more)


def _mapped(
    scope: Scope, axes: frozenset[str], fn: Callable, in_specs: Any, out_specs: Any
) -> Callable:
    """A function on the shards of each device over axes that are automatic so far."""
    if not axes:
        return fn
    # Kernels do not type the axes over which their results vary; `vary` does.
    local = jax.shard_map(
        _untyped(fn),
        mesh=None if scope.manual_axes else scope.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )
    manual = tuple(scope.manual_axes)
    return lambda *args: jax.tree.map(lambda x: vary(x, manual), local(*args))


class _KernelVjp:
    """The derivative of a kernel on one device, in two parts.

    Args:
      kernel: the kernel.
      num: number of its first arguments, which have gradients.
      total: number of all its arguments.
      saves: whether `forward` returns what `backward` needs beside arguments.
      derivative: as in `on_shards`.

    Attributes:
      kept: numbers of the arguments that `backward` needs, and the next number if it
        needs the result.
    """

    def __init__(
        self,
        kernel: Callable[..., Array],
        num: int,
        total: int,
        saves: bool,
        derivative: Callable[[Callable], Callable],
    ):
        self.num, self.kept = num, tuple(range(total))
        self._kernel, self._saves, self._derivative = kernel, saves, derivative
        self._structure, self._places = None, ()

    def _vjp(self, arrays: Sequence[Array]) -> tuple[Array, Callable]:
        of_arrays = functools.partial(_with_last, self._kernel, arrays[self.num :])
        return jax.vjp(of_arrays, *arrays[: self.num])

    def forward(self, *arrays: Array) -> tuple[Array, list[Array]]:
        """The result, and residuals for `backward`, each with a dim of 1 in front."""
        y, pull = self._vjp(arrays)
        leaves, self._structure = jax.tree.flatten(pull)
        known = *arrays, y
        self._places = tuple(
            next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves
        )
        self.kept = tuple(sorted({i for i in self._places if i is not None}))
        pairs = zip(leaves, self._places, strict=True)
        return y, [x[None] for x, place in pairs if place is None]

    def backward(self, gradient: Array, *needed: Array) -> tuple[Array, ...]:
        """Gradients of the first arguments, from the kept and the saved values."""
        if not self._saves:
            return self._derivative(self._vjp(needed)[1])(gradient)
        kept = dict(zip(self.kept, needed, strict=False))
        saved = iter(needed[len(kept) :])
        leaves = [
            next(saved)[0] if place is None else kept[place] for place in self._places
        ]
        return self._derivative(jax.tree.unflatten(self._structure, leaves))(gradient)


def _with_last(kernel: Callable, last: Sequence[Array], *first: Array) -> Array:
    return kernel(*first, *last)


def _untyped(fn: Callable) -> Callable:
    """The function traced on arrays whose types have no varying axes.

    The derivatives inside a traced kernel would fail their checks of such types.
    """

    def call(*arrays: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        return written(fn, *shapes)(*arrays)

    return call
