"""Collectives inside a layer over `expert` and `context`, scaled from a few traces.

A layer is traced with few rows, and without the axes that split rows alone: what it
moves grows with the rows. Larger sizes of `context` follow from two small ones
(`context_sizes`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from meshpar.contracts.written import WrittenCollective
from meshpar.layouts.axes import AXES, CONTEXT
from meshpar.layouts.layout import Layout
from meshpar.layouts.resolve import make_plan
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_collectives import layer_collectives
from meshpar.planner.context_sizes import (
    TRACED_CONTEXTS,
    by_parts,
    by_steps,
    follows,
)
from meshpar.planner.facts import Facts, exchange_of

_ROWS = 2
"""Rows of a device that are traced."""


class _Total(NamedTuple):
    """Runs and bytes of collectives of one kind and purpose."""

    runs: float
    size: float


_Kind = tuple[Any, ...]
"""(kind, axes, why, may_drop, partial, backward) of a collective."""


class LayerMoves:
    """The collectives of one layer under the layouts of a search."""

    def __init__(self, facts: Facts):
        """Traces nothing yet; `facts` are those of the model."""
        self._facts = facts
        self._totals: dict[tuple, dict[_Kind, _Total]] = {}

    def of(self, layout: Layout, remat: str, output: bool) -> list[WrittenCollective]:
        """Collectives of one layer, forward and backward, in one microbatch.

        Args:
          layout: of the step.
          remat: the layer's policy.
          output: whether the layer's output is read, and not its gradients alone.
        """
        rows = self._facts.rows / layout.num_token_shards / layout.microbatches
        times = rows * layout.context / _ROWS
        exchange = exchange_of(layout)
        found = []
        for key, total in self._total(exchange, remat, output).items():
            kind, axes, why, may_drop, partial, backward = key
            # `tensor` splits heads, and no rows of experts.
            ways = layout.tensor if axes == (CONTEXT,) else 1
            runs = max(1, round(total.runs))
            size = round(times * total.size / ways / runs)
            group = math.prod(layout.sizes[axis] for axis in axes)
            move = WrittenCollective(kind, axes, group, runs, size, why, "")
            found.append(
                dataclasses.replace(
                    move, may_drop=may_drop, partial=partial, backward=backward
                )
            )
        return found

    def _total(self, exchange: Layout, remat: str, output: bool) -> dict[_Kind, _Total]:
        key = exchange, remat, output
        if key not in self._totals:
            make = self._scaled if follows(exchange) else self._traced
            self._totals[key] = make(exchange, remat, output)
        return self._totals[key]

    def _scaled(
        self, exchange: Layout, remat: str, output: bool
    ) -> dict[_Kind, _Total]:
        few, many = (
            self._total(dataclasses.replace(exchange, context=n), remat, output)
            for n in TRACED_CONTEXTS
        )
        none = _Total(0.0, 0.0)
        return {
            key: _Total(
                by_steps(few.get(key, none).runs, many.get(key, none).runs, exchange),
                by_parts(few.get(key, none).size, many.get(key, none).size, exchange),
            )
            for key in few | many
        }

    def _traced(
        self, exchange: Layout, remat: str, output: bool
    ) -> dict[_Kind, _Total]:
        facts, sizes = self._facts, tuple(exchange.sizes.values())
        state = facts.optimizer.abstract_state
        plan = make_plan(exchange, facts.model.params, state, facts.compute_dtype)
        devices = np.array(facts.devices[: math.prod(sizes)]).reshape(sizes)
        mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        frame = Frame(facts.layered, plan, mesh, ())
        batch = facts.batch_of(_ROWS * exchange.expert)
        totals: dict[_Kind, _Total] = {}
        for x in layer_collectives(frame, batch, remat, output):
            key = x.kind, x.axes, x.why or x.source, x.may_drop, x.partial, x.backward
            runs, size = totals.get(key, _Total(0.0, 0.0))
            once = x.runs or 1
            totals[key] = _Total(runs + once, size + once * x.payload_bytes)
        return totals
