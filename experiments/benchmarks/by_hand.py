"""Training steps written by hand, without meshpar, as references for measurements.

They have the loss, optimizer and shardings of a meshpar program, in one plain shard_map
if the program is lowered to shard_map, else in one plain jit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from experiments.recipes import optimizers
from experiments.recipes.config import Config
from meshpar.errors import ConfigError
from meshpar.layouts.axes import FSDP


def step_and_init(
    config: Config, program: meshpar.TrainProgram
) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The step, (state, batch) -> (state, (loss, norm)), and a function for the state.

    Both are jitted; the step donates its state.

    Args:
      config: the run.
      program: the program whose shardings the step uses.

    Raises:
      ConfigError: a layout that the hand-written shard_map does not support.
    """
    model, mesh = program.model, program.mesh
    by_shard_map = program.lowering.name == "shard_map"
    value_and_grad = (_by_shard_map if by_shard_map else _by_jit)(program)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm or float("inf")),
        optimizers.make_optimizer(config.optimizer, config.steps, model),
    )

    def step(state: Any, batch: Any) -> Any:
        params, optimizer_state = state
        loss, grads = value_and_grad(params, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        norm = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), optimizer_state), (loss, norm)

    def init() -> Any:
        params = model.init(jax.random.key(0))
        return params, optimizer.init(params)

    shardings = {
        path: NamedSharding(mesh, leaf.partition_spec)
        for path, leaf in program.plan.parameters.items()
    }
    params, optimizer_state = jax.eval_shape(init)
    optimizer_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        optimizer_state,
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )
    out = shardings, optimizer_shardings
    return jax.jit(step, donate_argnums=0), jax.jit(init, out_shardings=out)


def _cast(program: meshpar.TrainProgram, params: Any) -> Any:
    dtype = program.lowering.compute_dtype or jnp.float32
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _by_jit(program: meshpar.TrainProgram) -> Callable[..., Any]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        with meshpar.layouts.use(program.layout, program.mesh):
            params = _cast(program, params)
            return program.model.loss(params, batch, jax.random.key(0))[0]

    return jax.value_and_grad(loss_fn)


def _by_shard_map(program: meshpar.TrainProgram) -> Callable[..., Any]:
    """ZeRO-3: all-gathers weights in each layer; the transpose reduce-scatters."""
    layered, specs = program.model.layered, program.plan.specs
    used = {axis for axis, size in program.mesh.shape.items() if size > 1}
    replicated = [path for path, spec in specs.items() if FSDP not in spec]
    if used != {FSDP} or replicated or program.layout.zero_level < 3:
        raise ConfigError(
            f"layout {program.layout}: the hand-written shard_map supports only "
            "fsdp=N,zero=3; add --lowering=jit for other layouts"
        )

    def gather(params: Any, skip: int) -> Any:
        """All-gathers parameters without their first `skip` dims."""
        return {
            path: jax.lax.all_gather(
                x, FSDP, axis=specs[path].index(FSDP) - skip, tiled=True
            )
            for path, x in params.items()
        }

    def local(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            shared, stack = layered.split(_cast(program, params))
            shared = gather(shared, 0)
            context = layered.context(shared, batch, None)

            def body(x: Any, params: Any) -> Any:
                return layered.layer(gather(params, 1), x, None, context), None

            body = jax.checkpoint(body) if program.layout.remat == "full" else body
            x = jax.lax.scan(body, layered.embed(shared, batch, None), stack)[0]
            loss = layered.head(shared, x, batch, None).loss
            return loss / program.layout.fsdp

        with meshpar.layouts.use(program.layout, program.mesh, used):
            loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.lax.psum(loss, FSDP), grads

    batch_spec = PartitionSpec(FSDP)
    return jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(specs, batch_spec),
        out_specs=(PartitionSpec(), specs),
    )
