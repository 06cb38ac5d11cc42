"""Gives each matrix of an optimizer's update whole to one device, its owner.

Training state is sharded, and an update such as Muon's needs whole matrices. Left to a
compiler every device gathers all of them and computes the same. Here the matrices of a
stack of layers, and of tensors of the same form, are dealt out: an all_to_all for each
mesh axis brings every device whole matrices of its own, it computes their updates, and
an all_to_all brings those back. Where the state is whole along an axis, devices take
their matrices without traffic, and gather the updates.

Source: Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.3,
  gathers each matrix at one owner; the exchange of a whole stack at once is that of
  Ulysses (Jacobs et al., arXiv:2309.14509, section 3) on matrices.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import canonicalize_dtype
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import Array, Params, parameter_path
from meshpar.collectives.transport import Transports, transports_for
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.purposes import purpose
from meshpar.jaxprs.layer_values import Value
from meshpar.layouts.plan import Plan, partition_spec
from meshpar.lowering.layer_rows import RowNumbers
from meshpar.lowering.layer_update import MODEL, ROWS, in_order, needed
from meshpar.lowering.matrix_regions import Cut, find_regions
from meshpar.lowering.optimizer import Optimizer
from meshpar.lowering.placed_values import Tensor
from meshpar.lowering.region import Region
from meshpar.mesh.order import computed

TO_OWNERS = "matrices to their owners"
FROM_OWNERS = "updates of matrices from their owners"
"""Purposes of what an update moves."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Regions that run together: the same operations on matrices of the same form.

    Attributes:
      regions: with equal keys.
      tensors: {number of a value: how it lies}.
      sizes: {mesh axis: size} along which the matrices are dealt out, in the order in
        which a tensor becomes whole: inner to outer.
      depth: matrices of a tensor on one device.
      mesh: the device mesh.
      transports: how tensors travel.
    """

    regions: tuple[Region, ...]
    tensors: Mapping[int, Tensor]
    sizes: Mapping[str, int]
    depth: int
    mesh: Mesh
    transports: Transports

    @property
    def ways(self) -> int:
        """Devices that matrices are dealt out to."""
        return math.prod(self.sizes.values())

    @property
    def own(self) -> int:
        """Matrices of one device, of which some may be copies that fill up."""
        return -(-self.depth * len(self.regions) // self.ways)

    @property
    def flops(self) -> float:
        """FLOPs of one device's matmuls."""
        return self.own * self.regions[0].flops

    @property
    def peak_bytes(self) -> int:
        """Bytes that one device's matrices take while it updates them."""
        return self.own * self.regions[0].peak_bytes

    def terms(self, place: int) -> Iterator[DeclaredCollective]:
        """The collectives of one value of all matrices, by their forms alone.

        Args:
          place: of the value among those that enter, and then among those that leave.
        """
        first = self.regions[0]
        value = (*first.entries, *first.exits)[place]
        why = TO_OWNERS if place < len(first.entries) else FROM_OWNERS
        yield from self._terms(self._matrix(value), why)

    def _terms(self, tensor: Tensor, why: str) -> Iterator[DeclaredCollective]:
        """The collectives of one value, to the owners of the matrices or back."""
        item = np.dtype(self.transports.wire_dtype(tensor.dtype)).itemsize
        size = self.own * math.prod(tensor.shape) * item
        for axis, ways in reversed(self.sizes.items()):
            if _dim_of(axis, tensor) is not None:
                yield DeclaredCollective("all_to_all", (axis,), ways, 1, size, why)
                continue
            size *= ways  # Devices hold the same, of which each takes its own matrices.
            if why == FROM_OWNERS:
                moved = "all_gather", (axis,), ways, 1, size, why
                yield DeclaredCollective(*moved, gathers=True)

    def numbers(self, place: int) -> tuple[int, ...]:
        """Numbers of the values of all regions at one place, as of `terms`."""
        return tuple((*r.entries, *r.exits)[place].number for r in self.regions)

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that a step reads."""
        return tuple(x for region in self.regions for x in region.reads)

    @property
    def makes(self) -> tuple[Value, ...]:
        """The values that a step makes."""
        return tuple(x for region in self.regions for x in region.makes)

    def made(self, known: Mapping[int, Array]) -> dict[int, Array]:
        """{number: array} of what leaves the regions.

        Args:
          known: {number: array} of what enters: [number of rows, ...] of stacks.
        """
        first = self.regions[0]
        entries = [[known[x.number] for x in r.entries] for r in self.regions]
        common = [known[x.number] for x in first.common]
        in_specs = [list(map(self._spec, r.entries)) for r in self.regions]
        out_specs = [list(map(self._spec, r.exits)) for r in self.regions]
        whole = [PartitionSpec()] * len(common)

        exits = jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=(in_specs, whole),
            out_specs=out_specs,
            check_vma=False,
        )(entries, common)
        return {
            x.number: array
            for region, own in zip(self.regions, exits, strict=True)
            for x, array in zip(region.exits, own, strict=True)
        }

    def _spec(self, value: Value) -> PartitionSpec:
        x = self.tensors[value.number]
        return partition_spec(x.spec if value.layer is None else (x.rows, *x.spec))

    def _on_device(
        self, entries: list[list[Array]], common: list[Array]
    ) -> list[list[Array]]:
        """`made` of one device's shards."""
        first = self.regions[0]
        dealt, outer = [], ()
        for place, value in enumerate(first.entries):
            matrix, parts = self._matrix(value), [own[place] for own in entries]
            outer = parts[0].shape[: parts[0].ndim - len(matrix.shape)]
            parts = [part.reshape(-1, *part.shape[len(outer) :]) for part in parts]
            rows = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
            if extra := self.own * self.ways - len(rows):
                widths = ((0, extra), *((0, 0) for _ in rows.shape[1:]))
                # XLA:CPU would split the exchange where copies begin, and fail.
                rows = computed(jnp.pad(rows, widths, mode="edge"))
            dealt.append(self._to_owners(rows, matrix))
        updates = jax.vmap(lambda *rows: tuple(first.run(rows, common)))(*dealt)
        exits: list[list[Array]] = [[] for _ in self.regions]
        num = len(self.regions)
        for value, update in zip(first.exits, updates, strict=True):
            rows = self._from_owners(update, self._matrix(value))
            parts = jnp.split(rows[: num * self.depth], num)
            for own, part in zip(exits, parts, strict=True):
                own.append(part.reshape(*outer, *part.shape[1:]))
        return exits

    def _matrix(self, value: Value) -> Tensor:
        """How one matrix of a value lies."""
        x = self.tensors[value.number]
        first = len(self.regions[0].batch)
        return x._replace(shape=x.shape[first:], spec=x.spec[first:])

    def _to_owners(self, x: Array, tensor: Tensor) -> Array:
        """This device's whole matrices, of one device's shards of all."""
        dtype = x.dtype
        for axis in self.sizes:
            dim = _dim_of(axis, tensor)
            if dim is None:
                own = len(x) // self.sizes[axis]
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * own, own)
                continue
            with purpose(TO_OWNERS):
                x = x.astype(self.transports.wire_dtype(dtype))
                x = lax.all_to_all(x, axis, 0, dim + 1, tiled=True)
        return x.astype(dtype)

    def _from_owners(self, x: Array, tensor: Tensor) -> Array:
        """The inverse of `_to_owners`."""
        dtype = x.dtype
        x = x.astype(self.transports.wire_dtype(dtype))
        for axis in reversed(self.sizes):
            dim = _dim_of(axis, tensor)
            with purpose(FROM_OWNERS):
                if dim is None:
                    x = lax.all_gather(x, axis, axis=0, tiled=True)
                else:
                    x = lax.all_to_all(x, axis, dim + 1, 0, tiled=True)
        return x.astype(dtype)


