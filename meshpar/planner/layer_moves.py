"""Collectives inside a layer over `expert` and `context`, scaled from a few traces.

A layer is traced with few rows, and without the axes that split rows alone: what it
moves grows with the rows. Many layouts follow from others (`exchanges`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.written import WrittenCollective
from meshpar.layouts.axes import CONTEXT, EXPERT
from meshpar.layouts.layout import Layout
from meshpar.layouts.remat import EXPERT_ROWS, keeps_by_name
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_collectives import layer_collectives
from meshpar.once import Once
from meshpar.planner.exchanges import Law, exchange_of, weighted
from meshpar.planner.facts import Facts

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
        self._traces = Once()
        self._found: dict[tuple, list[WrittenCollective]] = {}

    def of(self, layout: Layout, remat: str, output: bool) -> list[WrittenCollective]:
        """Collectives of one layer, forward and backward, in one microbatch.

        Args:
          layout: of the step.
          remat: the layer's policy.
          output: whether the layer's output is read, and not its gradients alone.
        """
        key = self.depend_on(layout), remat, output
        if key not in self._found:
            self._found[key] = self._scaled(*key)
        return self._found[key]

    def depend_on(self, layout: Layout) -> tuple[Layout, float, int]:
        """The properties of a layout on which the collectives of a layer depend.

        Returns:
          Its exchange, how many times the rows that are traced, and the size of
          `tensor`.
        """
        rows = self._facts.rows / layout.num_token_shards / layout.microbatches
        return exchange_of(layout), rows * layout.context / _ROWS, layout.tensor

    def _scaled(
        self, key: tuple[Layout, float, int], remat: str, output: bool
    ) -> list[WrittenCollective]:
        """`of`, with so many times the rows that are traced."""
        found, (exchange, times, tensor) = [], key
        for key, total in self._total(exchange, remat, output).items():
            kind, axes, why, may_drop, partial, backward = key
            # `tensor` splits heads, and no rows of experts.
            ways = tensor if axes == (CONTEXT,) else 1
            runs = max(1, round(total.runs))
            size = round(times * total.size / ways / runs)
            group = math.prod(exchange.sizes[axis] for axis in axes)
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
            law = self._facts.law_of(exchange, moves=True)
            own = remat, output
            self._totals[key] = self._summed(law, *own) if law else self._read(*key)
        return self._totals[key]

    def _summed(self, law: Law, remat: str, output: bool) -> dict[_Kind, _Total]:
        # What experts save wants the attention before them.
        reads = law.along_each and keeps_by_name(remat, EXPERT_ROWS)
        every = [
            self._total(source, remat, output or reads and source.expert == 1)
            for source in law.sources
        ]
        if not law.along_each:  # The larger size chose its collectives.
            every[0] = _moved_alike(law.sources[0], *every)
        none, found = _Total(0.0, 0.0), {}
        for key in dict.fromkeys(itertools.chain(*every)):
            own = [total.get(key, none) for total in every]
            runs = weighted(law.runs, (x.runs for x in own))
            size = weighted(law.bytes, (x.size for x in own))
            found[key] = _Total(runs, size)
        # What is summed over all tokens is summed over both axes at once.
        experts = {(k[0], k[2], k[-1]): k for k in found if k[1] == (EXPERT,)}
        for key in [key for key in found if key[1] == (CONTEXT,)]:
            kind, _, why, *flags, backward = key
            if other := experts.get((kind, why, backward)):
                del found[other]
                found[kind, (EXPERT, CONTEXT), why, *flags, backward] = found.pop(key)
        return found

    def _read(self, exchange: Layout, remat: str, output: bool) -> dict[_Kind, _Total]:
        """`_total` of an exchange that is traced, with all policies of a search."""
        if math.prod(exchange.sizes.values()) == 1:
            return {}
        remats = self._facts.traced_with(remat, exchange)
        key = exchange, remats
        traced = self._traces.of(key, lambda: self._traced(*key))
        return _totals(traced(remat, output))

    def _traced(
        self, exchange: Layout, remats: tuple[str, ...]
    ) -> Callable[[str, bool], list[WrittenCollective]]:
        """`layer_collectives` of an exchange."""
        layered, plan, mesh, batch = self._facts.of_trace(exchange, _ROWS)
        return layer_collectives(Frame(layered, plan, mesh, ()), batch, remats)


def _moved_alike(
    exchange: Layout, totals: Mapping[_Kind, _Total], others: Mapping[_Kind, _Total]
) -> dict[_Kind, _Total]:
    """Totals of an exchange, moved by the kinds of collectives that others chose.

    A small tensor is gathered at once in one layout, and goes around a ring in another.
    """
    kinds, found = {key[1:]: key[0] for key in others}, {}
    for (kind, axes, *rest), total in totals.items():
        like = kinds.get((axes, *rest), kind)
        group = math.prod(exchange.sizes[axis] for axis in axes)
        sent, per_byte = (cost.wire_bytes(x, 1.0, group) for x in (kind, like))
        found[like, axes, *rest] = total._replace(size=total.size * sent / per_byte)
    return found


def _totals(moves: Iterable[WrittenCollective]) -> dict[_Kind, _Total]:
    """Collectives added up by kind and purpose."""
    totals: dict[_Kind, _Total] = {}
    for x in moves:
        key = x.kind, x.axes, x.why or x.source, x.may_drop, x.partial, x.backward
        runs, size = totals.get(key, _Total(0.0, 0.0))
        once = x.runs or 1
        totals[key] = _Total(runs + once, size + once * x.payload_bytes)
    return totals
