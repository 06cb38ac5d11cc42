"""Default rule of primitives: row by row, if they work along other dims only."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshpar.rows.arithmetic import MOVES
from meshpar.rows.shapes import row_dims
from meshpar.rows.values import COMBINED, REDUCED, Fixed, Mixed, PerRow, nonlinear

_ALONG = ("axis", "axes", "dimension", "dimensions", "split_axis", "concat_dimension")
"""Parameters that name the dims along which a primitive works."""

_MATRICES = frozenset(
    ("cholesky", "lu", "qr", "geqrf", "eigh", "svd", "triangular_solve", "fft")
)
"""Primitives that work along their last dims."""


def is_elementwise(eqn: Any) -> bool:
    """Whether all operands have the shape of the result, or are repeated to it."""
    if len(eqn.outvars) != 1:
        return False
    if eqn.primitive.name in MOVES:
        return True
    if any(key in eqn.params for key in _ALONG) or eqn.primitive.name in _MATRICES:
        return False
    out = getattr(eqn.outvars[0].aval, "shape", ())

    def fits(shape: tuple[int, ...]) -> bool:
        repeated = len(shape) == len(out) and all(
            size in (1, whole) for size, whole in zip(shape, out, strict=True)
        )
        return shape == () or repeated

    return all(fits(getattr(v.aval, "shape", ())) for v in eqn.invars)


def truncates(eqn: Any) -> bool:
    """Whether an equation makes integers of floating-point numbers."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    return jnp.issubdtype(old, jnp.inexact) and not jnp.issubdtype(new, jnp.inexact)


def other_results(eqn: Any, values: Sequence[Any], prime: int) -> list[Any]:
    """The results of a primitive without a rule.

    Args:
      eqn: the equation.
      values: those of its operands.
      prime: the number of rows.
    """
    name, results = eqn.primitive.name, []
    rows = [v for v in values if isinstance(v, PerRow)]
    if any(isinstance(v, REDUCED) for v in values):
        return [nonlinear(name)] * len(eqn.outvars)
    if any(v.degree or v.is_ratio for v in rows):
        return [nonlinear(name)] * len(eqn.outvars)
    if name == "conv_general_dilated":
        return [_convolution(eqn, values)]
    if len({v.inner for v in rows}) > 1 or {v.dim for v in rows} & _along(eqn):
        return [Mixed(f"{name} works along rows")] * len(eqn.outvars)
    for variable in eqn.outvars:
        held = row_dims(variable.aval, prime)
        if len(held) != 1:
            results.append(Mixed(f"{name} combines rows"))
        else:
            results.append(PerRow(held[0], rows[0].inner))
    return results


def _along(eqn: Any) -> set[int]:
    """The dims along which a primitive works, as far as its parameters say."""
    along: set[int] = set()
    for key in _ALONG:
        value = eqn.params.get(key)
        if isinstance(value, int):
            along.add(value)
        elif isinstance(value, tuple):
            along.update(x for x in value if isinstance(x, int))
    rank = max(len(getattr(v.aval, "shape", ())) for v in eqn.invars)
    if eqn.primitive.name in _MATRICES:
        lengths = eqn.params.get("fft_lengths", (0, 0))
        along.update(range(rank - len(lengths), rank))
    if eqn.primitive.name == "top_k":
        along.add(rank - 1)
    window = eqn.params.get("window_dimensions", ())
    along.update(dim for dim, size in enumerate(window) if size > 1)
    return along


def _convolution(eqn: Any, values: Sequence[Any]) -> Any:
    """A convolution of rows with a fixed kernel."""
    image, kernel = values
    numbers, groups = eqn.params["dimension_numbers"], "batch_group_count"
    if not isinstance(kernel, Fixed) or eqn.params[groups] > 1:
        return COMBINED
    if image.dim != numbers.lhs_spec[0]:
        return Mixed("a convolution works along rows")
    return PerRow(numbers.out_spec[0], image.inner)
