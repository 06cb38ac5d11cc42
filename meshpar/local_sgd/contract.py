"""Contracts of local SGD: declared collectives against its compiled steps."""

import functools
from collections.abc import Callable

import jax

from meshpar.arrays import num_bytes
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract
from meshpar.layouts.axes import AXES
from meshpar.layouts.plan import LeafPlan
from meshpar.local_sgd.exchange import Exchange
from meshpar.local_sgd.schedule import Actions, Transfer
from meshpar.local_sgd.step_programs import StepPrograms
from meshpar.local_sgd.sync_state import REASONS, SyncState
from meshpar.lowering.inspection import read_collectives


def synchronization_leaves(sync: SyncState) -> tuple[LeafPlan, ...]:
    """The plan of the arrays that one device keeps to synchronize replicas.

    Args:
      sync: ShapeDtypeStructs with the mesh axes as leading dims.
    """
    leaves = []
    for name, tree in sync._asdict().items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = leaf.shape[len(AXES) :]
            leaf_plan = LeafPlan(
                path=name + jax.tree_util.keystr(keys),
                kind="synchronization",
                shape=shape,
                dtype=leaf.dtype,
                names=None,
                spec=((),) * len(shape),
                reason=REASONS[name],
                bytes_per_device=num_bytes(jax.ShapeDtypeStruct(shape, leaf.dtype)),
            )
            leaves.append(leaf_plan)
    return tuple(leaves)


def sent_bytes(exchange: Exchange, actions: Actions) -> float:
    """Bytes that one device sends to other replicas in a step."""
    terms = ()
    if actions.transfer is not None:
        terms += exchange.terms(actions.transfer)
    if actions.at_once and actions.launch:
        terms += exchange.terms_at_once(len(actions.launch), actions.round)
    return float(Contract(terms).wire_bytes)


def contract_beside(
    programs: StepPrograms, step: Contract, transfer: Transfer | None
) -> Contract:
    """The contract of the step during which a transfer happens.

    Args:
      programs: the programs of the mode.
      step: the contract of the inner step.
      transfer: the transfer, or None.
    """
    moved = () if transfer is None else programs.steps.exchange.terms(transfer)
    return Contract((*step.terms, *moved))


def synchronization(programs: StepPrograms) -> tuple[Contract, list[Collective]]:
    """The contract of synchronizing all fragments, and the collectives found."""
    steps = programs.steps
    fragments = tuple(range(steps.mode.fragments))
    at_once = functools.partial(steps.synchronized, fragments, 0)
    terms = steps.exchange.terms_at_once(len(fragments))
    return Contract(terms), _collectives(programs, at_once)


def mode_violations(programs: StepPrograms, step: Contract) -> list[str]:
    """Violations of the contracts of all programs that the mode runs.

    Args:
      programs: the programs of the mode.
      step: the contract of the inner step.
    """
    mode, steps, violations = programs.steps.mode, programs.steps, []
    for transfer in (None, *steps.exchange.transfer_kinds):
        collectives = programs.inspection(transfer).collectives
        lines = contract_beside(programs, step, transfer).violations(collectives)
        beside = "" if transfer is None else f"beside {_parts(transfer)}: "
        violations += [f"{beside}{line}" for line in lines]
    if not mode.staleness or callable(mode.period):
        contract, collectives = synchronization(programs)
        lines = contract.violations(collectives)
        violations += [f"at once: {line}" for line in lines]
    if mode.staleness:
        for local in (steps.launched, steps.arrived):
            collectives = _collectives(programs, functools.partial(local, 0))
            lines = Contract(()).violations(collectives)
            violations += [f"{local.__name__}: {line}" for line in lines]
    return violations


def busiest(
    programs: StepPrograms, step: Contract
) -> tuple[Contract, list[Collective]]:
    """The contract of the step that sends most, and the collectives found in it.

    Without staleness it is the inner step together with the synchronization after it.

    Args:
      programs: the programs of the mode.
      step: the contract of the inner step.
    """
    kinds = programs.steps.exchange.transfer_kinds
    if not kinds:
        contract, collectives = synchronization(programs)
        inner = programs.inspection(None).collectives
        return Contract((*step.terms, *contract.terms)), [*inner, *collectives]
    contracts = {kind: contract_beside(programs, step, kind) for kind in kinds}
    kind = max(contracts, key=lambda kind: contracts[kind].wire_bytes)
    return contracts[kind], programs.inspection(kind).collectives


def describe_mode(exchange: Exchange) -> str:
    """Says in one line when replicas are synchronized, and the bytes that it sends."""
    mode = exchange.mode
    sent = Contract(exchange.terms_at_once(mode.fragments)).wire_bytes
    every, rate = "in periods that change", ""
    if not callable(mode.period):
        every = f"every {mode.period} steps"
        rate = f", {sent / mode.period:.0f} per step"
    how = f"gossip {mode.gossip.graph}" if mode.gossip else f"merge {mode.merge}"
    return (
        f"local SGD: {exchange.fragments.replicas} replicas, {mode.fragments} "
        f"fragment(s) {every}, {mode.staleness} steps late, {how}, wire {mode.wire}; a "
        f"device sends {sent:.0f} bytes over replica for all{rate}"
    )


def _collectives(programs: StepPrograms, fn: Callable) -> list[Collective]:
    """The collectives of a function from state to state, compiled."""
    mesh = programs.steps.lowering.mesh
    with jax.set_mesh(mesh):
        jitted = jax.jit(fn, out_shardings=programs.state_shardings)
        compiled = jitted.lower(programs.abstract_state).compile()
    return read_collectives(compiled, mesh)


def _parts(transfer: Transfer) -> str:
    parts = {"a scatter": transfer.scatter, "a gather": transfer.gather}
    return " and ".join(name for name, number in parts.items() if number is not None)
