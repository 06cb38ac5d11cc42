"""ZeRO-1, 2 and 3 as one policy: when weights are gathered and gradients reduced.

             weights gathered                  gradients reduce-scattered
    zero=1   once per step                     once per step
    zero=2   once per step                     layer by layer, in the backward pass
    zero=3   layer by layer, in both passes    layer by layer, in the backward pass

With several microbatches, zero=1 and 2 sum whole gradients over them and reduce the sum
once per step (no_sync). In a pipeline zero=1 does so alone: zero=2 reduces gradients in
every tick that computes them, and sums shards; zero=3 gathers weights in ticks as well.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import (
    Array,
    Params,
    abstract_layer,
    rounded,
    to_device,
    vary_alike,
)
from meshpar.collectives.transport import ONE_SHOT, Transport, Transports
from meshpar.contracts.purposes import purpose
from meshpar.errors import LayoutError
from meshpar.fsdp.gather import gather_shards, reduce_scatter_grads
from meshpar.fsdp.gather_order import gather_with
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.memory_order import in_one_order
from meshpar.fsdp.sharding import (
    ManualSharding,
    automatic_specs,
    on_local_shards,
)
from meshpar.layouts.layout import Layout
from meshpar.layouts.offload import ACTIVATIONS, PARAMETERS
from meshpar.layouts.remat import NONE
from meshpar.layouts.scope import with_policy
from meshpar.layouts.stacks import InStack, Stacks, standing
from meshpar.mesh.order import after
from meshpar.mesh.platform import traced_platform
from meshpar.models.layer_stack import Key, LayeredModel, fold_key

SHARED = "embedding, head and other shared tensors"

_MASTER = " before its cast"
"""What stands behind the path of a weight in the dtype that the optimizer updates."""


@dataclasses.dataclass(frozen=True)
class Zero:
    """The policy of one program; its methods run inside shard_map.

    The loss is differentiated by "leaves": shards if the policy gathers inside the
    loss, whole weights otherwise. "Constants" are all else that whole weights are made
    of: parameters that are not trained, and weights that were gathered before.

    Attributes:
      layered: the model layer by layer.
      layout: the layout; its ZeRO level, microbatches and prefetch matter.
      shardings: {path: how manual axes split the tensor}.
      transports: how tensors move.
      in_ticks: whether a pipeline runs the layers, tick by tick.
      beside_automatic: whether the compiler splits the layers over other axes.
      cast: casts parameters to the compute dtype.
      vary: marks an array as differing over the manual axes.
      trained: paths of the parameters that are trained.
      on_host: paths of the parameters that live in host memory.
      in_place: paths of the stack of which kernels may read a layer where it lies.

    Raises:
      LayoutError: a prefetch matches no sharded parameter of the stack.
    """

    layered: LayeredModel
    layout: Layout
    shardings: dict[str, ManualSharding]
    transports: Transports
    in_ticks: bool
    beside_automatic: bool
    cast: Callable[[Params], Params]
    vary: Callable[[Array], Array]
    trained: frozenset[str]
    on_host: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()

    def __post_init__(self):
        _ = self.prefetched  # Raises for a prefetch without a match.

    @functools.cached_property
    def layer_shardings(self) -> dict[str, ManualSharding]:
        """{path: how manual axes split one layer of the tensor}, for the stack."""
        stack = self.layered.split(self.shardings)[1]
        return {path: sharding.layer for path, sharding in stack.items()}

    @functools.cached_property
    def prefetched(self) -> frozenset[str]:
        """Paths of the stack that are gathered one layer ahead."""
        split = [p for p, sharding in self.layer_shardings.items() if sharding.splits]
        matches: set[str] = set()
        for regex in self.layout.prefetch:
            hits = {path for path in split if re.search(regex, path)}
            if not hits:
                raise LayoutError(
                    f"prefetch={regex} matches no sharded parameter of the stack; "
                    f"write a regex that matches any of {', '.join(split)}"
                )
            matches |= hits
        return frozenset(matches)

    @functools.cached_property
    def splits_any(self) -> bool:
        """Whether manual axes split any parameter."""
        return any(sharding.splits for sharding in self.shardings.values())

    @property
    def streams(self) -> bool:
        """Whether the layers' weights come from host memory, layer by layer."""
        return PARAMETERS in self.layout.offloaded

    @property
    def copies_layers(self) -> bool:
        """Whether the layers' weights are copied from host memory once a step."""
        return bool(self.on_host) and not self.streams

    @property
    def gathers_layers(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.layout.zero_level == 3 and (self.splits_any or self.streams)

    @property
    def casts_layers(self) -> bool:
        """Whether master weights are cast layer by layer, where they are gathered.

        The stack's leaves then have the dtype of the gradients, and nothing reads their
        values: no copy of the whole stack is held.
        """
        in_scan = self.gathers_layers and not self.in_ticks and not self.copies_layers
        return in_scan and not self.transports.widens

    @property
    def loops(self) -> bool:
        """Whether layers run in a loop, for which stacks of all layers are made.

        They hold copies of the weights, and what layers save.
        """
        return not 1 < self.layout.scan_unroll >= self.layered.depth

    @property
    def reduces_early(self) -> bool:
        """Whether the layers' gradients are reduced inside the backward pass."""
        sums = self.layout.microbatches > 1 and not self.in_ticks
        early = self.layout.zero_level == 2 and not sums
        return self.gathers_layers or (early and self.splits_any)

    @property
    def reduces_shared_early(self) -> bool:
        """Whether shared weights' gradients are reduced inside the backward pass.

        A pipeline reduces them once per step.
        """
        return self.reduces_early and not self.in_ticks

    @property
    def reduces_by_parts(self) -> bool:
        """Whether rings have the layers' gradients part by part, as `Product`s."""
        if self.beside_automatic:  # It would gather the matmuls' operands once more.
            return False
        return self.reduces_early and self.transports.gradients.by_parts

    def leaves(self, params: Params) -> tuple[Params, Params]:
        """(leaves, constants) from this device's shards."""
        # Casting before the gather moves fewer bytes, where transports allow it.
        cast = (lambda params: params) if self.transports.widens else self.cast
        shared, stack = self.layered.split(params)
        if self.streams:  # No values are read, and the host would cast them.
            like = jax.eval_shape(cast, stack)
            copies = {path: jnp.zeros(x.shape, x.dtype) for path, x in like.items()}
        elif self.copies_layers:
            copies = lax.map(lambda layer: cast(to_device(layer)), stack)
        else:
            copies = cast(stack)
        shards = {p: self.vary(x) for p, x in (cast(shared) | copies).items()}
        if self.gathers_layers:
            leaves, constants = self._split_trained(shards)
            if self.casts_layers or self.streams:
                constants |= {path: self.vary(x) for path, x in stack.items()}
            return leaves, constants
        with self._moves("weights gathered once a step"):
            whole = gather_shards(shards, self.shardings)
        if self.reduces_early:
            return self._split_trained(shards)[0], whole
        leaves, constants = self._split_trained(weights := self.cast(whole))
        return leaves, constants | self._masters(stack, weights)

    def _masters(self, stack: Params, weights: Params) -> Params:
        """Stacks in the dtype that the optimizer updates, for kernels.

        They may read rows of them backward: their order in memory can suit better than
        that of the copies, which is the one that kernels read forward.
        """
        return {
            path + _MASTER: self.vary(x)
            for path, x in stack.items()  # A set's order differs between processes.
            if path in self.in_place and path not in self.on_host
            if not self.shardings[path].splits and x.dtype != weights[path].dtype
        }

    def _moves(self, what: str, backward: str = "") -> AbstractContextManager:
        return purpose(f"zero={self.layout.zero_level}: {what}", backward)

    def _split_trained(self, tree: Params) -> tuple[Params, Params]:
        """(trained entries, others) of {path: array}."""
        trained = {path: x for path, x in tree.items() if path in self.trained}
        return trained, {path: x for path, x in tree.items() if path not in trained}

    def shared(self, leaves: Params, constants: Params) -> Params:
        """Whole weights of embedding and head, differentiable by their leaves."""
        if not self.reduces_early:
            return {**leaves, **constants}
        return gather_with(
            lambda leaves: self.whole_shared(leaves, constants),
            lambda grads: self.reduced_shared({path: grads[path] for path in leaves}),
        )(leaves)

    def whole_shared(self, leaves: Params, constants: Params) -> Params:
        """`whole` of embedding and head."""
        with self._moves(f"weights: {SHARED}"):
            return self.whole(leaves, constants, self.shardings, ONE_SHOT)

    def reduced_shared(self, grads: Params) -> Params:
        """`reduced` of embedding and head."""
        with self._moves(f"gradients: {SHARED}"):
            return self.reduced(grads, self.shardings, self.transports.once)

    def gathered_shared(self, shared: Params) -> Params:
        """Whole weights of embedding and head, for a pipeline's stages."""
        return self.whole_shared(shared, {}) if self.gathers_layers else shared

    def layers(self, key: Key, context: Any, remat: str) -> LayerScan:
        """Layers of the stack.

        Args:
          key: layer i gets `fold_in(key, i)`.
          context: what all layers read.
          remat: their policy.
        """
        context = jax.tree.map(self.vary, context)

        def layer(
            weights: Params, x: Any, i: Array, context: Any, stacks: Stacks
        ) -> Any:
            masters = {p: w for p, w in weights.items() if p.endswith(_MASTER)}
            cast = self.cast({p: w for p, w in weights.items() if p not in masters})
            places = {
                path: InStack(x, stacks.row, masters.get(path + _MASTER))
                for path, x in stacks.arrays.items()
                if cast[path] is weights[path]
            }
            with standing((cast[path], place) for path, place in places.items()):
                y = self.layered.layer(cast, x, fold_key(key, i), context)
            return jax.tree.map(self.vary, y)

        def reduce(grads: Params) -> Params:
            with self._moves("gradients: layer by layer, going backward"):
                transport = self.transports.gradients
                return self.reduced(grads, self.layer_shardings, transport)

        return LayerScan(
            with_policy(layer, remat, prevent_cse=False),
            self._whole_layer,
            reduce,
            context,
            self.layered.kept,
            self.prefetched,
            streams=self.streams,
            saves_on_host=ACTIVATIONS in self.layout.offloaded,
            by_parts=self.reduces_by_parts,
            mixes=self.transports.mixes,
            repeats=remat != NONE,
            unroll=self.layout.scan_unroll,
            in_place=self.in_place,
        )

    def _whole_layer(self, leaves: Params, constants: Params) -> Params:
        ahead = self.prefetched.issuperset({*leaves, *constants})
        transport = self.transports.prefetched if ahead else self.transports.weights
        when = "one layer ahead" if ahead else "layer by layer"
        with self._moves(f"weights: {when}", "backward"):
            return self.whole(leaves, constants, self.layer_shardings, transport)

    def whole(
        self,
        leaves: Params,
        constants: Params,
        shardings: dict[str, ManualSharding],
        transport: Transport,
    ) -> Params:
        """Whole weights, in the dtype in which they move."""
        if self.casts_layers:
            kept = {p: x for p, x in constants.items() if self._keeps_order(p, x)}
            constants = {**constants, **in_one_order(kept)}
            dtypes = {path: x.dtype for path, x in self.cast(constants).items()}
            constants = {p: rounded(x, dtypes[p]) for p, x in constants.items()}
            constants = self.cast(constants)
        if self.gathers_layers:
            return gather_shards({**leaves, **constants}, shardings, transport)
        return constants if self.reduces_early else {**leaves, **constants}

    def _keeps_order(self, path: str, x: Array) -> bool:
        """Whether a layer's weight is sliced in the order in which its stack lies.

        Matmuls read heads in another order, and kernels experts. Left to it, the TPU
        compiler turns the whole stack of heads, and holds it so for the whole step;
        that of experts with several microbatches alone (seen with libtpu 0.0.50).
        """
        is_expert = path in self.in_place
        return x.ndim > 2 and (not is_expert or self.layout.microbatches > 1)

    def reduced(
        self,
        grads: Params,
        shardings: dict[str, ManualSharding],
        transport: Transport,
    ) -> Params:
        """Gradients of the leaves from the gradients of the whole weights."""
        early = self.reduces_early
        return reduce_scatter_grads(grads, shardings, transport) if early else grads

    def scattered(self, grads: Params, reduced: Params) -> Params:
        """Reduce-scatters the gradients that are still whole, layer by layer.

        Args:
          grads: {path: gradient, whole or a shard}.
          reduced: arrays under other names, sums over devices that come first.
        """
        shared, stack = self.layered.split(grads)
        transport = self.transports.once
        if self.splits_any and not self.reduces_shared_early:
            with self._moves(f"gradients: {SHARED}"):
                shared = reduce_scatter_grads(shared, self.shardings, transport)
        if stack and self.splits_any and not self.reduces_early:
            scatter = functools.partial(
                reduce_scatter_grads,
                shardings=self.layer_shardings,
                transport=transport,
            )
            least = min(stack, key=lambda path: stack[path].size)  # One delays all.
            stack |= self.after(shared | reduced, {least: stack[least]})
            scattered = functools.partial(_map_layers, scatter)
            with self._moves("gradients: layer by layer, once a step"):
                stack = on_local_shards(scattered, stack, self.shardings)
            shared = self.after(stack, shared)
        return {**shared, **stack}

    def after(self, first: Params, later: Any) -> Any:
        """The arrays of a tree, after some tensors if collectives mix with loops'.

        A collective may not follow a loop with collectives that it does not read.
        """
        if not self.transports.mixes:
            return later
        return after(first, later, automatic_specs(self.shardings))


def _map_layers(fn: Callable[[Params], Params], stack: Params) -> Params:
    """`lax.map(fn, stack)`, whose results get memory when the stack is there.

    Where a compiler would give it before the loops that make the stack, a conditional
    gives it, which reads a number of the stack.

    Args:
      fn: {path: array of a layer} -> {path: array}.
      stack: {path: [layers, ...]}.
    """
    if not traced_platform().allocates_early:
        return lax.map(fn, stack)
    results = jax.eval_shape(fn, abstract_layer(stack))
    path = min(stack)
    depth = len(stack[path])

    def unwritten() -> Params:
        return {
            path: vary_alike(lax.empty((depth, *x.shape), x.dtype), stack[path])[0]
            for path, x in results.items()
        }

    def other() -> Params:  # Branches that do the same would be one, and no branch.
        return {path: x.at[(0,) * x.ndim].set(0) for path, x in unwritten().items()}

    number = stack[path][(0,) * stack[path].ndim]
    out = lax.cond(number == 0, other, unwritten)

    def write(out: Params, row: tuple[Array, Params]) -> tuple[Params, None]:
        i, layer = row
        written = {
            path: lax.dynamic_update_index_in_dim(out[path], x, i, 0)
            for path, x in fn(layer).items()
        }
        return written, None

    return lax.scan(write, out, (jnp.arange(depth), stack))[0]
