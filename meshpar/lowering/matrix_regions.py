"""The parts of an optimizer's update that need whole matrices, cut from its operations.

Regions begin and end where the fewest bytes cross their border.
"""

import dataclasses
import heapq
import itertools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from meshpar.jaxprs.layer_values import Value
from meshpar.jaxprs.one_of_batch import mixes_batch
from meshpar.jaxprs.reach import ELEMENTWISE
from meshpar.jaxprs.whole_matrices import needs_whole, num_matrices
from meshpar.layouts.plan import Spec
from meshpar.lowering.layer_update import Operation, needed
from meshpar.lowering.placed_values import Tensor, results_placed
from meshpar.lowering.region import Region


class Cut(NamedTuple):
    """An update of which regions are cut out.

    Attributes:
      operations: those that are in no region.
      regions: the regions.
      tensors: {number of a value: how it lies}.
      is_whole: whether the operations outside move nothing but sums.
    """

    operations: list[Operation]
    regions: list[Region]
    tensors: dict[int, Tensor]
    is_whole: bool


def find_regions(
    operations: Sequence[Operation],
    results: Collection[int],
    tensors: Mapping[int, Tensor],
    kept: dict[Hashable, Any],
) -> Cut:
    """Cuts regions out of an update.

    Args:
      operations: of the update, in order.
      results: numbers of the values that it gives.
      tensors: {number: how it lies} of the arguments and constants.
      kept: which regions mix the matrices of a batch, as found out before.
    """
    return _Cutter(operations, results, tensors, kept).cut()


