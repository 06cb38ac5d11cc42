"""Synchronization of replicas: scatter, outer step, gather, merge.

    scatter   reduce_scatter of a slice over the replicas, then the outer optimizer on
              the piece of this replica
    gather    all_gather of the pieces that the outer optimizer made

All functions run inside a shard_map that is manual over the whole mesh. Array suffixes
as in `fragments`: F fragments, S slices, K numbers of a slice, P numbers of a piece.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.arrays import Array, Params
from meshpar.collectives.compression import Compression, make_compression
from meshpar.contracts.declared import DeclaredCollective
from meshpar.errors import LayoutError, StalenessError
from meshpar.layouts.axes import REPLICA
from meshpar.layouts.plan import Plan
from meshpar.local_sgd.fragments import Fragments, shard_shapes
from meshpar.local_sgd.gossip import mix_with_neighbours, neighbour_distances
from meshpar.local_sgd.merges import Elastic
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.schedule import SyncSchedule, Transfer
from meshpar.local_sgd.sync_state import SyncState
from meshpar.lowering.optimizer import make_optimizer


def _at(tree: Any, *index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _put(tree: Any, new: Any, *index: Any) -> Any:
    return jax.tree.map(lambda x, y: x.at[index].set(y), tree, new)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The synchronization of one mode over one device's fragments.

    Attributes:
      mode: settings and schedule of the synchronization.
      fragments: how this device's shards are cut.
      compression: format of what travels.
      optimizer: the outer optimizer.
      rounds: mixing matrices [R, R] of the gossip graph; () without gossip.
    """

    mode: LocalSGD
    fragments: Fragments
    compression: Compression
    optimizer: optax.GradientTransformation
    rounds: tuple[np.ndarray, ...]

    @property
    def num_rounds(self) -> int:
        """Rounds of the gossip graph, 1 without gossip."""
        return max(1, len(self.rounds))

    @functools.cached_property
    def transfer_kinds(self) -> list[Transfer]:
        """Every kind of transfer that occurs during a step."""
        period = (self.mode.staleness + 1) * self.mode.fragments
        schedule = SyncSchedule(dataclasses.replace(self.mode, period=period))
        steps = range(1, period * (2 + len(self.rounds)))
        transfers = [schedule.actions(step).transfer for step in steps]
        kinds = [x.kind(self.num_rounds) for x in transfers if x is not None]
        return [*dict.fromkeys(kinds)]

    @property
    def _anchor_is_whole(self) -> bool:
        """Whether every replica holds all global weights, not only its pieces."""
        return self.compression.lossy

    @property
    def _has_residuals(self) -> bool:
        return self.mode.error_feedback and self.compression.lossy

    @property
    def _is_elastic(self) -> bool:
        return isinstance(self.mode.merge, Elastic)

    def init(self, params: Params) -> SyncState:
        """The state at the start, from the shards of the average of the replicas."""
        cut, late = self.fragments, self.mode.staleness > 0
        travels = jnp.zeros((cut.num_slices, cut.slice_size)) if late else ()
        if self.rounds:
            return SyncState((), (), travels, travels, (), (), ())
        fragments = [cut.pack(params, f) for f in range(cut.num_fragments)]
        whole_FSK = jnp.stack(fragments)
        pieces_FSP = jax.vmap(jax.vmap(cut.own_piece))(whole_FSK)
        return SyncState(
            anchor=whole_FSK if self._anchor_is_whole else pieces_FSP,
            outer=jax.vmap(jax.vmap(self.optimizer.init))(pieces_FSP),
            snapshot=travels,
            arrived=travels,
            piece=jnp.zeros(cut.piece_size) if late else (),
            residual_up=jnp.zeros_like(whole_FSK) if self._has_residuals else (),
            residual_down=jnp.zeros_like(pieces_FSP) if self._has_residuals else (),
        )

    def transfer(self, sync: SyncState, kind: Transfer, index: tuple) -> SyncState:
        """Exchanges the slices that travel during one step.

        Args:
          sync: the state.
          kind: from `Transfer.kind`; says whether there is a scatter and a gather.
          index: (fragment, slice to scatter, slice to gather), int32 scalars.
        """
        fragment, scatter, gather = index
        if self.rounds:
            if kind.scatter is None:
                return sync
            mixed = self._mix(sync.snapshot[scatter], kind.round)
            return sync._replace(arrived=_put(sync.arrived, mixed, scatter))
        same_slice = kind.scatter is not None and kind.scatter == kind.gather
        # Read before anything is written: neither collective waits for the other.
        anchor = sync.anchor[fragment, scatter]
        if kind.gather is not None and not same_slice:
            sync = self._gather_arrived(sync, fragment, gather)
        if kind.scatter is not None:
            slice_K = sync.snapshot[scatter]
            damping = (1 + self.mode.staleness) ** -self.mode.damping
            sync, piece_P = self._scatter(
                sync, slice_K, anchor, (fragment, scatter), damping
            )
            sync = sync._replace(piece=piece_P)
        return self._gather_arrived(sync, fragment, gather) if same_slice else sync

    def _mix(self, slice_K: Array, number: int) -> Array:
        """One round of gossip."""
        matrix = self.rounds[number % len(self.rounds)]
        return mix_with_neighbours(slice_K, matrix, REPLICA, self.compression)

    def _scatter(
        self,
        sync: SyncState,
        slice_K: Array,
        anchor: Array,
        at: tuple[Any, Any],
        damping: float = 1.0,
    ) -> tuple[SyncState, Array]:
        """Averages a slice and runs the outer step; returns the piece to hand out."""
        whole = anchor if self._anchor_is_whole else jnp.zeros_like(slice_K)
        message = slice_K - whole
        if self._has_residuals:
            message += sync.residual_up[at]
        mean, sent = self.compression.reduce(message, REPLICA)
        if self._has_residuals:
            residual = _put(sync.residual_up, message - sent, *at)
            sync = sync._replace(residual_up=residual)
        own = self.fragments.own_piece(anchor) if self._anchor_is_whole else anchor
        gradient = -mean if self._anchor_is_whole else own - mean
        update, outer = self.optimizer.update(gradient, _at(sync.outer, *at), own)
        update = damping * update
        sync = sync._replace(outer=_put(sync.outer, outer, *at))
        if self._anchor_is_whole:
            return sync, update
        sync = sync._replace(anchor=_put(sync.anchor, own + update, *at))
        return sync, own if self._is_elastic else own + update

    def _gather(
        self, sync: SyncState, piece_P: Array, at: tuple[Any, Any]
    ) -> tuple[SyncState, Array]:
        """Gathers the pieces of all replicas; returns the global weights [K]."""
        if not self._anchor_is_whole:
            return sync, self.compression.gather(piece_P, REPLICA)[0]
        if self._has_residuals:
            piece_P += sync.residual_down[at]
        update, own = self.compression.gather(piece_P, REPLICA)
        if self._has_residuals:
            residual = _put(sync.residual_down, piece_P - own, *at)
            sync = sync._replace(residual_down=residual)
        before = sync.anchor[at]
        sync = sync._replace(anchor=_put(sync.anchor, before + update, *at))
        return sync, before if self._is_elastic else before + update

    def _gather_arrived(self, sync: SyncState, fragment: Any, number: Any) -> SyncState:
        """Gathers a slice of the traveling fragment into `arrived`."""
        sync, arrived = self._gather(sync, sync.piece, (fragment, number))
        return sync._replace(arrived=_put(sync.arrived, arrived, number))

    def launch(self, params: Params, sync: SyncState, fragment: int) -> SyncState:
        """Takes the snapshot of a fragment."""
        return sync._replace(snapshot=self.fragments.pack(params, fragment))

    def arrive(
        self, params: Params, sync: SyncState, fragment: int
    ) -> tuple[Params, SyncState]:
        """Merges the fragment that arrived into the weights."""
        now = self.fragments.pack(params, fragment)
        merged = self.mode.merge(now, sync.snapshot, sync.arrived)
        return self.fragments.unpack(params, fragment, merged), sync

    def at_once(
        self, params: Params, sync: SyncState, fragment: int, number: int
    ) -> tuple[Params, SyncState]:
        """Synchronizes a fragment within one step, in round `number` of a gossip."""
        now_SK, arrived = self.fragments.pack(params, fragment), []
        for s in range(self.fragments.num_slices):
            if self.rounds:
                arrived.append(self._mix(now_SK[s], number))
                continue
            at = fragment, s
            anchor = sync.anchor[at]
            sync, piece_P = self._scatter(sync, now_SK[s], anchor, at)
            sync, global_K = self._gather(sync, piece_P, at)
            arrived.append(global_K)
        merged = self.mode.merge(now_SK, now_SK, jnp.stack(arrived))
        return self.fragments.unpack(params, fragment, merged), sync

    def terms(
        self, transfer: Transfer, num_slices: int = 1
    ) -> tuple[DeclaredCollective, ...]:
        """The collectives over the replicas of one transfer.

        Args:
          transfer: says whether there is a scatter and a gather, and the round.
          num_slices: slices that are transferred so.
        """
        if self.rounds:
            return self._gossip_terms(transfer, num_slices)
        replicas = self.fragments.replicas
        piece_bytes = self.compression.num_bytes(self.fragments.piece_size)
        moved = replicas, num_slices, num_slices * replicas * piece_bytes
        terms = []
        if transfer.scatter is not None:
            kind = "all_to_all" if self.compression.lossy else "reduce_scatter"
            why = f"local SGD: average of a fragment, {self.mode.wire}"
            terms.append(DeclaredCollective(kind, (REPLICA,), *moved, why))
        if transfer.gather is not None:
            why = f"local SGD: global weights handed out, {self.mode.wire}"
            terms.append(DeclaredCollective("all_gather", (REPLICA,), *moved, why))
        return tuple(terms)

    def _gossip_terms(
        self, transfer: Transfer, num_slices: int
    ) -> tuple[DeclaredCollective, ...]:
        if transfer.scatter is None:
            return ()
        slice_bytes = self.compression.num_bytes(self.fragments.slice_size)
        matrix = self.rounds[transfer.round % len(self.rounds)]
        count = len(neighbour_distances(matrix)) * num_slices
        moved = self.fragments.replicas, count, count * slice_bytes
        why = "gossip: weights to the neighbours"
        return (DeclaredCollective("permute", (REPLICA,), *moved, why),)

    def terms_at_once(
        self, num_fragments: int, number: int = 0
    ) -> tuple[DeclaredCollective, ...]:
        """The collectives of `at_once` for several fragments, in round `number`."""
        whole = Transfer(0, 0, 0 if self.mode.gathers else None, number)
        return self.terms(whole, num_fragments * self.fragments.num_slices)


