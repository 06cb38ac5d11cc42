"""`search`: layouts of a model without layers, from a search over its operators.

Every mesh of `data`, `fsdp`, `expert` and `tensor` is searched by Markov chains. The
best states, and those that need least memory, become proposals.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from meshpar.compose import combination, lower
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.axes import BATCH_AXES, DATA, EXPERT, FSDP, TENSOR
from meshpar.layouts.layout import DEFAULTS, Layout
from meshpar.layouts.param import Param
from meshpar.layouts.refusals.of_training import OF_TRAINING
from meshpar.layouts.refusals.reasons import first_reason
from meshpar.layouts.rules import ACTIVATION_RULES
from meshpar.layouts.wanted import Wanted
from meshpar.lowering.memory import Memory
from meshpar.lowering.optimizer import optimizer_of
from meshpar.mesh.machine import Machine, machine_of
from meshpar.mesh.mesh import make_mesh
from meshpar.mesh.topologies import devices_of
from meshpar.methods.flexflow.choices import SEARCHED, Choices, State
from meshpar.methods.flexflow.graph import Graph
from meshpar.methods.flexflow.ledger import Ledger
from meshpar.methods.flexflow.markov import MarkovSearch
from meshpar.methods.flexflow.simulator import StepSeconds
from meshpar.methods.flexflow.step_trace import dim_name, trace_step
from meshpar.methods.flexflow.strategies import Strategies
from meshpar.models.model import Model
from meshpar.replicated import num_rows

_MOST_TENSOR = 16
"""Most devices over `tensor`: more of them than one host's have slow links between."""

_WORK, _MOST = 1_500_000, 8000
"""Operators to simulate over all chains, and most proposals for that."""

_CHAINS = 2
"""Chains of a mesh: from data parallelism, and from the layout's default rules."""

_ROWS = frozenset(BATCH_AXES)

_NOTHING = "no dims of the parameters divide over the axes, or none may be split"

_LEAST, _KEPT, _SMALLER = 60, 4, 0.97
"""Fewest proposals of a chain; most proposals that a mesh gives, and the share of the
memory of a faster one that each of them may need."""

_RULES = ("params", "activations", "paths", "allow", "min_shard_size", "zero", "remat")
"""Options that may be required beside the sizes of axes."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One layout, with memory and time of its simulated step.

    Attributes:
      layout: the layout.
      memory: bytes on one device at the peak of a step.
      seconds: time of a step, by term.
    """

    layout: Layout
    memory: Memory
    seconds: StepSeconds


@dataclasses.dataclass(frozen=True)
class Proposals:
    """Layouts of one model on one machine, that a search has found.

    Attributes:
      fitting: those that fit into memory, fastest first.
      too_large: those that need more memory than there is, smallest first.
      refused: why others were refused.
    """

    fitting: tuple[Proposal, ...]
    too_large: tuple[Proposal, ...]
    refused: tuple[LayoutError, ...]

    @property
    def layout(self) -> Layout:
        """The best layout."""
        return self.fitting[0].layout


def search(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    batch: Any,
    topology: str | Sequence[jax.Device] | None = None,
    *,
    compute_dtype: Any = None,
    memory: int | None = None,
    require: str = "",
    forbid: str = "",
    slowdown: float = 1.0,
) -> Proposals:
    """Searches layouts of a model without layers, and compiles nothing.

    Each parameter without names gets a rule of its own, which `meshpar.plan` does not
    try. All arguments are as there.

    Args:
      model: without layers.
      optimizer: of the training.
      batch: arrays or ShapeDtypeStructs.
      topology: the machine; the devices of this one by default.
      compute_dtype: of the loss.
      memory: bytes that a step may take on one device.
      require: items that layouts must have, such as "zero=3".
      forbid: names of axes and options that they must not use.
      slowdown: what steps took over what was predicted.

    Raises:
      LayoutError: no layout fits the model, the batch, the memory and what is wanted.
      MeshparError: the model has layers, the topology does not exist, or an option is
        required that is not predicted.
    """
    if model.layered is not None:
        raise MeshparError(
            "flexflow.search is for models without layers: use meshpar.plan, or leave "
            "out layers= where the model is made"
        )
    wanted = Wanted.of(require, forbid)
    devices = devices_of(topology)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    machine = machine_of(devices, memory, slowdown)
    found, refused = _proposals(model, optimizer, batch, compute_dtype, machine, wanted)
    lowered = functools.partial(lower, model, optimizer, batch=batch, devices=devices)
    fitting = [p for p in found if p.memory.total <= machine.memory_bytes]
    too_large = [p for p in found if p.memory.total > machine.memory_bytes]
    fitting.sort(key=lambda p: (p.seconds.total, p.memory.total))
    too_large.sort(key=lambda p: p.memory.total)
    while fitting:
        try:
            lowered(fitting[0].layout, compute_dtype=compute_dtype)
        except LayoutError as error:
            refused.append(error)
            del fitting[0]
        else:
            return Proposals(tuple(fitting), tuple(too_large), tuple(refused))
    raise LayoutError(_nothing(machine, too_large, refused))


def _nothing(
    machine: Machine, too_large: Sequence[Proposal], refused: Sequence[LayoutError]
) -> str:
    """The message of an error: no layout fits, and which comes nearest."""
    lines = [f"flexflow: no layout of {len(machine.devices)} devices fits"]
    if too_large:
        nearest, budget = too_large[0], machine.memory_bytes
        lines.append(
            f"the smallest, {nearest.layout}, needs {nearest.memory.total / 1e9:.1f} "
            f"GB of {budget / 1e9:.1f} GB a device; use more devices or a smaller batch"
        )
    return "\n  ".join([*lines, *dict.fromkeys(map(str, refused[:3]))])


def _proposals(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    batch: Any,
    compute_dtype: Any,
    machine: Machine,
    wanted: Wanted,
) -> tuple[list[Proposal], list[LayoutError]]:
    """Searches all meshes: (proposals, why layouts were refused).

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
    rows = num_rows(batch)
    meshes = list(_meshes(len(machine.devices), rows, model.params, wanted))
    spaces = [s for sizes in meshes for s in _levels(sizes, names, required)]
    budget = min(_WORK // len(graph.operators), _MOST)
    budget = max(_LEAST, budget // max(1, _CHAINS * len(spaces)))
    found: list[Proposal] = []
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
                found += _proposal(model, strategies, key, wanted)
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
                f"require={name}={value}: this search predicts "
                f"{', '.join(known)} alone; leave it out, or use meshpar.plan"
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
    most = {DATA: rows, FSDP: rows, EXPERT: rows, TENSOR: _MOST_TENSOR}
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


def _proposal(
    model: Model, strategies: Strategies, state: State, wanted: Wanted
) -> Iterator[Proposal]:
    """The proposal of a state, if it is as wanted.

    Raises:
      LayoutError: the layout, the devices or the lowering cannot honour it.
    """
    layout, cost = strategies.choices.layout(state), strategies.known[state]
    if not wanted.keeps(layout):
        return
    if reason := first_reason(combination(model, layout), OF_TRAINING):
        raise LayoutError(reason)
    make_mesh(layout, strategies.machine.devices)
    yield Proposal(layout, cost.memory, cost.seconds)