class _Cutter:
    """Divides the operations of an update into regions and others.

    Attributes:
      results: numbers of the values that the update gives.
      needed: the operations that results depend on, in order.
      given: {number: how it lies} of the arguments and constants.
      kept: which regions mix the matrices of a batch.
      tensors: how every value lies.
      makers: {number of a value: number of its operation}.
      readers: {number of a value: numbers of the operations that read it}.
      inside: numbers of the operations in regions.
      levels: for each operation, how many regions come before it.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        results: Collection[int],
        tensors: Mapping[int, Tensor],
        kept: dict[Hashable, Any],
    ) -> None:
        self.results = frozenset(results)
        self.needed = needed(operations, self.results)
        self.given, self.kept = dict(tensors), kept
        self.tensors = self._followed(())
        self.makers = {
            x.number: i for i, op in enumerate(self.needed) for x in op.results
        }
        self.readers = self._readers()
        self.inside = self._inside()

    def cut(self) -> Cut:
        """The regions, and the operations outside."""
        regions, left = [], False
        for members in self._components():
            region = self._region(members)
            if (apart := self._apart(region)) is not None:
                regions.append(apart)
            else:
                self.inside -= set(members)
                left = True
        outside = [op for i, op in enumerate(self.needed) if i not in self.inside]
        local = all(map(self._is_local, outside))
        return Cut(outside, regions, self.tensors, local and not left)

    def _is_local(self, operation: Operation) -> bool:
        """Whether devices compute an operation on their own shards, but for sums."""
        large = any(self._is_large(x.number) for x in operation.operands)
        specs = (self.tensors[x.number].spec for x in operation.results)
        return not large or all(spec is not None for spec in specs)

    def _apart(self, region: Region) -> Region | None:
        """The region, if it works with matrices one by one; else None.

        They are one of each tensor, one of each layer of a stack, or one at each place
        along the first dims, as in a stack that the model itself holds.
        """
        large = [x for x in region.entries if self._is_large(x.number)]
        tensors = [self.tensors[x.number] for x in large]
        if (
            len({x.rows for x in tensors}) > 1
            or len({x.layer is None for x in large}) > 1
        ):
            return None
        own = (op.eqn for op in region.operations if op.eqn is not None)
        if (number := max(map(num_matrices, own), default=1)) == 1:
            return region
        every = [self.tensors[x.number] for x in (*region.entries, *region.exits)]
        sizes = itertools.accumulate(tensors[0].shape, operator.mul)
        first = next((i for i, n in enumerate(sizes, 1) if n == number), 0)
        if (
            not first
            or len({(x.shape[:first], x.spec[:first]) for x in every}) > 1
            or len(large) < len(region.entries)
        ):
            return None
        region = dataclasses.replace(region, batch=tensors[0].shape[:first])
        shapes = [jax.ShapeDtypeStruct(x.shape[first:], x.dtype) for x in tensors]
        common = [self.tensors[x.number] for x in region.common]
        common = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in common]
        made = tuple(x.number for op in region.operations for x in op.results)
        if made not in self.kept:
            self.kept[made] = mixes_batch(region.run, shapes, common)
        return None if self.kept[made] else region

    # How values lie.

    def _followed(self, inside: Collection[int]) -> dict[int, Tensor]:
        """How all values lie, if some operations are in regions.

        Where nothing else says how a value of a region shall leave it, it lies as one
        of the same shape that enters.
        """
        tensors = dict(self.given)
        entered: dict[int, dict[tuple[int, ...], Spec]] = {}
        for i, operation in enumerate(self.needed):
            operands = [tensors[x.number] for x in operation.operands]
            known: dict[tuple[int, ...], Spec] = {}
            if i in inside:
                for x, tensor in zip(operation.operands, operands, strict=True):
                    own = {tensor.shape: tensor.spec} if tensor.spec else {}
                    known |= entered.get(x.number, own)
            for value, new in zip(
                operation.results, results_placed(operation, operands), strict=True
            ):
                if i in inside:
                    entered[value.number] = known
                    spec = known.get(new.shape, ((),) * len(new.shape))
                    new = new if new.spec else new._replace(spec=spec)
                tensors.setdefault(value.number, new)
        return tensors

    # Which operations are in regions.

    def _inside(self) -> set[int]:
        inside = {i for i, op in enumerate(self.needed) if self._needs_whole(op)}
        while True:
            made = {x.number for i in inside for x in self.needed[i].results}
            entries = self._large_read(inside) - made
            entries.update(*(self._chain(n, inside) for n in entries))
            within = made | entries | self._derived(entries).keys()
            for i, operation in enumerate(self.needed):
                if i not in inside and self._follows(operation, made, within):
                    inside.add(i)
                    made.update(x.number for x in operation.results)
            self.tensors = self._followed(inside)
            entries = self._large_read(inside) - made
            unknown = {n for n in entries if self.tensors[n].spec is None}
            if not unknown:
                return self._without_ends(inside)
            inside |= {self.makers[n] for n in unknown}

    def _large_read(self, inside: Collection[int]) -> set[int]:
        """The large values that some operations read."""
        read = (x.number for i in inside for x in self.needed[i].operands)
        return set(filter(self._is_large, read))

    def _derived(self, entries: Collection[int]) -> dict[int, int]:
        """{value: number of its operation} of what follows from some values.

        Nothing else that is trained takes part.
        """
        found: dict[int, int] = {}
        waiting = [i for n in entries for i in self.readers.get(n, ())]
        heapq.heapify(waiting)
        seen: set[int] = set()
        while waiting:
            i = heapq.heappop(waiting)
            read = (x.number for x in self.needed[i].operands)
            trained = [n for n in read if self.tensors[n].trained]
            if i in seen or not all(n in entries or n in found for n in trained):
                continue
            seen.add(i)
            for x in self.needed[i].results:
                found[x.number] = i
                for reader in self.readers.get(x.number, ()):
                    heapq.heappush(waiting, reader)
        return found

    def _needs_whole(self, operation: Operation) -> bool:
        """Whether an operation needs whole matrices that are trained."""
        if operation.eqn is None:
            return False
        operands = (self.tensors[x.number] for x in operation.operands)
        results = (self.tensors[x.number] for x in operation.results)
        return (
            any(x.is_large for x in operands)
            and any(x.is_large for x in results)
            and needs_whole(operation.eqn)
        )

    def _follows(
        self, operation: Operation, made: Collection[int], within: Collection[int]
    ) -> bool:
        """Whether an operation reads what regions make, and nothing else has to enter.

        Args:
          operation: the operation.
          made: values that operations in regions make.
          within: values that they make, or that enter, or that follow from these.
        """
        read = [x.number for x in operation.operands]
        if not any(n in made for n in read):
            return False
        return all(n in made or n in within or not self._is_large(n) for n in read)

    def _without_ends(self, inside: set[int]) -> set[int]:
        """Without elementwise operations at the end after which values are wider."""
        inside, readers = set(inside), self.readers
        for i in sorted(inside, reverse=True):
            chain, value = [], self.needed[i].results[0].number
            if any(reader in inside for reader in readers.get(value, ())):
                continue
            fewest, cut, at = self.tensors[value].num_bytes, 0, i
            while (before := self._sole_large(at)) is not None:
                chain.append(at)
                if self.tensors[before].num_bytes < fewest:
                    fewest, cut = self.tensors[before].num_bytes, len(chain)
                at = self.makers.get(before, -1)
                if at not in inside or set(readers[before]) - set(chain):
                    break
            inside -= set(chain[:cut])
        return inside

    def _sole_large(self, number: int) -> int | None:
        """The one large operand of an elementwise operation, if it has only one."""
        operation = self.needed[number]
        if operation.eqn is None or operation.eqn.primitive.name not in ELEMENTWISE:
            return None
        large = {x.number for x in operation.operands if self._is_large(x.number)}
        return large.pop() if len(large) == 1 else None

    def _is_large(self, number: int) -> bool:
        return self.tensors[number].is_large

    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, operation in enumerate(self.needed):
            for x in operation.operands:
                found.setdefault(x.number, []).append(i)
        return found

    # Regions.

    def _components(self) -> list[list[int]]:
        """Operations inside, those together whose values meet without leaving."""
        self.levels = levels = [0] * len(self.needed)
        for i, operation in enumerate(self.needed):
            for x in operation.operands:
                maker = self.makers.get(x.number)
                if maker is not None:
                    leaves = maker in self.inside and i not in self.inside
                    levels[i] = max(levels[i], levels[maker] + leaves)
        owner = {i: i for i in self.inside}

        def root(i: int) -> int:
            while owner[i] != i:
                i = owner[i]
            return i

        for i in sorted(self.inside):
            for x in self.needed[i].operands:
                maker = self.makers.get(x.number)
                if maker in self.inside and levels[maker] == levels[i]:
                    owner[root(i)] = root(maker)
        found: dict[int, list[int]] = {}
        for i in sorted(self.inside):
            found.setdefault(root(i), []).append(i)
        return list(found.values())

    def _region(self, members: Sequence[int]) -> Region:
        """The region of some operations, with what can be computed from what enters."""
        own, made = set(members), set()
        for i in members:
            made.update(x.number for x in self.needed[i].results)
        readers = self.readers
        exits = {
            x.number: x
            for i in members
            for x in self.needed[i].results
            if x.number in self.results or set(readers.get(x.number, ())) - own
        }
        own |= self._pulled(own, made)
        operations = [self.needed[i] for i in sorted(own)]
        made = {x.number for op in operations for x in op.results}
        read = {
            x.number: x
            for op in operations
            for x in op.operands
            if x.number not in made
        }
        layered = any(x.layer is not None for x in read.values())
        entries, common = [], []
        for number, x in read.items():
            own_one = self._is_large(number) or not layered or x.layer is not None
            enters = self.tensors[number].trained and own_one
            (entries if enters else common).append(x)
        leaving = list(exits.values())
        key = self.levels[members[0]], self._key(operations, entries, common, leaving)
        inside = {x.number for op in operations for x in op.results}
        inside.update(x.number for x in entries)
        sizes = {number: self.tensors[number].num_bytes for number in inside}
        parts = map(tuple, (operations, entries, common, leaving))
        return Region(*parts, sizes, key)

    def _pulled(self, own: set[int], made: set[int]) -> set[int]:
        """Operations before a region that it can run without more bytes entering."""
        entries = self._large_read(own) - made
        pulled: set[int] = set()
        for number in sorted(entries, key=self._maker, reverse=True):
            if chain := self._chain(number, self.inside):
                pulled.update(self.makers[n] for n in (number, *chain[:-1]))
                entries.discard(number)
                entries.add(chain[-1])
        for number in sorted(entries, key=self._maker, reverse=True):
            if number in self._derived(entries - {number}):
                entries.discard(number)
        derived = self._derived(entries)
        waiting = [x.number for i in own | pulled for x in self.needed[i].operands]
        while waiting:
            number = waiting.pop()
            maker = derived.get(number)
            if number in made or number in entries or maker is None or maker in pulled:
                continue
            pulled.add(maker)
            waiting += [x.number for x in self.needed[maker].operands]
        return pulled

    def _maker(self, number: int) -> int:
        """The number of the operation that makes a value; -1 of an argument."""
        return self.makers.get(number, -1)

    def _chain(self, number: int, inside: Collection[int]) -> list[int]:
        """The values that may enter in place of one, from the nearest on backwards.

        Each is as small, and the one follows from it alone.

        Args:
          number: of a large value.
          inside: numbers of the operations in regions.
        """
        chain: list[int] = []
        while (maker := self._maker(number)) >= 0 and maker not in inside:
            large = {x.number for x in self.needed[maker].operands}
            large = set(filter(self._is_large, large))
            if len(large) != 1 or self.needed[maker].eqn is None:
                break
            (before,) = large
            if self.tensors[before].num_bytes > self.tensors[number].num_bytes:
                break
            chain.append(before)
            number = before
        return chain

    def _key(
        self,
        operations: Sequence[Operation],
        entries: Sequence[Value],
        common: Sequence[Value],
        exits: Sequence[Value],
    ) -> Hashable:
        """The operations of a region as a key, without the names of its values."""
        names: dict[int, Hashable] = {x.number: ("common", x.number) for x in common}
        names |= {x.number: ("entry", i) for i, x in enumerate(entries)}
        done = []
        for i, operation in enumerate(operations):
            eqn = operation.eqn
            what = ("choice",) if eqn is None else (eqn.primitive, str(eqn.params))
            done.append((what, tuple(names[x.number] for x in operation.operands)))
            names |= {x.number: (i, j) for j, x in enumerate(operation.results)}
        forms = tuple(self.tensors[x.number] for x in (*entries, *exits))
        layers = tuple(x.layer is None for x in (*entries, *exits))
        leaving = tuple(names[x.number] for x in exits)
        return tuple(done), forms, layers, leaving
