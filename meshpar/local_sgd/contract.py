"""What local SGD declares: contracts of its steps, traffic and memory."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract
from meshpar.layouts.axes import AXES
from meshpar.layouts.plan import LeafPlan
from meshpar.local_sgd.exchange import WHY, SyncState
from meshpar.local_sgd.schedule import Schedule, Transfer


def kept_leaves(sync: SyncState) -> tuple[LeafPlan, ...]:
    """What one device keeps to synchronize replicas, from the abstract state."""
    leaves = []
    for name, tree in sync._asdict().items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = leaf.shape[len(AXES) :]
            one = LeafPlan(
                path=name + jax.tree_util.keystr(keys),
                kind="synchronization",
                shape=shape,
                dtype=leaf.dtype,
                names=None,
                spec=((),) * len(shape),
                reason=WHY[name],
                bytes_per_device=math.prod(shape) * leaf.dtype.itemsize,
            )
            leaves.append(one)
    return tuple(leaves)


def transfers(program: Any) -> list[Transfer]:
    """Every kind of transfer that occurs beside a step."""
    period = (program.mode.staleness + 1) * program.mode.fragments
    schedule = Schedule(dataclasses.replace(program.mode, period=period))
    steps = range(1, period * (2 + len(program.outer.rounds)))
    found = (schedule.actions(step).transfer for step in steps)
    return [*dict.fromkeys(program.kind(what) for what in found if what is not None)]


def contract_beside(program: Any, what: Transfer | None) -> Contract:
    """The contract of the step beside which `what` travels."""
    moved = () if what is None else program.outer.terms(what)
    return Contract((*program.contract.terms, *moved))


def mode_violations(program: Any) -> list[str]:
    """What any of the compiled steps does against its contract."""
    found = []
    for what in (None, *transfers(program)):
        collectives = program.collectives_of(program.step_program(what))
        beside = "" if what is None else f"beside {_name(what)}: "
        lines = contract_beside(program, what).violations(collectives)
        found += [f"{beside}{line}" for line in lines]
    if not program.mode.staleness or callable(program.mode.period):
        declared, moved = synchronization(program)
        found += [f"at once: {line}" for line in declared.violations(moved)]
    if program.mode.staleness:
        for small in (program.steps.launched, program.steps.arrived):
            moved = _collectives(program, functools.partial(small, 0))
            found += [f"{small.__name__}: {x}" for x in Contract(()).violations(moved)]
    return found


def busiest(program: Any) -> tuple[Contract, list[Collective]]:
    """Declared and found, of the step beside or after which most travels."""
    if not transfers(program):
        contract, found = synchronization(program)
        terms = (*program.contract.terms, *contract.terms)
        return Contract(terms), [*program.collectives, *found]
    contracts = {what: contract_beside(program, what) for what in transfers(program)}
    what = max(contracts, key=lambda what: contracts[what].wire_bytes)
    found = program.collectives_of(program.step_program(what))
    return contracts[what], found


def describe_mode(program: Any) -> str:
    """What is synchronized when, and what that sends."""
    mode, layout = program.mode, program.layout
    chunks = mode.num_chunks * mode.fragments
    terms = program.outer.terms(program.whole_transfer(0), chunks)
    sent = sum(term.wire_bytes for term in terms)
    period = mode.period if isinstance(mode.period, int) else None
    each = f"every {period} steps" if period else "in periods that change"
    rate = f", {sent / period:.0f} per step" if period else ""
    how = f"gossip {mode.gossip.graph}" if mode.gossip else f"merge {mode.merge}"
    return (
        f"local SGD: {layout.replica} replicas, {mode.fragments} fragment(s) {each},"
        f" {mode.staleness} steps late, {how}, wire {mode.wire}; a device sends "
        f"{sent:.0f} bytes over replica for all{rate}"
    )


def synchronization(program: Any) -> tuple[Contract, list[Collective]]:
    """Declared and found, of all fragments synchronized at once."""
    fragments = tuple(range(program.mode.fragments))
    chunks = program.mode.num_chunks * program.mode.fragments
    terms = program.outer.terms(program.whole_transfer(0), chunks)
    together = functools.partial(program.steps.synchronized, fragments, 0)
    return Contract(tuple(terms)), _collectives(program, together)


def _collectives(program: Any, fn: Callable) -> list[Collective]:
    """Those of a program from state to state."""
    with jax.set_mesh(program.mesh):
        jitted = jax.jit(fn, out_shardings=program.state_shardings)
        made = jitted.lower(program.abstract_state).compile()
    return program.collectives_of(made)


def _name(what: Transfer) -> str:
    parts = ("a scatter", what.scatter), ("a gather", what.gather)
    return " and ".join(name for name, number in parts if number is not None)
