"""Abstract interpretation of a loss: how each result depends on the rows of the batch.

The loss is traced with a prime number of rows, which shows in shapes and in counts, and
its jaxpr is evaluated on the values of `rows.values`. Nothing is allocated or compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from meshpar import compat
from meshpar.rows import indexing, opaque, shapes
from meshpar.rows.arithmetic import MOVES, counted, elementwise, joined, same
from meshpar.rows.folding import constant, folded
from meshpar.rows.values import (
    COMBINED,
    REDUCED,
    Fixed,
    Mixed,
    Rows,
    Test,
    nonlinear,
)

_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
    + ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
)
_MAX_ROUNDS = 8
"""Rounds after which a loop's carry has to stay as it is."""

_RULES: dict[str, Callable[[Any, Sequence[Any], int], Any]] = {
    "reduce_sum": shapes.reduce_sum,
    "reduce_max": shapes.reduce_other,
    "reduce_min": shapes.reduce_other,
    "reduce_prod": shapes.reduce_other,
    "reduce_and": shapes.reduce_other,
    "reduce_or": shapes.reduce_other,
    "argmax": shapes.reduce_other,
    "argmin": shapes.reduce_other,
    "reshape": shapes.reshape,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "transpose": shapes.transpose,
    "squeeze": shapes.squeeze,
    "slice": shapes.take_part,
    "dynamic_slice": shapes.take_part,
    "pad": shapes.take_part,
    "dynamic_update_slice": shapes.update_part,
    "concatenate": shapes.concatenate,
    "stack": shapes.concatenate,
    "dot_general": shapes.dot_general,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter,
    "scatter-add": indexing.scatter,
}
_ALONG = ("axis", "axes", "dimension", "dimensions", "split_axis", "concat_dimension")
"""Parameters that name the dims along which a primitive works."""

_MATRICES = frozenset(
    ("cholesky", "lu", "qr", "geqrf", "eigh", "svd", "triangular_solve", "fft")
)
"""Primitives that work along their last dims."""


