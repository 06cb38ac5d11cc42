"""Collectives of a traced function that run more than once: in loops, or again.

Functions of `ops` note a move where a model calls them. A loop around the call, or
`jax.checkpoint`, runs it more often.
"""

from collections.abc import Iterator
from typing import Any

from meshpar import compat

_COLLECTIVES = "psum", "pmax", "pmin", "all_gather", "reduce_scatter", "ppermute"
"""How the names of their primitives begin."""

_REMAT = frozenset(("remat", "remat2", "checkpoint"))


def repeated(jaxpr: Any) -> dict[tuple[str, ...], int]:
    """{mesh axes: bytes that one device sends at most} beyond one run of each.

    Args:
      jaxpr: of a function that will be differentiated.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for eqn, times in _collectives(jaxpr, 1):
        # An all_reduce sends its bytes twice.
        size = 2 * sum(out.aval.size * out.aval.dtype.itemsize for out in eqn.outvars)
        if times > 1 and (axes := _axes(eqn)):
            sizes[axes] = sizes.get(axes, 0) + (times - 1) * size
    return sizes


def _collectives(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """(equation of a collective, how often it runs)."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith(_COLLECTIVES):
            yield eqn, times
        runs = eqn.params["length"] if name == "scan" else 1 + (name in _REMAT)
        for inner in compat.inner_jaxprs(eqn):
            yield from _collectives(inner, times * runs)


def _axes(eqn: Any) -> tuple[str, ...]:
    """Names of the mesh axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))
