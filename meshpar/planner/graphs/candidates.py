"""Candidates of a model that is no stack of layers, from a search over its operators.

Every mesh of `data`, `fsdp`, `expert` and `tensor` is searched by Markov chains. The
best states, and those that need least memory, become candidates.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import optax

from meshpar.compose import combination
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.axes import BATCH_AXES, DATA, EXPERT, FSDP, TENSOR
from meshpar.layouts.layout import DEFAULTS
from meshpar.layouts.param import Param
from meshpar.layouts.refusals.of_training import OF_TRAINING
from meshpar.layouts.refusals.reasons import first_reason
from meshpar.layouts.rules import ACTIVATION_RULES
from meshpar.lowering.optimizer import optimizer_of
from meshpar.mesh.machine import Machine
from meshpar.mesh.mesh import make_mesh
from meshpar.models.model import Model
from meshpar.planner.candidate import Candidate
from meshpar.planner.graphs.choices import SEARCHED, Choices, State
from meshpar.planner.graphs.graph import Graph
from meshpar.planner.graphs.ledger import Ledger
from meshpar.planner.graphs.markov import MarkovSearch
from meshpar.planner.graphs.step_trace import dim_name, trace_step
from meshpar.planner.graphs.strategies import Strategies
from meshpar.planner.space import MOST_TENSOR, Wanted

_WORK, _MOST = 1_500_000, 8000
"""Operators to simulate over all chains, and most proposals for that."""

_CHAINS = 2
"""Chains of a mesh: from data parallelism, and from the layout's default rules."""

_ROWS = frozenset(BATCH_AXES)

_NOTHING = "no dims of the parameters divide over the axes, or none may be split"

_LEAST, _KEPT, _SMALLER = 60, 4, 0.97
"""Fewest proposals of a chain; most candidates that a mesh gives, and the share of the
memory of a faster one that each of them may need."""

_RULES = ("params", "activations", "paths", "allow", "min_shard_size", "zero", "remat")
"""Options that may be required beside the sizes of axes."""


def graph_candidates(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    batch: Any,
    compute_dtype: Any,
    machine: Machine,
    wanted: Wanted,
) -> tuple[list[Candidate], list[LayoutError]]:
    """Searches all meshes: (candidates, why layouts were refused).

    Args:
      model: without layers.
      optimizer: as in `meshpar.lower`.
      batch: abstract batch [batch, ...].
      compute_dtype: as in `meshpar.lower`.
      machine: to plan for.
      wanted: what the user asks for.

    Raises:
      MeshparError: an option is required whose cost is not predicted.
      LayoutError: the model names a dim that has no rule.
    """
    _check(wanted)
    required = {k: v for k, v in wanted.required.items() if k not in SEARCHED}
    traced = {k: v for k, v in required.items() if k in ("activations", "remat")}
    graph = trace_step(model, batch, compute_dtype, traced)
    state = optimizer_of(model, optimizer).abstract_state
    names = _constrained(graph)
    rows = jax.tree.leaves(batch)[0].shape[0]
    meshes = list(_meshes(len(machine.devices), rows, model.params, wanted))
    spaces = [s for sizes in meshes for s in _levels(sizes, names, required)]
    budget = min(_WORK // len(graph.operators), _MOST)
    budget = max(_LEAST, budget // max(1, _CHAINS * len(spaces)))
    found: list[Candidate] = []
    refused: list[LayoutError] = []
    for sizes, given in spaces:
        choices = Choices(model.params, names, sizes, given)
        ledger = Ledger(model, state, compute_dtype, sizes, given)
        strategies = Strategies(graph, choices, ledger, machine, compute_dtype)
        search = MarkovSearch(choices.all, strategies.price, budget)
        search.run((choices.data_parallel, choices.by_default_rules))
        if not strategies.known:
            refused.append(LayoutError(f"{_NOTHING}; {sizes}"))
        for key in _kept(strategies):
            try:
                found += _candidate(model, strategies, key, wanted)
            except LayoutError as error:
                refused.append(error)
    return found, refused


def _levels(
    sizes: Mapping[str, int], names: Collection[str], required: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, int], dict[str, Any]]]:
    """A mesh, and required fields with the ZeRO levels to try.

    Under zero=3 a compiler gathers weights over `fsdp` as it likes, and in models that
    do not constrain the rows of their activations it may split these like the weights
    (3 to 4 times the traffic, seen in jaxlib 0.12.0). zero=2 gathers them at once.
    zero=1 moves what zero=2 moves and holds more.
    """
    if sizes[FSDP] == 1 or required.get("zero"):
        yield sizes, dict(required)
        return
    rows = {name for name in names if set(ACTIVATION_RULES.get(name, ())) & _ROWS}
    for level in (2, None) if rows else (2,):  # None is 3.
        yield sizes, {**required, "zero": level}


