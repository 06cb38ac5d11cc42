"""Equations of a jaxpr that need whole matrices, such as matmuls and factorizations."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.jaxprs.flops import equation_flops
from meshpar.jaxprs.walk import equations, inner_jaxprs

_WHOLE = frozenset(
    "cholesky custom_linear_solve dot_general eig eigh hessenberg householder_product "
    "lu lu_pivots_to_permutation qr ragged_dot_general schur svd triangular_solve "
    "tridiagonal_solve".split()
)
"""Primitives whose results depend on whole matrices."""


def matmul_flops(eqn: Any) -> float:
    """FLOPs of the matmuls of an equation, in loops as often as they run."""
    inner = sum(matmul_flops(e) for body in inner_jaxprs(eqn) for e in body.eqns)
    return equation_flops(eqn) + eqn.params.get("length", 1) * inner


def needs_whole(eqn: Any) -> bool:
    """Whether an equation, or one inside it, needs whole matrices."""
    return any(e.primitive.name in _WHOLE for e in _with_inner(eqn))


def num_matrices(eqn: Any) -> int:
    """The most matrices of one tensor that an equation, or one inside it, reads."""
    return max(math.prod(_batch(e)) for e in _with_inner(eqn))


def _batch(eqn: Any) -> Sequence[int]:
    """Sizes of the dims over which an equation does the same with many matrices."""
    shape = eqn.invars[0].aval.shape if eqn.invars else ()
    if eqn.primitive.name == "dot_general":
        _, (dims, _) = eqn.params["dimension_numbers"]
        return [shape[dim] for dim in dims]
    return shape[:-2] if eqn.primitive.name in _WHOLE else ()


def _with_inner(eqn: Any) -> Iterator[Any]:
    """An equation and those inside it."""
    yield eqn
    for body in inner_jaxprs(eqn):
        yield from equations(body)
