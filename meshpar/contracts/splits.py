"""Follows arrays of a jaxpr back to the code that makes them.

Inside shard_map arrays are whole over the axes that stay automatic. A compiler splits
them as the code says nearby: by a sharding constraint, or by the specs of a shard_map
inside that makes the axes manual. `split_axes` follows an array back to the place that
says so; `changes_in_loop` follows it to the start of a loop.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from meshpar.compat import scan_counts
from meshpar.jaxprs.value_numbers import operands_read
from meshpar.jaxprs.walk import CALLS, inner_jaxprs

_KEEPS_SPLITS = frozenset(
    "add add_any convert_element_type copy copy_p div dynamic_slice "
    "dynamic_update_slice exp expand_dims log max mul neg optimization_barrier "
    "pbroadcast pcast pmax ppermute psum psum_invariant pvary reduce_precision "
    "reshape select_n squeeze sub transpose".split()
)
"""Primitives whose results are split as those of their operands that say so."""

_LOOPS = frozenset(("scan", "while"))


@dataclasses.dataclass(frozen=True, eq=False)
class NestedJaxpr:
    """A jaxpr inside a program, and the equation that runs it.

    Attributes:
      jaxpr: the jaxpr.
      eqn: the equation; None for that of a whole program.
      outside: the jaxpr of that equation.
      makers: {variable: its equation} of this jaxpr.
    """

    jaxpr: Any
    eqn: Any = None
    outside: "NestedJaxpr | None" = None
    makers: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, jaxpr: Any, eqn: Any = None, outside: "NestedJaxpr | None" = None
    ) -> "NestedJaxpr":
        """A jaxpr with the makers of its variables."""
        makers = {out: made for made in jaxpr.eqns for out in made.outvars}
        return cls(jaxpr, eqn, outside, makers)


def split_axes(
    x: Any, code: NestedJaxpr, automatic: Collection[str]
) -> frozenset[str] | None:
    """The automatic axes that split an array; None if nothing says so.

    Args:
      x: the array, a variable of a jaxpr.
      code: that jaxpr.
      automatic: the axes that are automatic there.
    """
    if x.aval.ndim < 2:  # No compiler splits a few numbers.
        return frozenset()
    seen, waiting = set(), [(x, code)]
    while waiting:
        atom, code = waiting.pop(0)
        if isinstance(atom, Literal) or (atom, code.jaxpr) in seen:
            continue
        seen.add((atom, code.jaxpr))
        found = _said(atom, code, automatic)
        if found is not None:
            return found
        waiting += _sources(atom, code)
    return None


def _said(
    x: Any, code: NestedJaxpr, automatic: Collection[str]
) -> frozenset[str] | None:
    """The axes that the equation of an array names; None if it names none."""
    eqn = code.makers.get(x)
    if eqn is None:
        return None
    if eqn.primitive.name == "sharding_constraint":
        spec = eqn.params["sharding"].spec
        if PartitionSpec.UNCONSTRAINED in tuple(spec):
            return None  # The compiler chooses.
    elif eqn.primitive.name == "shard_map":
        spec = eqn.params["out_specs"][eqn.outvars.index(x)]
    else:
        return None
    named = (a for dim in spec for a in (dim if isinstance(dim, tuple) else (dim,)))
    return frozenset(axis for axis in named if axis in automatic)


def _sources(x: Any, code: NestedJaxpr) -> Iterator[tuple[Any, NestedJaxpr]]:
    """Pairs of (variable, its jaxpr): arrays with the same sharding as an array."""
    eqn = code.makers.get(x)
    if eqn is None:
        yield from _given(x, code)
        return
    name, place = eqn.primitive.name, eqn.outvars.index(x)
    if name == "optimization_barrier":
        yield eqn.invars[place], code
    elif name == "sharding_constraint":
        if set(eqn.params["sharding"].spec) == {PartitionSpec.UNCONSTRAINED}:
            yield eqn.invars[place], code
    elif name in _KEEPS_SPLITS:
        for operand in eqn.invars:
            if operand.aval.size >= x.aval.size:
                yield operand, code
    elif name in ("broadcast_in_dim", "concatenate", "stack"):
        yield from ((operand, code) for operand in eqn.invars)
    elif name in ("scan", "cond") or name in CALLS:
        for jaxpr in inner_jaxprs(eqn):
            if len(jaxpr.outvars) == len(eqn.outvars):
                yield jaxpr.outvars[place], NestedJaxpr.of(jaxpr, eqn, code)


def _given(x: Any, code: NestedJaxpr) -> Iterator[tuple[Any, NestedJaxpr]]:
    """Pairs of (variable, its jaxpr): the operands for an input of a jaxpr."""
    if code.eqn is None or x not in code.jaxpr.invars:
        return
    name, place = code.eqn.primitive.name, code.jaxpr.invars.index(x)
    if name == "scan":
        constants, carried = scan_counts(code.eqn)
        if constants <= place < constants + carried:
            yield code.jaxpr.outvars[place - constants], code
    if name in ("shard_map", "while"):
        return
    place += name == "cond"  # The first operand picks the branch.
    if place < len(code.eqn.invars):
        yield code.eqn.invars[place], code.outside


def changes_in_loop(x: Any, code: NestedJaxpr) -> bool:
    """Whether an array may differ between the rounds of the innermost loop around it.

    True outside of loops.
    """
    inside = code
    while inside.eqn is not None and not _repeats(inside.eqn):
        inside = inside.outside
    if inside.eqn is None or inside.eqn.primitive.name == "while":
        return True
    seen, waiting = set(), [(x, code)]
    while waiting:
        atom, code = waiting.pop()
        if isinstance(atom, Literal) or (atom, code.jaxpr) in seen:
            continue
        seen.add((atom, code.jaxpr))
        if (eqn := code.makers.get(atom)) is not None:
            waiting += [(x, code) for x in operands_read(eqn, eqn.invars)]
        elif code.jaxpr is inside.jaxpr:
            if code.jaxpr.invars.index(atom) >= scan_counts(code.eqn)[0]:
                return True
        elif atom in code.jaxpr.invars:
            waiting += [(operand, code.outside) for operand in code.eqn.invars]
    return False


def _repeats(eqn: Any) -> bool:
    """Whether an equation is a loop of more than one round."""
    return eqn.primitive.name in _LOOPS and eqn.params.get("length") != 1