def _dim_of(axis: str, tensor: Tensor) -> int | None:
    """The dim of a matrix that a mesh axis splits."""
    return next((dim for dim, axes in enumerate(tensor.spec) if axis in axes), None)


@dataclasses.dataclass(frozen=True)
class OwnedUpdate:
    """An optimizer's update on one mesh, with an owner for each matrix.

    Attributes:
      optimizer: the optimizer.
      steps: its operations, and groups of regions in place of those that need whole
        matrices.
      is_whole: whether all matrices have owners; a compiler moves others.
    """

    optimizer: Optimizer
    steps: tuple[Any, ...]
    is_whole: bool

    @classmethod
    def of(cls, optimizer: Optimizer, plan: Plan, mesh: Mesh) -> "OwnedUpdate | None":
        """The update under a plan; None if no matrices get owners.

        Args:
          optimizer: the optimizer.
          plan: of the training state.
          mesh: the device mesh.
        """
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        if optimizer.layers == MODEL or not optimizer.reach.moves or not sizes:
            return None
        if optimizer.reach.branches and optimizer.layers != ROWS:
            return None  # Operation by operation, all branches of a conditional run.
        kept, key = optimizer.operations.kept, (mesh, *_specs(plan))
        if key not in kept:
            kept[key] = cls._of(optimizer, plan, mesh, sizes)
        return kept[key]

    @classmethod
    def _of(
        cls, optimizer: Optimizer, plan: Plan, mesh: Mesh, sizes: Mapping[str, int]
    ) -> "OwnedUpdate | None":
        update = optimizer.operations
        results = [value.number for value in update.results]
        arguments = _arguments(optimizer, plan)
        found = find_regions(update.operations, results, arguments, update.kept)
        if not found.regions:
            return None
        parts = _groups(found, sizes, len(update.rows.padding))
        if parts is None:
            return None
        moved = mesh, transports_for(mesh, tuple(sizes))
        groups = [
            Group(tuple(regions), found.tensors, ways, num, *moved)
            for regions, ways, num in parts
        ]
        steps = needed(list(in_order([*found.operations, *groups])), results)
        return cls(optimizer, tuple(steps), found.is_whole)

    @property
    def groups(self) -> list[Group]:
        """The groups."""
        return [step for step in self.steps if isinstance(step, Group)]

    def terms(self) -> Iterator[DeclaredCollective]:
        """The collectives of the update, by the forms of the matrices alone."""
        seen: set[Any] = set()
        for group in self.groups:
            first = group.regions[0]
            for place in range(len(first.entries) + len(first.exits)):
                numbers = place < len(first.entries), group.numbers(place)
                for term in group.terms(place):
                    # What enters two groups alike is moved once by a compiler.
                    again = numbers in seen
                    yield dataclasses.replace(term, gathers=again or term.gathers)
                seen.add(numbers)

    def update(
        self, grads: Params, state: Any, params: Params, loss: Array
    ) -> tuple[Params, Any]:
        """(updates, state) after one step, as `Optimizer.update`."""
        return self.optimizer.by_operations(self.steps, grads, state, params, loss)