def _check(wanted: Wanted) -> None:
    """Refuses options whose cost is not predicted."""
    known = (*SEARCHED, *_RULES)
    for name, value in wanted.required.items():
        if name not in known and value != DEFAULTS[name]:
            raise MeshparError(
                f"require={name}={value}: for a model without layers a plan predicts "
                f"{', '.join(known)} alone; leave it out, or name the model's layers "
                "by layers= (docs/your_model.md)"
            )


def _constrained(graph: Graph) -> set[str]:
    """Names of dims that the model constrains in activations."""
    dims = (dim for op in graph.operators for dim in op.target or ())
    axes = (axis for dim in dims for axis in dim or ())
    return {name for axis in axes if (name := dim_name(axis))}


def _meshes(
    count: int, rows: int, params: Mapping[str, Param], wanted: Wanted
) -> Iterator[dict[str, int]]:
    """{axis: size} of all meshes that fill the devices and split the rows.

    `expert` is for models without a dim of experts, whose moves no trace shows, and
    with parameters without names; it does not go with `tensor`, as both hold weights.
    """
    most = {DATA: rows, FSDP: rows, EXPERT: rows, TENSOR: MOST_TENSOR}
    mixes = any(EXPERT in (p.names or ()) for p in params.values())
    if mixes or all(p.names is not None for p in params.values()):
        most[EXPERT] = 1
    most |= {axis: 1 for axis in most if axis in wanted.forbidden}
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for tensor in divisors:
        for expert in divisors:
            for fsdp in divisors:
                inner = tensor * expert * fsdp
                if count % inner or min(tensor, expert) > 1:
                    continue
                sizes = {
                    DATA: count // inner,
                    FSDP: fsdp,
                    EXPERT: expert,
                    TENSOR: tensor,
                }
                asked = wanted.required.items()
                if (
                    all(size <= most[axis] for axis, size in sizes.items())
                    and all(sizes.get(axis, value) == value for axis, value in asked)
                    and rows % (count // tensor) == 0
                ):
                    yield sizes


def _kept(strategies: Strategies) -> list[State]:
    """The fastest state, and slower ones with so much less memory each.

    Without one that fits, the smallest.
    """
    known, kept = strategies.known, []
    fast = [state for state, cost in known.items() if strategies.fits(cost)]
    least = math.inf
    for state in sorted(fast, key=lambda state: known[state].seconds.total):
        if known[state].memory.total < _SMALLER * least and len(kept) < _KEPT:
            kept.append(state)
            least = known[state].memory.total
    smallest = min(known, key=lambda s: known[s].memory.total, default=None)
    return kept or [smallest] * (smallest is not None)


def _candidate(
    model: Model, strategies: Strategies, state: State, wanted: Wanted
) -> Iterator[Candidate]:
    """The candidate of a state, if it is as wanted.

    Raises:
      LayoutError: the layout, the devices or the lowering cannot honour it.
    """
    layout, cost = strategies.choices.layout(state), strategies.known[state]
    if not wanted.keeps(layout):
        return
    if reason := first_reason(combination(model, layout), OF_TRAINING):
        raise LayoutError(reason)
    make_mesh(layout, strategies.machine.devices)
    seconds = cost.seconds
    yield Candidate(layout, cost.memory, seconds, seconds.wire_bytes, None)
