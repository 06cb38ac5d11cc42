"""What replicas exchange: flat fragments, a scatter, an outer step and a gather.

Every device packs its own shards of the weights into one flat vector, cut into
fragments, chunks and a piece per replica, so that only the axis `replica` is ever
crossed:

    scatter   reduce_scatter of a chunk; the outer optimizer runs on 1/R of it
    gather    all_gather of what it made

All functions here run inside a shard_map that is manual over the whole mesh. Suffixes:
F fragments, C chunks of a fragment, K numbers of a chunk, P numbers of a piece (K/R).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.compression import Compression, make_compression
from meshpar.contracts.contract import DeclaredCollective
from meshpar.errors import LayoutError
from meshpar.layouts.axes import REPLICA
from meshpar.layouts.plan import Plan
from meshpar.local_sgd.gossip import mix_with_neighbours, neighbour_offsets
from meshpar.local_sgd.merges import Elastic
from meshpar.local_sgd.mode import LocalSGD, outer_optimizer
from meshpar.local_sgd.schedule import Transfer

AXIS = REPLICA


class SyncState(NamedTuple):
    """What one device keeps between synchronizations; () where it is not needed.

    Attributes:
      anchor: the global weights, float32: one's piece [F, C, P], or whole [F, C, K]
        where a lossy wire sends differences to them.
      outer: state of the outer optimizer of every piece, [F, C, ...].
      snapshot: [C, K] the fragment that travels, as it was.
      arrived: [C, K] what came back.
      piece: [P] what this replica hands out next.
      residual_up: [F, C, K] what the wire dropped of this replica's differences.
      residual_down: [F, C, P] what it dropped of the updates handed out.
    """

    anchor: Any
    outer: Any
    snapshot: Any
    arrived: Any
    piece: Any
    residual_up: Any
    residual_down: Any


WHY = {
    "anchor": "global weights: 1/R, or all where a lossy wire sends differences",
    "outer": "outer optimizer: 1/R",
    "snapshot": "the fragment that travels, as it was",
    "arrived": "what came back of it",
    "piece": "what this replica hands out next",
    "residual_up": "what the wire dropped of this replica's differences",
    "residual_down": "what the wire dropped of the updates handed out: 1/R",
}
"""What the parts of a `SyncState` are for."""


def _at(tree: Any, *index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _put(tree: Any, new: Any, *index: Any) -> Any:
    return jax.tree.map(lambda x, y: x.at[index].set(y), tree, new)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The synchronization of one mode over the shards of one plan.

    Attributes:
      mode: what is synchronized, and when.
      plan: shapes and specs of the weights.
      sizes: {axis: size} of the mesh.
      unit: numbers of a whole tile: P, and what travels of it, are multiples.

    Raises:
      LayoutError: weights that cannot be averaged.
    """

    mode: LocalSGD
    plan: Plan
    sizes: dict[str, int]
    unit: int = 1

    def __post_init__(self):
        _ = self.optimizer, self.rounds
        for path, leaf in self.plan.parameters.items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise LayoutError(
                    f"{path} is {leaf.dtype}: replicas are averaged, so all weights "
                    "have to be floating point"
                )

    @property
    def replicas(self) -> int:
        """R."""
        return self.sizes[AXIS]

    @functools.cached_property
    def wire(self) -> Compression:
        """How it travels."""
        return make_compression(self.mode.wire, self.unit)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """What moves the global weights."""
        return outer_optimizer(self.mode, self.replicas)

    @functools.cached_property
    def rounds(self) -> list[np.ndarray]:
        """Mixing matrices of a gossip; none without."""
        graph = self.mode.gossip
        return [] if graph is None else graph.rounds(self.replicas)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{path: shape of this device's shard}."""
        return {
            path: tuple(
                size // math.prod(self.sizes[a] for a in axes)
                for size, axes in zip(leaf.shape, leaf.spec, strict=True)
            )
            for path, leaf in self.plan.parameters.items()
        }

    @functools.cached_property
    def chunk_size(self) -> int:
        """K, a multiple of R and of whole units and blocks of the wire."""
        size = sum(map(math.prod, self.shapes.values()))
        unit = self.replicas * math.lcm(self.unit, self.wire.block)
        return -(-size // (self.mode.fragments * self.mode.num_chunks * unit)) * unit

    @property
    def piece_size(self) -> int:
        """P."""
        return self.chunk_size // self.replicas

    @property
    def _keeps_whole(self) -> bool:
        """Whether every replica has all global weights."""
        return self.wire.lossy

    def _parts(self, fragment: int) -> Iterator[tuple[str, int, int]]:
        """(path, start, stop) of the flat shards that make up a fragment, in order."""
        size = self.mode.num_chunks * self.chunk_size
        start, stop, offset = fragment * size, (fragment + 1) * size, 0
        for path, shape in self.shapes.items():
            length = math.prod(shape)
            low, high = max(start, offset), min(stop, offset + length)
            if low < high:
                yield path, low - offset, high - offset
            offset += length

    def pack(self, params: Params, fragment: int) -> Array:
        """[C, K] float32 from this device's shards."""
        parts = [
            params[path].reshape(-1)[start:stop].astype(jnp.float32)
            for path, start, stop in self._parts(fragment)
        ]
        size = self.mode.num_chunks * self.chunk_size
        flat = jnp.concatenate([*parts, jnp.zeros(0, jnp.float32)])
        flat = jnp.pad(flat, (0, size - len(flat)))
        return flat.reshape(self.mode.num_chunks, self.chunk_size)

    def _unpacked(self, params: Params, fragment: int, packed: Array) -> Params:
        """The shards with a fragment's numbers put back."""
        params, flat, offset = dict(params), packed.reshape(-1), 0
        for path, start, stop in self._parts(fragment):
            old = params[path]
            new = flat[offset : offset + stop - start].astype(old.dtype)
            params[path] = old.reshape(-1).at[start:stop].set(new).reshape(old.shape)
            offset += stop - start
        return params

    def _own(self, chunk: Array) -> Array:
        """This replica's piece [P] of [K]."""
        start = lax.axis_index(AXIS) * self.piece_size
        return lax.dynamic_slice_in_dim(chunk, start, self.piece_size)

    def init(self, params: Params) -> SyncState:
        """The state at the start, where all replicas are equal."""
        mode, size = self.mode, self.chunk_size
        chunks = mode.num_chunks
        fragments = range(mode.fragments)
        flying = jnp.zeros((chunks, size)) if mode.staleness else ()
        if mode.gossip is not None:
            return SyncState((), (), flying, flying, (), (), ())
        whole = jnp.stack([self.pack(params, fragment) for fragment in fragments])
        pieces = jax.vmap(jax.vmap(self._own))(whole)
        keeps = mode.error_feedback and self.wire.lossy
        return SyncState(
            anchor=whole if self._keeps_whole else pieces,
            outer=jax.vmap(jax.vmap(self.optimizer.init))(pieces),
            snapshot=flying,
            arrived=flying,
            piece=jnp.zeros(self.piece_size) if mode.staleness else (),
            residual_up=jnp.zeros_like(whole) if keeps else (),
            residual_down=jnp.zeros_like(pieces) if keeps else (),
        )

    def transfer(self, sync: SyncState, what: Transfer, index: tuple) -> SyncState:
        """What moves beside one step.

        Args:
          sync: the state.
          what: which parts there are; its numbers do not count.
          index: (fragment, chunk to scatter, chunk to gather), int32 scalars.
        """
        fragment, scatter, gather = index
        if self.rounds:
            if what.scatter is None:
                return sync
            mixed = self._mixed(sync.snapshot[scatter], what.round)
            return sync._replace(arrived=_put(sync.arrived, mixed, scatter))
        together = what.scatter is not None and what.scatter == what.gather
        # Read before anything is written, so that neither waits for the other.
        anchor = sync.anchor[fragment, scatter]
        if what.gather is not None and not together:
            sync = self._gather_to(sync, fragment, gather)
        if what.scatter is not None:
            chunk = sync.snapshot[scatter]
            late = (1 + self.mode.staleness) ** -self.mode.damping
            sync, piece = self._scatter(sync, chunk, anchor, fragment, scatter, late)
            sync = sync._replace(piece=piece)
        return self._gather_to(sync, fragment, gather) if together else sync

    def _mixed(self, chunk: Array, number: int) -> Array:
        matrix = self.rounds[number % len(self.rounds)]
        return mix_with_neighbours(chunk, matrix, AXIS, self.wire)

    def _scatter(
        self,
        sync: SyncState,
        chunk: Array,
        anchor: Array,
        fragment: Any,
        number: Any,
        factor: float = 1.0,
    ) -> tuple[SyncState, Array]:
        """The outer step of this replica's piece, and what it hands out."""
        at = fragment, number
        whole = anchor if self._keeps_whole else jnp.zeros_like(chunk)
        x = chunk - whole
        if keeps := not isinstance(sync.residual_up, tuple):
            x += sync.residual_up[at]
        mean, sent = self.wire.reduce(x, AXIS)
        if keeps:
            sync = sync._replace(residual_up=_put(sync.residual_up, x - sent, *at))
        own = self._own(anchor) if self._keeps_whole else anchor
        gradient = -mean if self._keeps_whole else own - mean
        update, outer = self.optimizer.update(gradient, _at(sync.outer, *at), own)
        update = factor * update
        sync = sync._replace(outer=_put(sync.outer, outer, *at))
        if self._keeps_whole:
            return sync, update
        sync = sync._replace(anchor=_put(sync.anchor, own + update, *at))
        return sync, own if self._is_elastic else own + update

    @property
    def _is_elastic(self) -> bool:
        return isinstance(self.mode.merge, Elastic)

    def _gather(
        self, sync: SyncState, piece: Array, fragment: Any, number: Any
    ) -> tuple[SyncState, Array]:
        """What all replicas handed out: the global weights [K] of a chunk."""
        if not self._keeps_whole:
            return sync, self.wire.gather(piece, AXIS)[0]
        at = fragment, number
        if keeps := not isinstance(sync.residual_down, tuple):
            piece += sync.residual_down[at]
        update, own = self.wire.gather(piece, AXIS)
        if keeps:
            residual = _put(sync.residual_down, piece - own, *at)
            sync = sync._replace(residual_down=residual)
        before = sync.anchor[at]
        sync = sync._replace(anchor=_put(sync.anchor, before + update, *at))
        return sync, before if self._is_elastic else before + update

    def _gather_to(self, sync: SyncState, fragment: Any, number: Any) -> SyncState:
        sync, arrived = self._gather(sync, sync.piece, fragment, number)
        return sync._replace(arrived=_put(sync.arrived, arrived, number))

    def launch(self, params: Params, sync: SyncState, fragment: int) -> SyncState:
        """Takes the snapshot of a fragment."""
        return sync._replace(snapshot=self.pack(params, fragment))

    def arrive(
        self, params: Params, sync: SyncState, fragment: int
    ) -> tuple[Params, SyncState]:
        """Merges what came back into the weights."""
        now = self.pack(params, fragment)
        merged = self.mode.merge(now, sync.snapshot, sync.arrived)
        return self._unpacked(params, fragment, merged), sync

    def at_once(
        self, params: Params, sync: SyncState, fragment: int, number: int
    ) -> tuple[Params, SyncState]:
        """A whole synchronization of a fragment, in round `number` of a gossip."""
        now, arrived = self.pack(params, fragment), []
        for chunk in range(self.mode.num_chunks):
            if self.rounds:
                arrived.append(self._mixed(now[chunk], number))
                continue
            anchor = sync.anchor[fragment, chunk]
            sync, piece = self._scatter(sync, now[chunk], anchor, fragment, chunk)
            sync, whole = self._gather(sync, piece, fragment, chunk)
            arrived.append(whole)
        merged = self.mode.merge(now, now, jnp.stack(arrived))
        return self._unpacked(params, fragment, merged), sync

    def terms(self, what: Transfer, chunks: int = 1) -> list[DeclaredCollective]:
        """What a transfer moves over the replicas, once per chunk."""
        found, ways = [], self.replicas
        if self.rounds:
            size = self.wire.num_bytes(self.chunk_size)
            matrix = self.rounds[what.round % len(self.rounds)]
            count = len(neighbour_offsets(matrix)) * chunks
            if what.scatter is not None:
                why = "gossip: weights to the neighbours"
                found.append(
                    DeclaredCollective(
                        "permute", (AXIS,), ways, count, count * size, why
                    )
                )
            return found
        moved = chunks, chunks * ways * self.wire.num_bytes(self.piece_size)
        if what.scatter is not None:
            kind = "all_to_all" if self.wire.lossy else "reduce_scatter"
            why = f"local SGD: average of a fragment, {self.mode.wire}"
            found.append(DeclaredCollective(kind, (AXIS,), ways, *moved, why))
        if what.gather is not None:
            why = f"local SGD: global weights handed out, {self.mode.wire}"
            found.append(DeclaredCollective("all_gather", (AXIS,), ways, *moved, why))
        return found