@dataclasses.dataclass(frozen=True)
class RowAnalysis:
    """Evaluates jaxprs of a batch whose number of rows is a prime.

    Attributes:
      prime: the number of rows.
    """

    prime: int

    def constant(self, value: Any) -> Any:
        """A constant of a jaxpr."""
        return constant(value)

    def run(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]
    ) -> list[Any]:
        """The values of the outputs of a jaxpr.

        Args:
          jaxpr: an open jaxpr.
          consts: its constants, as values.
          values: those of its inputs.
        """
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return self.constant(atom.val)
            return env[atom]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in _CALLS:
            if (rule := opaque.RULES.get(eqn.params.get("name"))) is not None:
                return rule(eqn, values, self.prime)
            return self._body(_jaxpr_of(eqn), values)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, values)
        if all(isinstance(v, Fixed) for v in values) and name not in _CONTRACTIONS:
            return self._fixed(eqn, values)
        if mixed := next((v for v in values if isinstance(v, Mixed)), None):
            return [mixed] * len(eqn.outvars)
        if name == "optimization_barrier":
            return values
        if name in _RULES:
            if all(isinstance(v, Fixed) for v in values):
                (known,) = self._fixed(eqn, values)
                if known.known is not None:
                    return [known]
            return [_RULES[name](eqn, values, self.prime)] * len(eqn.outvars)
        if is_elementwise(eqn):
            return [elementwise(name, values, self.prime)]
        return self._other(eqn, values)

    def _fixed(self, eqn: Any, values: list[Any]) -> list[Any]:
        known = [v.known for v in values]
        if (result := folded(eqn, known)) is not None:
            return [Fixed(result)]
        if eqn.primitive.name == "add" and not eqn.outvars[0].aval.shape:
            return [counted(values, self.prime)]
        return [Fixed()] * len(eqn.outvars)

    def _body(self, body: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr, open or closed."""
        if isinstance(body, core.ClosedJaxpr):
            consts = [self.constant(x) for x in body.consts]
            return self.run(body.jaxpr, consts, values)
        return self.run(body, [], values)

    def _other(self, eqn: Any, values: list[Any]) -> list[Any]:
        """A primitive without a rule: row-wise, if it works along other dims."""
        name, results = eqn.primitive.name, []
        if any(isinstance(v, REDUCED) for v in values):
            return [nonlinear(name)] * len(eqn.outvars)
        rows = [v for v in values if isinstance(v, Rows)]
        dims = {v.dim for v in rows}
        if any(v.degree or v.is_ratio for v in rows):
            return [nonlinear(name)] * len(eqn.outvars)
        if name == "conv_general_dilated":
            return [self._convolution(eqn, values)]
        along = self._along(eqn)
        if len({v.inner for v in rows}) > 1 or dims & along:
            return [Mixed(f"{name} works along rows")] * len(eqn.outvars)
        for variable in eqn.outvars:
            held = shapes.row_dims(variable.aval, self.prime)
            if len(held) != 1:
                results.append(Mixed(f"{name} combines rows"))
            else:
                results.append(Rows(held[0], rows[0].inner))
        return results

    def _along(self, eqn: Any) -> set[int]:
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

    def _convolution(self, eqn: Any, values: list[Any]) -> Any:
        """A convolution of rows with a fixed kernel."""
        image, kernel = values
        numbers, groups = eqn.params["dimension_numbers"], "batch_group_count"
        if not isinstance(kernel, Fixed) or eqn.params[groups] > 1:
            return COMBINED
        if image.dim != numbers.lhs_spec[0]:
            return Mixed("a convolution works along rows")
        return Rows(numbers.out_spec[0], image.inner)

    # Loops and choices.

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        num_consts, num_carry = compat.scan_counts(eqn)
        consts, carry = values[:num_consts], values[num_consts:][:num_carry]
        slices = [_slice(v) for v in values[num_consts + num_carry :]]

        def step(carry: list[Any]) -> list[Any]:
            return self._body(eqn.params["jaxpr"], [*consts, *carry, *slices])

        outputs = self._settled(step, list(carry))
        return [*outputs[:num_carry], *map(_stacked, outputs[num_carry:])]

    def _while(self, eqn: Any, values: list[Any]) -> list[Any]:
        params, num = eqn.params, eqn.params["cond_nconsts"]
        held, rest = values[:num], values[num:]
        consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]

        def step(carry: list[Any]) -> list[Any]:
            return self._body(params["body_jaxpr"], [*consts, *carry])

        carry = self._settled(step, list(carry))
        (goes_on,) = self._body(params["cond_jaxpr"], [*held, *carry])
        if isinstance(goes_on, Fixed):
            return carry
        return [Mixed("a loop runs as long as the batch says")] * len(carry)

    def _settled(
        self, step: Callable[[list[Any]], list[Any]], carry: list[Any]
    ) -> list[Any]:
        """The outputs of a loop's body once its carry stays as it is."""
        for _ in range(_MAX_ROUNDS):
            outputs = step(carry)
            new = [joined(pair) for pair in zip(carry, outputs, strict=False)]
            if all(map(same, new, carry)):
                return [*carry, *outputs[len(carry) :]]
            carry = new
        mixed = Mixed("a loop changes how a number depends on the rows")
        return [mixed] * len(outputs)

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        which, *operands = values
        branches = [self._body(body, operands) for body in eqn.params["branches"]]
        if isinstance(which, Fixed):
            return [joined(cases) for cases in zip(*branches, strict=True)]
        if isinstance(which, Test):
            return [
                elementwise("select_n", (which, *cases), self.prime)
                for cases in zip(*branches, strict=True)
            ]
        return [Mixed("the batch chooses what is computed")] * len(eqn.outvars)


_CONTRACTIONS = frozenset(("reduce_sum", "dot_general"))
"""Primitives that may turn an array of many rows into a sum, even of fixed values."""


def _jaxpr_of(eqn: Any) -> Any:
    """The jaxpr that a call runs."""
    bodies = (core.ClosedJaxpr, core.Jaxpr)
    return next(v for v in eqn.params.values() if isinstance(v, bodies))


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


def _slice(value: Any) -> Any:
    """One step's part of a value that a loop runs over."""
    if isinstance(value, Fixed):
        return Fixed()
    if isinstance(value, Rows):
        if value.dim == 0:
            return Mixed("a loop runs over rows")
        return value._replace(dim=value.dim - 1, columns=())
    return value


def _stacked(value: Any) -> Any:
    """The results of all steps of a loop."""
    if isinstance(value, Fixed):
        return Fixed()
    if isinstance(value, Rows):
        return value._replace(dim=value.dim + 1, columns=())
    return value
