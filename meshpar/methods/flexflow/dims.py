"""Dim propagation: how the dims of an operator's results stem from its operands' dims.

Every operator has factors, as the indices of an einsum are. A dim belongs to a factor,
or is `WHOLE`: no axis may split it there. An axis that splits a factor splits every dim
of it. A factor of operands that no result has is summed: each device then has a part of
the sum.

Source: Jia et al., arXiv:1807.05358, section 4 (parallelizable dimensions); the factors
  are those of Shardy's sharding rules.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshpar.methods.flexflow.indexed_dims import gather_dims, scatter_dims

WHOLE = -1
"""In place of a factor: the operator needs the whole dim."""

Dims = tuple[int, ...]

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy "
    "copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg "
    "nextafter not one_minus_square or pcast population_count pow pvary real "
    "reduce_precision rem round rsqrt select_n sharding_constraint shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
"""Primitives that compute an element of their result from one element of operands."""


@dataclasses.dataclass(frozen=True)
class DimRule:
    """The factors of one operator.

    Attributes:
      operands: a factor, or WHOLE, for each dim of each operand.
      results: a factor, or WHOLE, for each dim of each result.
      sizes: {factor: number that ways to split it must divide}.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: dict[int, int]


def dim_rule(eqn: Any) -> DimRule:
    """The rule of one equation of a jaxpr; an unknown primitive needs whole dims."""
    operands, results = _shapes(eqn.invars), _shapes(eqn.outvars)
    made = _RULES.get(eqn.primitive.name, _default)(eqn, operands, results)
    sizes: dict[int, int] = {}
    for dims, shape in zip((*made[0], *made[1]), (*operands, *results), strict=True):
        for factor, size in zip(dims, shape, strict=True):
            sizes[factor] = math.gcd(sizes.get(factor, 0), size)
    sizes.pop(WHOLE, None)
    return DimRule(*made, sizes)


def paired(shapes: Sequence[tuple[int, ...]]) -> DimRule:
    """The rule of an operator that makes each operand the result of its number."""
    dims, sizes = [], {}
    for shape in shapes:
        first = len(sizes)
        dims.append(tuple(range(first, first + len(shape))))
        sizes |= dict(enumerate(shape, first))
    return DimRule(tuple(dims), tuple(dims), sizes)


Shapes = list[tuple[int, ...]]
Factors = tuple[tuple[Dims, ...], tuple[Dims, ...]]


def _shapes(variables: Any) -> Shapes:
    return [tuple(v.aval.shape) for v in variables]


def _whole(shapes: Shapes) -> tuple[Dims, ...]:
    return tuple((WHOLE,) * len(shape) for shape in shapes)


