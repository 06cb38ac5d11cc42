"""The collectives that a training step writes, read from the jaxpr that is compiled.

One walk of the jaxpr of a step's one trace, after dead code is removed, gives every
collective that the step's own code writes: kind, mesh axes, runs, bytes, purpose and
source line. A compiler adds others only over axes that stay automatic.

Inside shard_map arrays are whole over the axes that stay automatic. Where a compiler
may split what a collective moves over such axes, the bytes are at most those written.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshpar.compat import scan_counts, user_line
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.purposes import Purpose
from meshpar.contracts.splits import NestedJaxpr, changes_in_loop, split_axes
from meshpar.jaxprs.live_code import has_barriers, without_dead_code
from meshpar.jaxprs.value_numbers import ValueNumbers
from meshpar.jaxprs.walk import CALLS, Interpreter, equations, inner_jaxprs

_KINDS = (
    ("psum", "all_reduce"),
    ("unreduced_psum", "all_reduce"),
    ("pmax", "all_reduce"),
    ("pmin", "all_reduce"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("unreduced_reduce_scatter", "reduce_scatter"),
    ("all_to_all", "all_to_all"),
    ("ragged_all_to_all", "all_to_all"),
    ("ppermute", "permute"),
)
"""Kinds of collectives, by how the names of their primitives begin."""


@dataclasses.dataclass(frozen=True)
class WrittenCollective:
    """One collective that a step writes.

    Attributes:
      kind: as `Collective.kind`.
      axes: mesh axes over which it runs, outer to inner.
      group_size: devices that take part together.
      runs: executions per step; None where no loop around it says how often it runs.
      payload_bytes: bytes of the whole tensors on one device, of one execution.
      why: its purpose; "" if the code gives none.
      source: "file:line" of the code.
      whole: automatic axes along which a compiler may split what it moves, as nothing
        says how.
      may_drop: whether a compiler may leave it out, or send fewer bytes.
      partial: whether its groups are only parts of the devices along `axes`.
      backward: whether it is in the backward pass, which may compute things again.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    runs: int | None
    payload_bytes: int
    why: str
    source: str
    whole: tuple[str, ...] = ()
    may_drop: bool = False
    partial: bool = False
    backward: bool = False


class _Place(NamedTuple):
    """The place of an equation.

    Attributes:
      code: the jaxpr that it is in.
      runs: how often it runs in a step; None if nothing says so.
      manual: mesh axes that are manual there.
      names: the name stack of the equations around it.
      branches: branches around it that have collectives, of one conditional.
    """

    code: NestedJaxpr
    runs: int | None = 1
    manual: frozenset[str] = frozenset()
    names: tuple[Any, ...] = ()
    branches: int = 1

    def inside(self, eqn: Any, jaxpr: Any) -> "_Place":
        """The place of the equations of a jaxpr that an equation runs."""
        name = eqn.primitive.name
        place = self._replace(
            code=NestedJaxpr.of(jaxpr, eqn, self.code),
            names=self.names + tuple(eqn.source_info.name_stack.stack),
        )
        if name == "scan" and self.runs is not None:
            return place._replace(runs=self.runs * eqn.params["length"])
        if name == "while":
            return place._replace(runs=None)
        if name == "cond":
            moving = sum(map(_moves, inner_jaxprs(eqn)))
            return place._replace(branches=max(self.branches, moving))
        if name == "shard_map":
            return place._replace(manual=self.manual | eqn.params["newly_manual_axes"])
        return place


def written_collectives(
    jaxpr: Any, sizes: Mapping[str, int], widens: bool = False
) -> list[WrittenCollective]:
    """The collectives of a step, in the order in which they are written.

    All branches of a conditional count, as in the text of a compiled program.

    Args:
      jaxpr: of the step.
      sizes: {mesh axis: size}, outer to inner.
      widens: whether floats smaller than 32 bits travel as float32.
    """

    def read(live: Any) -> list[WrittenCollective]:
        return _Reader(sizes, widens, _Place(NestedJaxpr.of(live))).collectives()

    kept = read(live := without_dead_code(jaxpr))
    if not has_barriers(live):
        return kept
    needed = read(without_dead_code(jaxpr, through_barriers=True))
    left, written = collections.Counter(needed), []
    for found in kept:
        left[found] -= 1
        drops = left[found] < 0
        written.append(dataclasses.replace(found, may_drop=True) if drops else found)
    return written


