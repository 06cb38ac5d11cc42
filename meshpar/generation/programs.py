"""The compiled programs of generation: an empty cache, prefill and decoding.

Each is compiled once, for prompts of all lengths and for all ways of sampling.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.contracts.contract import Contract
from meshpar.contracts.host_transfers import HostTransfer
from meshpar.generation.layouts import GenerationLayouts
from meshpar.generation.sampling import GREEDY, SamplingArrays
from meshpar.generation.state import GenerationState, advanced, current_tokens
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import HOST_MEMORY, partition_spec
from meshpar.layouts.scope import (
    Scope,
    activation_axes,
    activation_spec,
    constrain,
)
from meshpar.lowering.inspection import Inspection, bytes_per_device
from meshpar.mesh.compiler import compiler_options
from meshpar.models.cached import CachedModel
from meshpar.models.model_scope import model_scope


@dataclasses.dataclass(frozen=True)
class GenerationPrograms:
    """Programs of one model, layout and shape; nothing is compiled yet.

    Attributes:
      cached: the model.
      layouts: those of prefill and decoding.
      mesh: the device mesh.
      abstract_params: {path: ShapeDtypeStruct} with shardings.
      batch_size: sequences.
      slots: tokens that the cache holds for each of them.
      block: tokens of a sequence that prefill runs at once; divides `slots`.
      dtype: of the cache.
    """

    cached: CachedModel
    layouts: GenerationLayouts
    mesh: Mesh
    abstract_params: dict[str, jax.ShapeDtypeStruct]
    batch_size: int
    slots: int
    block: int
    dtype: Any

    def _init_cache(self) -> Params:
        return self.cached.init(self.batch_size, self.slots, self.dtype)

    @functools.cached_property
    def abstract_cache(self) -> dict[str, jax.ShapeDtypeStruct]:
        """{path: ShapeDtypeStruct} of the cache, with shardings.

        Raises:
          LayoutError: a dim that does not divide over its axes.
        """
        with self._scope(self.layouts.decode) as scope:
            shapes = jax.eval_shape(self._init_cache)
            names = {
                path: self.cached.names(path, x.ndim) for path, x in shapes.items()
            }
            specs = {
                path: activation_spec(scope, x.shape, names[path] or (None,) * x.ndim)
                for path, x in shapes.items()
            }
        return {path: self._sharded(x, specs[path]) for path, x in shapes.items()}

    @functools.cached_property
    def vocab(self) -> int:
        """Number of token ids, the last dim of the logits."""
        with self._scope(self.layouts.decode):
            tokens = jax.ShapeDtypeStruct((self.batch_size, 1), jnp.int32)
            args = self.abstract_params, self.abstract_cache, tokens, tokens
            logits, _ = jax.eval_shape(self.cached.run, *args)
        return logits.shape[-1]

    @functools.cached_property
    def abstract_state(self) -> GenerationState:
        """The state as ShapeDtypeStructs with shardings."""
        with self._scope(self.layouts.decode) as scope:
            (batch,) = activation_axes(scope, ["batch"], "generation")
        rows = partition_spec((batch,))

        def row(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            x = jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)
            return self._sharded(x, rows)

        return GenerationState(
            cache=self.abstract_cache,
            tokens=row(jnp.int32, self.slots),
            position=row(jnp.int32),
            length=row(jnp.int32),
            limit=row(jnp.int32),
            done=row(jnp.bool_),
            sequence=row(jnp.uint32),
            dropped=row(jnp.int32),
            stops=self._whole(jax.ShapeDtypeStruct((self.vocab,), jnp.bool_)),
        )

    @functools.cached_property
    def empty_cache(self) -> Callable[[], Params]:
        """() -> the cache without tokens."""
        jitted = jax.jit(
            self._init_cache, out_shardings=_shardings(self.abstract_cache)
        )
        with self._scope(self.layouts.decode):
            return jitted.lower().compile()

    @functools.cached_property
    def prefill(self) -> Inspection:
        """(params, cache, tokens, first, last) -> cache with tokens first to last."""

        def prefill(
            params: Params, cache: Params, tokens_BM: Array, first: Array, last: Array
        ) -> Params:
            with model_scope(self.layouts.prefill, self.mesh):
                tokens_BL = lax.dynamic_slice_in_dim(tokens_BM, first, self.block, 1)
                tokens_BL = constrain(tokens_BL, "batch", None)
                if self.cached.rows_advance_together:
                    return self._one_by_one(params, cache, tokens_BL, first, last)
                return self._run(params, cache, tokens_BL, first)[1]

        cache, tokens = self.abstract_cache, self.abstract_state.tokens
        number = self._whole(jax.ShapeDtypeStruct((), jnp.int32))
        args = self.abstract_params, cache, tokens, number, number
        return self._inspection(prefill, _shardings(cache), *args)

    def _run(
        self, params: Params, cache: Params, tokens_BL: Array, first: Array
    ) -> tuple[Array, Params]:
        """Runs tokens whose positions are `first` and those after it, in all rows."""
        positions_BL = jnp.broadcast_to(
            first + jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None],
            tokens_BL.shape,
        )
        return self.cached.run(params, cache, tokens_BL, positions_BL)

    def _one_by_one(
        self,
        params: Params,
        cache: Params,
        tokens_BL: Array,
        first: Array,
        last: Array,
    ) -> Params:
        def token(index: Array, cache: Params) -> Params:
            tokens_B1 = lax.dynamic_slice_in_dim(tokens_BL, index, 1, 1)
            return self._run(params, cache, tokens_B1, first + index)[1]

        num = jnp.minimum(last - first, self.block)
        return lax.fori_loop(0, num, token, cache)

    @functools.cached_property
    def decode(self) -> Inspection:
        """(params, state, sampling) -> (state, logits float32 [B, V]); one token."""

        def decode(
            params: Params, state: GenerationState, sampling: SamplingArrays
        ) -> tuple[GenerationState, Array]:
            with model_scope(self.layouts.decode, self.mesh):
                logits_BLV, cache = self.cached.run(
                    params,
                    state.cache,
                    current_tokens(state)[:, None],
                    state.position[:, None],
                )
                logits_BV = constrain(logits_BLV[:, 0], "batch", None)
                logits_BV = logits_BV.astype(jnp.float32)
                together = self.cached.rows_advance_together
                state = advanced(state, cache, logits_BV, sampling, together)
                return state, logits_BV

        state = self.abstract_state
        logits = NamedSharding(
            self.mesh, PartitionSpec(*state.tokens.sharding.spec, None)
        )
        out = _shardings(state), logits
        sampling = jax.tree.map(self._whole, jax.eval_shape(GREEDY.as_arrays))
        return self._inspection(decode, out, self.abstract_params, state, sampling)

    @functools.cached_property
    def contract(self) -> Contract | None:
        """The bytes that one decoded token moves; None if the compiler decides them."""
        if self.cached.declare is None:
            return None
        terms = self.cached.declare(self.layouts.decode, self.batch_size, self.dtype)
        return Contract(tuple(terms), host=self.host)

    @property
    def host(self) -> tuple[HostTransfer, ...]:
        """A device's exchange with host memory in one run of all layers."""
        stacks = {
            path: x
            for path, x in self.abstract_params.items()
            if x.sharding.memory_kind == HOST_MEMORY
        }
        if not stacks:
            return ()
        size = bytes_per_device(stacks, _shardings(stacks))
        depth = next(iter(stacks.values())).shape[0]
        why = "weights of the layers, and of the first one again"
        return (HostTransfer(why, size + size // depth, 0),)

    def _inspection(self, fn: Callable, out_shardings: Any, *args: Any) -> Inspection:
        """A program that donates its second argument, which is updated in place."""

        def trace() -> jax.stages.Traced:
            with jax.set_mesh(self.mesh):
                return jax.jit(
                    fn,
                    donate_argnums=1,
                    out_shardings=out_shardings,
                    compiler_options=compiler_options(self.mesh),
                ).trace(*args)

        return Inspection(trace, self.mesh, lambda collectives: None)

    @contextlib.contextmanager
    def _scope(self, layout: Layout) -> Iterator[Scope]:
        with jax.set_mesh(self.mesh), model_scope(layout, self.mesh) as scope:
            yield scope

    def _whole(self, x: Any) -> jax.ShapeDtypeStruct:
        return self._sharded(x, PartitionSpec())

    def _sharded(self, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