def _default(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    if eqn.primitive.name in ELEMENTWISE:
        return _elementwise(eqn, operands, results)
    if eqn.primitive.name.startswith("cum"):
        return _along(eqn.params["axis"], operands, results)
    if not any(operands):  # Made on the spot, such as iota and random bits.
        return _whole(operands), tuple(tuple(range(len(s))) for s in results)
    return _whole(operands), _whole(results)


def _elementwise(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Dims correspond; one of size 1 is repeated, and scalars have none."""
    out = results[0]

    def row(shape: tuple[int, ...]) -> Dims:
        if len(shape) != len(out):
            return (WHOLE,) * len(shape)
        return tuple(d if n == out[d] else WHOLE for d, n in enumerate(shape))

    return tuple(map(row, operands)), (tuple(range(len(out))),) * len(results)


def _pairs(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Every operand becomes the result of its number."""
    rule = paired(results)
    return rule.operands, rule.results


def _along(axis: int, operands: Shapes, results: Shapes) -> Factors:
    """One dim of all operands and results is whole, the others correspond."""
    dims = (WHOLE if d == axis else d for d in range(len(operands[0])))
    return ((row := tuple(dims)),) * len(operands), (row,) * len(results)


def _sort(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return _along(eqn.params["dimension"], operands, results)


def _top_k(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return _along(len(operands[0]) - 1, operands, results)


def _rev(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    moved = eqn.params["dimensions"]
    dims = tuple(WHOLE if d in moved else d for d in range(len(operands[0])))
    return (dims,), (dims,)


def _transpose(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    order = eqn.params["permutation"]
    return (tuple(range(len(order))),), (tuple(order),)


def _broadcast(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    out = results[0]
    kept = zip(eqn.params["broadcast_dimensions"], operands[0], strict=True)
    dims = tuple(d if size == out[d] else WHOLE for d, size in kept)
    return (dims, *_whole(operands[1:])), (tuple(range(len(out))),)


def _reshape(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Rule for reshape: the first dims of a regrouped group keep their axes."""
    operand, result = [WHOLE] * len(operands[0]), [WHOLE] * len(results[0])
    for factor, (before, after) in enumerate(_groups(operands[0], results[0])):
        operand[before] = result[after] = factor
    return (tuple(operand), *_whole(operands[1:])), (tuple(result),)


def _groups(
    before: tuple[int, ...], after: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """(first dim before, first dim after) of groups that hold the same elements."""
    ins = [d for d, size in enumerate(before) if size != 1]
    outs = [d for d, size in enumerate(after) if size != 1]
    if math.prod(before) == 0:
        return
    i = j = 0
    while i < len(ins):
        yield ins[i], outs[j]
        left, right = before[ins[i]], after[outs[j]]
        while left != right:
            if left < right:
                i += 1
                left *= before[ins[i]]
            else:
                j += 1
                right *= after[outs[j]]
        i, j = i + 1, j + 1


def _without(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Dims `axes` of the operands are summed, or are of size 1."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    rank = len(operands[0])
    kept = tuple(d for d in range(rank) if d not in {a % rank for a in axes})
    return (tuple(range(rank)),) * len(operands), (kept,) * len(results)


def _squeeze(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    axes = {a % len(operands[0]) for a in eqn.params["dimensions"]}
    dims = tuple(WHOLE if d in axes else d for d in range(len(operands[0])))
    return (dims,), (tuple(d for d in dims if d != WHOLE),)


def _dot_general(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs = list(range(len(operands[0])))
    rhs = list(range(len(lhs), len(lhs) + len(operands[1])))
    for one, other in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[other] = lhs[one]
    used = *lhs_sum, *lhs_batch
    result = [lhs[d] for d in lhs_batch]
    result += [f for d, f in enumerate(lhs) if d not in used]
    used = *rhs_sum, *rhs_batch
    result += [f for d, f in enumerate(rhs) if d not in used]
    return (tuple(lhs), tuple(rhs)), (tuple(result),)


def _convolution(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Rows, channels in and channels out; dims of space are whole.

    Groups of channels go through the convolution together, so that a split of them
    splits the kernels.
    """
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = ([WHOLE] * len(s) for s in (operands[0], operands[1], results[0]))
    rows, channels, features = range(3)
    lhs[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = rows
    rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = features
    lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = channels
    if eqn.params["feature_group_count"] > 1:
        lhs[numbers.lhs_spec[1]], rhs[numbers.rhs_spec[1]] = features, WHOLE
    if eqn.params["batch_group_count"] > 1:
        lhs[numbers.lhs_spec[0]], out[numbers.out_spec[0]] = features, WHOLE
    return (tuple(lhs), tuple(rhs)), (tuple(out),)


def _where_equal(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Dims correspond where all arrays have the same size, as in slices and pads."""
    shapes = [s for s in (*operands, *results) if len(s) == len(results[0]) and s]
    sizes = [set(column) for column in zip(*shapes, strict=True)]
    dims = tuple(d if len(same) == 1 else WHOLE for d, same in enumerate(sizes))

    def row(shape: tuple[int, ...]) -> Dims:
        return dims if len(shape) == len(dims) else (WHOLE,) * len(shape)

    return tuple(map(row, operands)), tuple(map(row, results))


def _windows(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    """Pooling: dims along which the window is one element correspond."""
    window = eqn.params["window_dimensions"]
    dims = tuple(d if size == 1 else WHOLE for d, size in enumerate(window))
    rows = (dims if len(s) == len(dims) else (WHOLE,) * len(s) for s in operands)
    return tuple(rows), (dims,) * len(results)


def _concatenate(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return _along(eqn.params["dimension"], operands, results)


def _split(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return _along(eqn.params["axis"], operands, results)


def _unstack(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    axis = eqn.params.get("axis", 0)
    dims = tuple(WHOLE if d == axis else d for d in range(len(operands[0])))
    return (dims,), (tuple(d for d in dims if d != WHOLE),) * len(results)


def _gather(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return gather_dims(eqn, operands, results)


def _scatter_add(eqn: Any, operands: Shapes, results: Shapes) -> Factors:
    return scatter_dims(eqn, operands, results)


_REDUCTIONS = (
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax "
)
_REDUCTIONS += "argmin reduce_xor"
_WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
_WINDOWS += "select_and_scatter_add select_and_gather_add"

_RULES: dict[str, Callable[[Any, Shapes, Shapes], Factors]] = {
    **dict.fromkeys(_REDUCTIONS.split(), _without),
    **dict.fromkeys(_WINDOWS.split(), _windows),
    **dict.fromkeys(("slice", "pad", "dynamic_slice"), _where_equal),
    "dynamic_update_slice": _where_equal,
    "optimization_barrier": _pairs,
    "sort": _sort,
    "top_k": _top_k,
    "rev": _rev,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "concatenate": _concatenate,
    "split": _split,
    "unstack": _unstack,
    "gather": _gather,
    "scatter-add": _scatter_add,
}
"""{primitive: (equation, shapes of operands, of results) -> their factors}."""