@dataclasses.dataclass(frozen=True)
class _Reader(Interpreter[int]):
    """Reads the collectives of a jaxpr, whose values it numbers.

    Attributes:
      sizes: {mesh axis: size}, outer to inner.
      widens: whether floats smaller than 32 bits travel as float32.
      place: of the equations.
      values: numbers of the values of the whole program.
      found: the collectives of the whole program.
      seen: operations that ran in the same computation.
    """

    sizes: Mapping[str, int]
    widens: bool
    place: _Place
    values: ValueNumbers = dataclasses.field(default_factory=ValueNumbers)
    found: list[WrittenCollective] = dataclasses.field(default_factory=list)
    seen: set[int] = dataclasses.field(default_factory=set)

    def collectives(self) -> list[WrittenCollective]:
        """The collectives of the jaxpr and of all jaxprs inside it."""
        self._read(self.place.code.jaxpr, ())
        return self.found

    def _read(self, jaxpr: Any, inputs: Sequence[int]) -> list[int]:
        """Reads a jaxpr; arguments without a number get new ones."""
        new = self._new(jaxpr.invars[len(inputs) :])
        return self.run(jaxpr, self._new(jaxpr.constvars), [*inputs, *new])

    def _new(self, variables: Sequence[Any]) -> list[int]:
        return [self.values.new() for _ in variables]

    def literal(self, atom: Any, owner: Any, place: int) -> int:
        return self.values.literal(atom)

    def equation(self, eqn: Any, operands: list[int]) -> list[int]:
        if (kind := kind_of(eqn)) is None and (inner := inner_jaxprs(eqn)):
            return self._inside(eqn, inner, operands)
        if kind is not None and (axes := self._axes(eqn)):
            operation = self.values.operation(eqn, operands)
            again = operation in self.seen  # A compiler runs equal ones once.
            self.found.extend(self._written(eqn, kind, axes, again))
            self.seen.add(operation)
        return self.values.equation(eqn, operands)

    def _inside(self, eqn: Any, inner: Sequence[Any], operands: list[int]) -> list[int]:
        """Reads the jaxprs that an equation runs."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return self._at(eqn, inner[0], self.seen)._read(inner[0], operands)
        if name == "shard_map":
            inputs = self._views(operands, params["in_specs"])
            results = self._at(eqn, inner[0], self.seen)._read(inner[0], inputs)
            return self._views(results, params["out_specs"])
        if not any(map(_moves, inner)):  # Such as the bodies of kernels.
            return self._new(eqn.outvars)
        is_loop = name == "scan"
        known = operands[: scan_counts(eqn)[0]] if is_loop else ()
        once = is_loop and params["length"] == 1  # No loop is left of it.
        for body in inner:
            self._at(eqn, body, self.seen if once else set())._read(body, known)
        return self._new(eqn.outvars)

    def _at(self, eqn: Any, jaxpr: Any, seen: set[int]) -> "_Reader":
        """The reader of a jaxpr that an equation runs."""
        place = self.place.inside(eqn, jaxpr)
        return dataclasses.replace(self, place=place, seen=seen)

    def _views(self, numbers: Sequence[int], specs: Sequence[Any]) -> list[int]:
        """Numbers of values that cross the border of a shard_map."""
        views = zip(numbers, specs, strict=True)
        return [self.values.number("view", x, str(spec)) for x, spec in views]

    def _axes(self, eqn: Any) -> tuple[str, ...]:
        """The mesh axes over which a collective moves anything, outer to inner."""
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = named if isinstance(named, tuple) else (named,)
        return tuple(a for a, size in self.sizes.items() if a in named and size > 1)

    def _written(
        self, eqn: Any, kind: str, axes: tuple[str, ...], again: bool
    ) -> Iterator[WrittenCollective]:
        """The collectives of an equation, one for each of its arrays."""
        place, ways, groups = (
            self.place,
            self._ways(axes),
            eqn.params.get("axis_index_groups"),
        )
        size = len(groups[0]) if groups else ways
        purpose = Purpose.of(place.names + tuple(eqn.source_info.name_stack.stack))
        automatic = self._automatic(purpose)
        may_drop = again or self._may_drop(eqn, kind, purpose)
        moved = eqn.outvars if kind == "all_gather" else eqn.invars
        for x, operand in zip(moved, eqn.invars, strict=True):
            split = frozenset()
            if automatic:
                split = split_axes(operand, place.code, automatic)
            yield WrittenCollective(
                kind,
                axes,
                size,
                place.runs,
                self._bytes(x.aval) // self._ways(split or ()),
                purpose.why,
                user_line(eqn),
                automatic if split is None else (),
                may_drop,
                size < ways,
                purpose.backward or purpose.again,
            )

    def _may_drop(self, eqn: Any, kind: str, purpose: Purpose) -> bool:
        """Whether a compiler may leave a collective out, or send fewer bytes.

        It may drop gathers, send maxima in the dtype from which they were cast, merge
        what runs again with the first run or is in all branches of a conditional, and
        move what is constant out of loops.
        """
        return (
            kind == "all_gather"
            or purpose.gathers
            or eqn.primitive.name.startswith(("pmax", "pmin"))
            or (purpose.again and kind in ("reduce_scatter", "permute"))
            or self.place.branches > 1
            or not any(changes_in_loop(x, self.place.code) for x in eqn.invars)
        )

    def _automatic(self, purpose: Purpose) -> tuple[str, ...]:
        """The automatic axes along which a compiler may split the moved arrays."""
        if purpose.unsplit:
            return ()
        return tuple(
            a for a, n in self.sizes.items() if n > 1 and a not in self.place.manual
        )

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def _bytes(self, x: Any) -> int:
        """Bytes of an array as it travels."""
        wider = self.widens and jnp.issubdtype(x.dtype, jnp.floating)
        return x.size * (max(x.dtype.itemsize, 4) if wider else x.dtype.itemsize)


def kind_of(eqn: Any) -> str | None:
    """The kind of the collective that an equation is; None for all others."""
    return _kind_named(eqn.primitive.name)


@functools.cache
def _kind_named(name: str) -> str | None:
    return next((kind for start, kind in _KINDS if name.startswith(start)), None)


def _moves(jaxpr: Any) -> bool:
    """Whether any collective is in a jaxpr."""
    return any(kind_of(eqn) is not None for eqn in equations(jaxpr))


def written_terms(
    written: Iterable[WrittenCollective], times: int = 1
) -> tuple[DeclaredCollective, ...]:
    """The terms of a contract: collectives of one purpose together.

    They are exact, except where a compiler chooses: it may split what moves along axes
    that stay automatic, and a loop may not say how often it runs.

    Args:
      written: the collectives.
      times: how often all of them run.
    """
    totals: dict[tuple, list[float]] = {}
    for found in written:
        key = found.kind, found.axes, found.group_size, found.why or found.source
        key = *key, bool(found.whole), found.may_drop, found.partial
        total = totals.setdefault(key, [0, 0])
        runs = math.inf if found.runs is None else times * found.runs
        total[0] += runs
        total[1] += runs * found.payload_bytes
    return tuple(_term(*key, *total) for key, total in totals.items())


def _term(
    kind: str,
    axes: tuple[str, ...],
    group_size: int,
    why: str,
    whole: bool,
    may_drop: bool,
    partial: bool,
    count: float,
    size: float,
) -> DeclaredCollective:
    """One term, exact or a bound."""
    if math.isinf(count):
        why = f"{why}, in a loop that does not say how often it runs"
    elif whole:
        why = f"at most: {why}"
    bound = whole or math.isinf(count)
    return DeclaredCollective(
        kind,
        axes,
        group_size,
        0 if bound else count,
        size,
        why,
        bound=bound,
        gathers=may_drop and not bound,
        partial=partial,
    )
