"""Jaxprs with every call inlined: what reads what, and evaluating a part of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from meshpar import compat
from meshpar.arrays import Array


def read(env: dict, atom: Any) -> Any:
    """The value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def _inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with every call in it inlined."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [read(env, atom) for atom in eqn.invars]
        if eqn.primitive.name in compat.CALLS:
            outputs = _inlined(*compat.called_jaxpr(eqn), values)
        else:
            outputs = compat.bind(eqn, values)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def without_calls(fn: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """(closed jaxpr of fn(*inputs) with every call inlined, fn's result tree)."""
    whole, result = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    closed = jax.make_jaxpr(lambda *a: _inlined(whole.jaxpr, whole.consts, a))(*inputs)
    return closed, result


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among atoms, without literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def needed(
    jaxpr: Any, outputs: Sequence[Any], done: frozenset[int] = frozenset()
) -> list[int]:
    """Numbers of the equations that outputs need, in order, but for those done."""
    live, numbers = set(variables(outputs)), []
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if number in done or not live.intersection(eqn.outvars):
            continue
        numbers.append(number)
        live.update(variables(eqn.invars))
    return numbers[::-1]


def used_inputs(fn: Callable[..., Any], params: dict[str, Any], *args: Any) -> set[str]:
    """Keys of `params` that fn(params, *args) reads for its result.

    Args:
      fn: any function of pytrees.
      params: {key: array or ShapeDtypeStruct}.
      *args: pytrees of arrays or ShapeDtypeStructs; only shapes matter.
    """
    paths, (leaves, tree) = list(params), jax.tree.flatten(args)

    def flat(*inputs: Array) -> list[Array]:
        params = dict(zip(paths, inputs, strict=False))
        args = jax.tree.unflatten(tree, inputs[len(params) :])
        return jax.tree.leaves(fn(params, *args))

    closed, _ = without_calls(flat, (*params.values(), *leaves))
    jaxpr = closed.jaxpr
    live = set(variables(jaxpr.outvars))
    for number in needed(jaxpr, jaxpr.outvars):
        live.update(variables(jaxpr.eqns[number].invars))
    return {path for path, v in zip(paths, jaxpr.invars, strict=False) if v in live}