def make_exchange(
    mode: LocalSGD, plan: Plan, sizes: Mapping[str, int], tile: int = 1
) -> Exchange:
    """Makes the synchronization of one mode over the shards of one plan.

    Args:
      mode: settings and schedule of the synchronization.
      plan: shapes and specs of the weights.
      sizes: {axis: size} of the mesh.
      tile: elements to whose multiples pieces and encoded pieces are padded.

    Raises:
      LayoutError: weights that are not floating point.
      MeshparError: a gossip graph that does not fit the number of replicas, or an
        outer optimizer that needs what a synchronization does not give it.
      StalenessError: the mode's outer optimizer is not elementwise, or its elastic
        pull is too strong for so many replicas.
    """
    replicas = sizes[REPLICA]
    optimizer = _outer_optimizer(mode, replicas)
    rounds = () if mode.gossip is None else tuple(mode.gossip.rounds(replicas))
    for path, leaf in plan.trained(plan.parameters).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise LayoutError(
                f"{path} is {leaf.dtype}: local SGD averages all weights of the "
                "replicas, so they have to be floating point; store it as float32, or "
                "use a layout without replica"
            )
    compression = make_compression(mode.wire, tile)
    fragments = Fragments(
        shapes=shard_shapes(plan, sizes),
        num_fragments=mode.fragments,
        num_slices=mode.num_slices,
        replicas=replicas,
        piece_multiple=math.lcm(tile, compression.block),
    )
    return Exchange(mode, fragments, compression, optimizer, rounds)


