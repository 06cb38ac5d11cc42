"""Bytes that the passes over one traced layer save, hand over and hold."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array, Params, num_bytes
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.rows import Rows
from meshpar.jaxprs.reach import ELEMENTWISE, REDUCTIONS
from meshpar.jaxprs.straight_line import Slot, StraightLine, dependents, slots_of
from meshpar.jaxprs.walk import equations, inner_jaxprs
from meshpar.layouts.axes import ways_of
from meshpar.lowering.padding import tree_bytes
from meshpar.models.layer_stack import LayeredModel


def residuals_of(
    fn: Callable,
    trained: frozenset[str],
    weights: Any,
    *args: Any,
    kept: Callable[[Any], Any] = lambda x: (),
) -> list[Any]:
    """Values that the backward pass of fn(weights, x, ...) saves, but for arguments.

    Args:
      fn: the function.
      trained: paths of the weights that have a gradient.
      weights: its weights.
      *args: x and other arguments.
      kept: x -> arrays in it that are not counted, either.
    """

    def residuals(weights: Any, x: Any, *rest: Any) -> list[Array]:
        def run(leaves: Any, x: Any) -> Any:
            return fn(weights | leaves, x, *rest)

        vjp = jax.vjp(run, {p: w for p, w in weights.items() if p in trained}, x)[1]
        own = jax.tree.leaves((weights, rest, kept(x)))
        return [x for x in jax.tree.leaves(vjp) if not any(x is w for w in own)]

    return residuals(weights, *args)


_VIEWS = frozenset(
    ("reshape", "squeeze", "expand_dims", "transpose", "name", "copy", "pvary")
    + ("sharding_constraint",)
)
"""Primitives whose result has the numbers of their operand."""

_MOVED = frozenset("broadcast_in_dim split concatenate slice pad rev iota".split())
"""Other primitives that compute nothing."""


def fused_bytes(
    fn: Callable,
    trained: frozenset[str],
    weights: Any,
    *args: Any,
    kept: Callable[[Any], Any],
) -> int:
    """Bytes that a compiler saves for fn's backward pass where no loop divides the two.

    It keeps what matmuls and kernels read and make; all else that the backward pass
    reads is computed from that where it is read. Takes the arguments of `residuals_of`.
    """

    def saved(weights: Any, *args: Any) -> list[Any]:
        return residuals_of(fn, trained, weights, *args, kept=kept)

    line = StraightLine.of(jax.make_jaxpr(saved)(weights, *args))
    given = line.inputs[len(jax.tree.leaves(weights)) :]
    activations = dependents(line.steps, given)
    fused = ELEMENTWISE | REDUCTIONS | _VIEWS | _MOVED
    source: dict[Slot, Slot] = {}  # {value: the one of which it is a view}

    def sources(atoms: Iterable[Any]) -> list[Slot]:
        return [source.get(slot, slot) for slot in slots_of(atoms)]

    anchors, operands = {*given}, {}
    for step in line.steps:
        of_step, name = sources(step.operands), step.eqn.primitive.name
        if name in _VIEWS:
            source |= dict.fromkeys(step.results, *of_step)
        elif name not in fused:
            anchors.update(step.results, of_step)
        operands |= dict.fromkeys(step.results, of_step)
    seen, left, total = set(), sources(line.outputs), 0
    while left:
        slot = left.pop()
        if slot in seen or slot not in activations:
            continue
        seen.add(slot)
        if slot in anchors:
            total += num_bytes(slot.aval)
        else:
            left.extend(operands[slot])
    return total


class Deferred(NamedTuple):
    """Bytes that one part of a backward pass hands over to the other.

    Attributes:
      size: without padding.
      padding: of heads that are narrower than the lanes of a tile.
    """

    size: int
    padding: int


def deferred_bytes(
    lanes: int,
    layer: Callable,
    trained: frozenset[str],
    weights: Params,
    x: Any,
    key: Array,
    context: Any,
    kept: Callable[[Any], Any],
) -> Deferred:
    """Bytes that the first part of a backward pass hands over to the second part.

    Takes the arguments of `residuals_of`, and the key and context of the layer.
    """
    stack = {path: w[None] for path, w in weights.items()}
    leaves = {path: w for path, w in stack.items() if path in trained}
    constants = {path: w for path, w in stack.items() if path not in trained}
    scan = LayerScan(
        lambda weights, x, _, context, __: layer(weights, x, key, context),
        lambda leaves, constants: leaves | constants,
        lambda gradient: gradient,
        context,
        kept,
    )
    rows = Rows(0, jnp.zeros(1, jnp.int32))
    y, residuals = scan.forward(leaves, constants, x, rows)
    state = scan.backward_input(leaves, constants, residuals, y, rows)[1]
    size = tree_bytes(state.arrays)
    return Deferred(size, tree_bytes(state.arrays, lanes) - size)


def logits_bytes(layered: LayeredModel, *args: Any) -> int:
    """Bytes of the largest result of a matmul in head_loss(*args), in float32."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(layered.head_loss(*args)))
    matmuls = (
        eqn.outvars[0].aval.size
        for eqn in equations(jaxpr(*args).jaxpr)
        if eqn.primitive.name == "dot_general"
    )
    return 4 * max(matmuls, default=0)


class GroupedRows(NamedTuple):
    """Bytes of the rows that grouped matmuls read and write.

    Attributes:
      whole: of those as wide as the activations, which `tensor` does not split.
      split: of the others.
    """

    whole: int = 0
    split: int = 0


def grouped_rows(jaxpr: Any, x: Any) -> GroupedRows:
    """The rows that the grouped matmuls of a layer of activations x read and write."""
    embed = jax.tree.leaves(x)[0].shape[-1]

    def rows(jaxpr: Any) -> np.ndarray:
        own: dict[Any, Any] = {}
        total = np.zeros(2, np.int64)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("ragged_dot"):
                own |= {x: x.aval for x in (eqn.invars[0], *eqn.outvars)}
            devices = 1
            if eqn.primitive.name == "shard_map":  # Inside are shapes of one device.
                sizes = eqn.params["mesh"].shape
                devices = ways_of(eqn.params["newly_manual_axes"], sizes)
            for inner in inner_jaxprs(eqn):
                total += devices * rows(inner)
        for aval in own.values():
            total[int(aval.shape[-1] != embed)] += num_bytes(aval)
        return total

    return GroupedRows(*map(int, rows(jaxpr)))
