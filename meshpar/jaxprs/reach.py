"""Reach of an optimizer: the elements on which each element of an update depends.

    elementwise   on the same element alone: SGD, Adam
    tensor-wide   on other elements of the same tensor: LAMB, Adafactor, Muon
    tree-wide     on other tensors: clipping by a global norm

It is read from the jaxpr of one update on abstract arrays of the real shapes, with
nothing computed. Primitives that are not known to be elementwise count as mixing all
elements, so the answer errs to the safe side.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.jaxprs.walk import CALLS, Interpreter

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh "
    "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg "
    "nextafter not one_minus_square optimization_barrier or pcast polygamma "
    "population_count pow pvary real reduce_precision rem round rsqrt select_n "
    "sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square sub tan tanh xor".split()
)
REDUCTIONS = frozenset(
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)
_RESHAPES = frozenset("broadcast_in_dim reshape squeeze".split())
_POSITIONAL = frozenset(
    "iota random_bits random_gamma rng_bit_generator threefry2x32".split()
)
_LOSS = 1
"""The bit of the loss in a label; tensors follow it."""

_LEAST_BYTES = 4
"""Bytes of an element in a collective, at least: a compiler may widen it."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """The reach of one optimizer: the elements on which its updates depend.

    Attributes:
      mixed: parameters whose update depends on other elements of the same tensor.
      crossed: parameters whose update depends on other tensors.
      positional: whether it makes numbers by position, such as noise.
      uses_loss: whether it uses the loss.
      reduced_bytes: bytes of the results of its reductions.
      moves: whether it moves elements beyond reductions (matmuls, sorting, loops).
      branches: whether it has conditionals.
      summarizes: whether its state has numbers that depend on several elements.
    """

    mixed: frozenset[str]
    crossed: frozenset[str]
    positional: bool
    uses_loss: bool
    reduced_bytes: int
    moves: bool
    branches: bool
    summarizes: bool

    def of_stacks(self, places: Mapping[str, tuple[str, int]]) -> "Reach":
        """The reach of the stacks that hold these parameters.

        Args:
          places: {parameter: (path of its stack, number of its row)}.
        """

        def stacks(paths: frozenset[str]) -> frozenset[str]:
            return frozenset(places.get(path, (path,))[0] for path in paths)

        return dataclasses.replace(
            self, mixed=stacks(self.mixed), crossed=stacks(self.crossed)
        )

    @property
    def elementwise(self) -> bool:
        """Whether every element of an update depends on the same element alone."""
        return not self.mixed and not self.crossed


class _Label(NamedTuple):
    """The inputs that a value depends on.

    Attributes:
      inputs: a bit for each of them.
      mixed: whether an element depends on others than the one at its place.
    """

    inputs: int = 0
    mixed: bool = False

    def __or__(self, other: "_Label") -> "_Label":
        return _Label(self.inputs | other.inputs, self.mixed or other.mixed)

    def blended(self) -> "_Label":
        """The label of a value of which each element depends on all elements."""
        return _Label(self.inputs, self.inputs > _LOSS)


def _join(labels: Sequence[_Label]) -> _Label:
    joined = _Label()
    for label in labels:
        joined |= label
    return joined


class _Reader(Interpreter[_Label]):
    """Follows labels through the equations of jaxprs, and adds up their traffic."""

    def __init__(self):
        self.reduced_bytes = 0
        self.moves = self.positional = self.branches = False

    def constant(self, value: Any) -> _Label:
        """A label of no input."""
        return _Label()

    def equation(self, eqn: Any, labels: list[_Label]) -> list[_Label]:
        """The labels of an equation's results."""
        name = eqn.primitive.name
        if name == "cond":
            self.branches = True
            return self._cond(eqn, labels)
        if name in CALLS:
            return self.call(eqn, labels)
        if name == "optimization_barrier":
            return labels
        out = eqn.outvars[0].aval if eqn.outvars else None
        if name in _POSITIONAL:
            self.positional |= out.size > 1
        if name in ELEMENTWISE:
            return [_elementwise(eqn.invars, labels, out)]
        joined = _join(labels)
        if name in _RESHAPES:
            source = eqn.invars[0].aval
            self.moves |= bool(joined.inputs) and _reorders(source.shape, out.shape)
            return [joined if source.size == out.size else joined.blended()]
        labelled = any(
            label.inputs and atom.aval.size > 1
            for label, atom in zip(labels, eqn.invars, strict=True)
        )
        if name in REDUCTIONS:
            if eqn.invars[0].aval.size == out.size:
                return [joined]
            if labelled:
                size = max(out.dtype.itemsize, _LEAST_BYTES)
                self.reduced_bytes += out.size * size
        else:
            self.moves |= labelled
        return [joined.blended()] * len(eqn.outvars)

    def _cond(self, eqn: Any, labels: list[_Label]) -> list[_Label]:
        predicate, *rest = labels
        branches = [self.evaluate(branch, rest) for branch in eqn.params["branches"]]
        return [
            _join([predicate.blended(), *outs]) for outs in zip(*branches, strict=True)
        ]


def _elementwise(atoms: Sequence[Any], labels: list[_Label], out: Any) -> _Label:
    """The label of an elementwise result; scalars spread to all of its elements."""
    return _join(
        [
            label if atom.aval.size == out.size else label.blended()
            for atom, label in zip(atoms, labels, strict=True)
        ]
    )


def _reorders(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> bool:
    """Whether a reshape merges or splits dims, other than dims of size 1."""
    kept, new = ([n for n in dims if n > 1] for dims in (shape, new_shape))
    return math.prod(kept) == math.prod(new) and kept != new


def read_reach(jaxpr: Any, paths: Sequence[str], num_state: int) -> Reach:
    """Reads the reach of an update.

    Args:
      jaxpr: closed, of (gradients, state, parameters, loss) -> (updates, state), where
        gradients, parameters and updates have one leaf per path.
      paths: of the parameters, in the order of the leaves.
      num_state: leaves of the state.
    """
    num = len(paths)
    own = [_Label(_LOSS << i) for i in range(1, num + 1)]
    state = [_Label()] * num_state
    while True:  # The state carries dependencies from step to step.
        reader = _Reader()
        out = reader.evaluate(jaxpr, [*own, *state, *own, _Label(_LOSS)])
        carried = [a | b for a, b in zip(state, out[num:], strict=True)]
        if carried == state:
            break
        state = carried
    updates = dict(zip(paths, out[:num], strict=True))
    return Reach(
        mixed=frozenset(path for path, label in updates.items() if label.mixed),
        crossed=frozenset(
            path
            for (path, label), itself in zip(updates.items(), own, strict=True)
            if label.inputs & ~itself.inputs & ~_LOSS
        ),
        positional=reader.positional,
        uses_loss=any(label.inputs & _LOSS for label in out),
        reduced_bytes=reader.reduced_bytes,
        moves=reader.moves,
        branches=reader.branches,
        summarizes=any(label.mixed for label in state),
    )