def _outer_optimizer(mode: LocalSGD, replicas: int) -> optax.GradientTransformation:
    """The optimizer that moves the global weights, without damping.

    Every replica runs it on its own pieces of the weights, so it has to be elementwise.

    Args:
      mode: the mode.
      replicas: R.

    Raises:
      MeshparError: `mode.outer` needs what a synchronization does not give it.
      StalenessError: it is not elementwise; or an elastic pull is too strong for so
        many replicas.
    """
    if not isinstance(mode.merge, Elastic):
        if mode.outer is not None:
            _check_elementwise(mode.outer)
        return mode.outer or optax.sgd(1.0)
    beta = replicas * mode.merge.alpha
    if beta > 1:
        raise StalenessError(
            f"Elastic({mode.merge.alpha}) with replica={replicas}: replicas * alpha"
            f" = {beta:g} moves the center beyond the average; use at most "
            f"{1 / replicas:g}"
        )
    return optax.sgd(beta)


def _check_elementwise(outer: optax.GradientTransformation) -> None:
    """Refuses optimizers that cannot run on pieces of the weights."""
    pieces = {"piece": jax.ShapeDtypeStruct((2,), jnp.float32)}
    reach = make_optimizer(outer, pieces, {"piece": ("piece",)}).reach
    for reason, holds in (
        ("an update of this one depends on other elements", not reach.elementwise),
        ("this one draws random numbers, the same for every piece", reach.positional),
        ("this one uses the loss, which a synchronization has not", reach.uses_loss),
    ):
        if holds:
            raise StalenessError(
                "LocalSGD(outer=...): each replica runs the outer optimizer on pieces "
                f"of the weights, and {reason}; use an elementwise optimizer, such as "
                "optax.sgd with momentum"
            )
