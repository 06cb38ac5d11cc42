"""Contracts of local SGD: declared collectives against those of its compiled steps."""

import functools
from collections.abc import Callable
from typing import Protocol

import jax

from meshpar.arrays import num_bytes
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract
from meshpar.layouts.axes import AXES
from meshpar.layouts.plan import LeafPlan
from meshpar.local_sgd.exchange import Exchange
from meshpar.local_sgd.schedule import Actions, Transfer
from meshpar.local_sgd.steps import LocalState, LocalSteps
from meshpar.local_sgd.sync_state import REASONS, SyncState


class SynchronizedProgram(Protocol):
    """The parts of a `LocalProgram` whose contracts are checked.

    Attributes:
      steps: the pure functions of the mode.
      abstract_state: the state of all replicas, as ShapeDtypeStructs.
      state_shardings: its shardings.
      contract: the collectives declared for the inner step.
      collectives: the collectives of the compiled inner step.
    """

    @property
    def steps(self) -> LocalSteps: ...
    @property
    def abstract_state(self) -> LocalState: ...
    @property
    def state_shardings(self) -> LocalState: ...
    @property
    def contract(self) -> Contract: ...
    @property
    def collectives(self) -> list[Collective]: ...

    def step_program(self, transfer: Transfer | None) -> jax.stages.Compiled:
        """The compiled step during which a transfer happens."""

    def collectives_of(self, compiled: jax.stages.Compiled, /) -> list[Collective]:
        """The collectives of a compiled program."""


def synchronization_leaves(sync: SyncState) -> tuple[LeafPlan, ...]:
    """The plan of what one device keeps to synchronize replicas.

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


def transfers(program: SynchronizedProgram) -> list[Transfer]:
    """Every kind of transfer that occurs during a step."""
    return program.steps.exchange.transfer_kinds


def contract_beside(
    program: SynchronizedProgram, transfer: Transfer | None
) -> Contract:
    """The contract of the step during which a transfer happens."""
    moved = () if transfer is None else program.steps.exchange.terms(transfer)
    return Contract((*program.contract.terms, *moved))


def synchronization(
    program: SynchronizedProgram,
) -> tuple[Contract, list[Collective]]:
    """The contract of synchronizing all fragments, and the collectives found."""
    steps = program.steps
    fragments = tuple(range(steps.mode.fragments))
    at_once = functools.partial(steps.synchronized, fragments, 0)
    terms = steps.exchange.terms_at_once(len(fragments))
    return Contract(terms), _collectives(program, at_once)


def mode_violations(program: SynchronizedProgram) -> list[str]:
    """Violations of the contracts of all programs that the mode runs."""
    mode, steps, violations = program.steps.mode, program.steps, []
    for transfer in (None, *transfers(program)):
        collectives = program.collectives_of(program.step_program(transfer))
        lines = contract_beside(program, transfer).violations(collectives)
        beside = "" if transfer is None else f"beside {_parts(transfer)}: "
        violations += [f"{beside}{line}" for line in lines]
    if not mode.staleness or callable(mode.period):
        contract, collectives = synchronization(program)
        lines = contract.violations(collectives)
        violations += [f"at once: {line}" for line in lines]
    if mode.staleness:
        for local in (steps.launched, steps.arrived):
            collectives = _collectives(program, functools.partial(local, 0))
            lines = Contract(()).violations(collectives)
            violations += [f"{local.__name__}: {line}" for line in lines]
    return violations


def busiest(program: SynchronizedProgram) -> tuple[Contract, list[Collective]]:
    """The contract of the step that sends most, and the collectives found in it.

    Without staleness it is the inner step together with the synchronization after it.
    """
    kinds = transfers(program)
    if not kinds:
        contract, collectives = synchronization(program)
        terms = (*program.contract.terms, *contract.terms)
        return Contract(terms), [*program.collectives, *collectives]
    contracts = {kind: contract_beside(program, kind) for kind in kinds}
    kind = max(contracts, key=lambda kind: contracts[kind].wire_bytes)
    return contracts[kind], program.collectives_of(program.step_program(kind))


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


def _collectives(program: SynchronizedProgram, fn: Callable) -> list[Collective]:
    """The collectives of a function from state to state, compiled."""
    with jax.set_mesh(program.steps.lowering.mesh):
        jitted = jax.jit(fn, out_shardings=program.state_shardings)
        compiled = jitted.lower(program.abstract_state).compile()
    return program.collectives_of(compiled)


def _parts(transfer: Transfer) -> str:
    parts = {"a scatter": transfer.scatter, "a gather": transfer.gather}
    return " and ".join(name for name, number in parts.items() if number is not None)