def _specs(plan: Plan) -> tuple[Hashable, ...]:
    """How the training state lies, as a key."""
    params = tuple((path, leaf.spec) for path, leaf in plan.parameters.items())
    return params, tuple(leaf.spec for leaf in plan.optimizer)


def _arguments(optimizer: Optimizer, plan: Plan) -> dict[int, Tensor]:
    """{number: how it lies} of what an update reads."""
    update, state = optimizer.operations, optimizer.abstract_state
    leaves = {}
    for path in plan.gradients:
        leaf = plan.parameters[path], path in update.rows.rows, True
        leaves |= {("gradient", path): leaf, ("parameter", path): leaf}
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    both = zip(paths, plan.optimizer, optimizer.forms.order, strict=True)
    for i, ((keys, x), leaf, place) in enumerate(both):
        trained = x.shape != () and parameter_path(keys, plan.gradients) is not None
        leaves["state", i] = leaf, isinstance(place, RowNumbers), trained
    constants = map(np.asarray, update.constants_read.values())
    tensors = {
        number: Tensor(x.shape, canonicalize_dtype(x.dtype), (), ((),) * x.ndim)
        for number, x in zip(update.constants_read, constants, strict=True)
    }
    for number, role in update.arguments.items():
        if role not in leaves:
            tensors[number] = Tensor((), np.dtype(np.float32), (), ())
            continue
        leaf, is_stack, trained = leaves[role]
        dims = slice(1, None) if is_stack else slice(None)
        rows = leaf.spec[0] if is_stack else ()
        form = leaf.shape[dims], np.dtype(leaf.dtype), rows, leaf.spec[dims]
        tensors[number] = Tensor(*form, trained)
    return tensors


def _groups(
    found: Cut, sizes: Mapping[str, int], depth: int
) -> list[tuple[list[Region], dict[str, int], int]] | None:
    """(regions, as of `Group`: sizes, depth) of each group.

    Regions run together where devices have fewer matrices than one after the other.
    None if tensors of one region are split in opposite orders of axes.

    Args:
      found: the regions of one update.
      sizes: {mesh axis in use: size}, outer to inner.
      depth: rows of a stack.
    """
    groups = []
    by_key: dict[Any, list[Region]] = {}
    for region in found.regions:
        by_key.setdefault(region.key, []).append(region)
    for alike in by_key.values():
        first, batch = alike[0].entries[0], alike[0].batch
        tensor = found.tensors[first.number]
        outer = *tensor.rows, *itertools.chain(*tensor.spec[: len(batch)])
        values = (*alike[0].entries, *alike[0].exits)
        dims = [axes for x in values for axes in found.tensors[x.number].spec]
        inner = [axis for axis in reversed(sizes) if axis not in outer]
        if (order := _inner_first(inner, dims)) is None:
            return None
        dealt = {axis: sizes[axis] for axis in order}
        ways = math.prod(dealt.values())
        num = (1 if first.layer is None else depth) * math.prod(batch)
        num //= math.prod(sizes[axis] for axis in outer)
        together = -(-num * len(alike) // ways) < -(-num // ways) * len(alike)
        for regions in [alike] if together else [[region] for region in alike]:
            groups.append((regions, dealt, num))
    return groups


def _inner_first(
    axes: Sequence[str], dims: Sequence[tuple[str, ...]]
) -> list[str] | None:
    """The axes, each after those that split the parts which it makes of a dim.

    None if two dims ask for opposite orders.

    Args:
      axes: mesh axes, in the order that is kept where dims do not ask for another.
      dims: the axes that split each dim, outer to inner.
    """
    left, order = list(axes), []
    while left:
        free = (
            axis
            for axis in left
            if not any(set(left) & set(_inside(axis, dim)) for dim in dims)
        )
        if (axis := next(free, None)) is None:
            return None
        left.remove(axis)
        order.append(axis)
    return order


def _inside(axis: str, dim: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that split the parts of a dim which another axis makes."""
    return dim[dim.index(axis) + 1 :] if axis in dim else ()
