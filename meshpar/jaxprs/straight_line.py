"""A jaxpr as a list of steps, with chosen calls written out, and any part evaluated."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from meshpar import compat
from meshpar.arrays import Array, vary
from meshpar.jaxprs.value_numbers import ValueNumbers
from meshpar.jaxprs.walk import CALLS, called_jaxpr, opened


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value of a program; equal to itself alone.

    Attributes:
      aval: its abstract value.
    """

    aval: Any


Atom = Any
"""A `Slot`, or a literal of a jaxpr."""


class Step(NamedTuple):
    """One equation.

    Attributes:
      eqn: the equation of the jaxpr.
      operands: what it reads, a slot or a literal each.
      results: what it writes.
    """

    eqn: Any
    operands: tuple[Atom, ...]
    results: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StraightLine:
    """A program without calls of the kind that were written out.

    Attributes:
      inputs: its arguments.
      constants: {slot: array} of the constants.
      steps: in order.
      outputs: its results.
    """

    inputs: tuple[Slot, ...]
    constants: Mapping[Slot, Any]
    steps: tuple[Step, ...]
    outputs: tuple[Atom, ...]

    @classmethod
    def of(
        cls, closed: Any, written_out: Callable[[Any], bool] = lambda _: True
    ) -> "StraightLine":
        """The program of a jaxpr.

        Args:
          closed: a closed jaxpr.
          written_out: equation of a call -> whether its inside becomes steps; by
            default all do.
        """
        jaxpr = closed.jaxpr
        constants = {Slot(v.aval): x for v, x in _constants(closed)}
        inputs = tuple(Slot(v.aval) for v in jaxpr.invars)
        slots = dict(zip(jaxpr.constvars, constants, strict=True))
        slots |= dict(zip(jaxpr.invars, inputs, strict=True))
        steps: list[Step] = []
        outputs = _write_out(jaxpr, slots, steps, constants, written_out)
        return cls(inputs, constants, tuple(steps), tuple(outputs))

    def needed(
        self, outputs: Iterable[Atom], known: Iterable[Slot] = ()
    ) -> tuple[Step, ...]:
        """The steps that compute some values from those that are known."""
        return needed(self.steps, outputs, known)

    def evaluate(
        self,
        outputs: Sequence[Atom],
        known: Mapping[Slot, Array],
        with_effects: bool = False,
    ) -> list[Array]:
        """Some values of the program.

        Args:
          outputs: what is computed.
          known: {slot: value} of inputs, or of any other slots.
          with_effects: whether steps that do more than compute (prints) run, too.
        """
        env = {**self.constants, **known}
        steps = needed(self.steps, outputs, env, with_effects)
        return evaluate(steps, outputs, env)


def needed(
    steps: Sequence[Step],
    outputs: Iterable[Atom],
    known: Iterable[Slot] = (),
    with_effects: bool = False,
) -> tuple[Step, ...]:
    """The steps that compute outputs from known values.

    Args:
      steps: the steps.
      outputs: what is needed.
      known: what need not be computed.
      with_effects: whether steps that do more than compute are needed, too.
    """
    known = set(known)
    live, kept = set(slots_of(outputs)) - known, []
    for step in reversed(steps):
        has_effect = with_effects and step.eqn.effects
        if live.isdisjoint(step.results) and not has_effect:
            continue
        kept.append(step)
        live.difference_update(step.results)
        live.update(slot for slot in slots_of(step.operands) if slot not in known)
    return tuple(reversed(kept))


def evaluate(
    steps: Sequence[Step], outputs: Sequence[Atom], known: Mapping[Slot, Array]
) -> list[Array]:
    """Runs steps, and returns some of the values then known.

    These may vary over more manual axes than the values of the trace did.
    """
    env = dict(known)

    def read(atom: Atom) -> Any:
        return env[atom] if isinstance(atom, Slot) else atom.val

    for step in steps:
        operands = [read(atom) for atom in step.operands]
        if step.eqn.primitive.name == "pvary":
            values = [vary(x, step.eqn.params["axes"]) for x in operands]
        else:
            values = compat.bind(step.eqn, operands)
        for slot, value in zip(step.results, values, strict=True):
            env.setdefault(slot, value)
    return [read(atom) for atom in outputs]


def slots_of(atoms: Iterable[Atom]) -> Iterator[Slot]:
    """The variables among atoms, without literals."""
    return (atom for atom in atoms if isinstance(atom, Slot))


def dependents(steps: Sequence[Step], sources: Iterable[Slot]) -> set[Slot]:
    """Some values, and all that depend on them."""
    reached = set(sources)
    for step in steps:
        if not reached.isdisjoint(slots_of(step.operands)):
            reached.update(step.results)
    return reached


def value_numbers(
    steps: Sequence[Step], known: Mapping[Slot, Hashable] | None = None
) -> Callable[[Atom], int]:
    """Numbers values: equal numbers are computed in the same way.

    Args:
      steps: that compute the values.
      known: {slot: what it stands for}; all other values without a step stand for
        themselves.
    """
    numbers = ValueNumbers()
    found = {slot: numbers.number("known", x) for slot, x in (known or {}).items()}

    def number(atom: Atom) -> int:
        if not isinstance(atom, Slot):
            return numbers.literal(atom)
        if atom not in found:
            found[atom] = numbers.new()
        return found[atom]

    for step in steps:
        results = numbers.equation(step.eqn, list(map(number, step.operands)))
        for slot, own in zip(step.results, results, strict=True):
            found.setdefault(slot, own)
    return number


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

    program = StraightLine.of(jax.make_jaxpr(flat)(*params.values(), *leaves))
    live = set(slots_of(program.outputs))
    for step in program.needed(program.outputs):
        live.update(slots_of(step.operands))
    return {path for path, x in zip(paths, program.inputs, strict=False) if x in live}


def _constants(closed: Any) -> Iterator[tuple[Any, Any]]:
    return zip(closed.jaxpr.constvars, closed.consts, strict=True)


def _write_out(
    jaxpr: Any,
    slots: dict[Any, Slot],
    steps: list[Step],
    constants: dict[Slot, Any],
    written_out: Callable[[Any], bool],
    call: Any = None,
) -> list[Atom]:
    """Appends the steps of a jaxpr, and returns its results.

    Args:
      jaxpr: whose equations become steps.
      slots: {variable: slot} of its inputs; gains those of its other variables.
      steps: to which they are appended.
      constants: gains {slot: array} of the constants of calls.
      written_out: as in `StraightLine.of`.
      call: the equation that calls the jaxpr, whose names its equations get.
    """

    def atom(x: Any) -> Atom:
        return x if isinstance(x, core.Literal) else slots[x]

    for eqn in jaxpr.eqns:
        operands = tuple(map(atom, eqn.invars))
        eqn = eqn if call is None else compat.named_inside(eqn, call)
        if eqn.primitive.name in CALLS and written_out(eqn):
            body, consts = opened(called_jaxpr(eqn))
            inner = dict(zip(body.invars, operands, strict=True))
            for variable, value in zip(body.constvars, consts, strict=True):
                inner[variable] = slot = Slot(variable.aval)
                constants[slot] = value
            results = _write_out(body, inner, steps, constants, written_out, eqn)
            slots.update(zip(eqn.outvars, results, strict=True))
            continue
        results = tuple(Slot(v.aval) for v in eqn.outvars)
        slots.update(zip(eqn.outvars, results, strict=True))
        steps.append(Step(eqn, operands, results))
    return [atom(x) for x in jaxpr.outvars]
