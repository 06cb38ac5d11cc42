"""Runs an update where devices hold values of their own, without conditionals.

Inside shard_map the branches of `lax.cond` have to agree on the manual axes along which
their results differ, and optax does not see to that. Here all branches run, and the
results of one are selected.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from meshpar import compat
from meshpar.arrays import vary


def without_branches(fn: Callable, axes: tuple[str, ...], *args: Any) -> Any:
    """fn(*args), in which every value is marked as differing over manual axes.

    Args:
      fn: a pure function of pytrees of arrays.
      axes: the manual axes.
      *args: its arguments.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
    results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), axes)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], axes: tuple[str, ...]
) -> list[Any]:
    """The results of a jaxpr."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        value = atom.val if isinstance(atom, Literal) else values[atom]
        return vary(jnp.asarray(value), axes)

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        if eqn.primitive.name == "cond":
            outputs = _select(eqn.params["branches"], *inputs, axes=axes)
        elif eqn.primitive.name == "scan":
            outputs = _scan(eqn, inputs, axes)
        elif eqn.primitive.name in compat.CALLS:
            outputs = _run(*compat.called_jaxpr(eqn), inputs, axes)
        else:
            outputs = compat.bind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _select(
    branches: Sequence[Any], index: Any, *args: Any, axes: tuple[str, ...]
) -> list[Any]:
    """The results of the branch with a number."""
    results = [_run(branch.jaxpr, branch.consts, args, axes) for branch in branches]
    if len(branches) == 2:
        index = index.astype(bool)
    return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]


def _scan(eqn: Any, inputs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """The results of a scan, whose body is marked as well."""
    body, settings = eqn.params["jaxpr"], eqn.params

    def num_scanned(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(x.aval.ndim > y.aval.ndim for x, y in pairs)

    num_xs = num_scanned(eqn.invars, body.jaxpr.invars)
    num_ys = num_scanned(eqn.outvars, body.jaxpr.outvars)
    num_carry = len(eqn.outvars) - num_ys
    xs_start = len(inputs) - num_xs
    carry_start = xs_start - num_carry

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        args = [*inputs[:carry_start], *carry, *xs]
        results = _run(body.jaxpr, body.consts, args, axes)
        return results[:num_carry], results[num_carry:]

    carry, ys = lax.scan(
        step,
        inputs[carry_start:xs_start],
        inputs[xs_start:],
        length=settings["length"],
        reverse=settings["reverse"],
        unroll=settings["unroll"],
    )
    return [*carry, *ys]
