"""Training steps of other projects, for `experiments.check`.

    python -m experiments.check experiments.benchmarks.steps_of_others:flax_lm1b

Of other projects is what they install or publish, and nothing of it is kept here:

- Tunix: `pip install google-tunix==0.1.7`.
- The example lm1b of Flax: `git clone https://github.com/google/flax`, at 18f8f311, and
  its `examples/lm1b` on PYTHONPATH; `pip install ml_collections`.
- Bonsai: `git clone https://github.com/jax-ml/bonsai`, at 3628425, and that folder on
  PYTHONPATH; `pip install jaxtyping`.

The steps `flax_guide` and `equinox_mlp` (`pip install equinox`) are in the form of
their tutorials.
"""

import importlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_OPTIMIZER = optax.adamw(1e-3)


def _mesh(names: tuple[str, ...], *sizes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=kinds)


def tunix_llama() -> tuple[Any, ...]:
    """Tunix 0.1.7: its Llama 3, its default sharding and the loss of its trainer."""
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    mesh = _mesh(("fsdp", "tp"), jax.device_count() // 2, 2)
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=4096,
        embed_dim=256,
        hidden_dim=1024,
        num_heads=8,
        head_dim=32,
        num_kv_heads=4,
        rope_theta=500_000,
        norm_eps=1e-5,
    )
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: llama.Llama3(config, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        specs = nnx.get_partition_spec(state)
        state = jax.tree.map(
            lambda x, spec: jax.device_put(
                jnp.zeros(x.shape, x.dtype), NamedSharding(mesh, spec)
            ),
            nnx.to_pure_dict(state),
            nnx.to_pure_dict(specs),
        )
        moments = jax.jit(_OPTIMIZER.init)(state)
        # As the trainer does before its first step.
        moments = optax.tree_map_params(
            _OPTIMIZER,
            lambda x, weight: jax.device_put(x, weight.sharding),
            moments,
            state,
        )

    def step(state: Any, moments: Any, tokens: Any) -> tuple[Any, ...]:
        length = tokens.shape[1]

        def loss(state: Any) -> Any:
            model = nnx.merge(graph, state)
            mask = jnp.tril(jnp.ones((tokens.shape[0], length, length), bool))
            positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
            ones = jnp.ones(tokens.shape)
            return peft_trainer._default_loss_fn(model, tokens, ones, positions, mask)

        value, grads = jax.value_and_grad(loss)(state)
        norm = optax.global_norm(grads)
        updates, moments = _OPTIMIZER.update(grads, moments, state)
        return optax.apply_updates(state, updates), moments, value, norm

    tokens = jnp.zeros((2 * jax.device_count(), 128), jnp.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))
    jax.set_mesh(mesh)  # The model's constraints read it.
    return jax.jit(step, donate_argnums=(0, 1)), state, moments, tokens


def tunix_llama_constrained() -> tuple[Any, ...]:
    """Llama of tunix, whose sharding constraints are not left out on CPUs."""
    from tunix.models.llama3 import model as llama

    llama.shard = lambda x, spec: jax.lax.with_sharding_constraint(
        x, PartitionSpec(*spec)
    )
    return tunix_llama()


class _DotReluDot(nn.Module):
    """The layer of the Flax guide on several devices."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        init = nn.initializers.xavier_normal()
        kernel = nn.with_partitioning(init, (None, "model"))
        y = jax.nn.relu(nn.Dense(self.depth, kernel_init=kernel, use_bias=False)(x))
        y = jax.lax.with_sharding_constraint(y, PartitionSpec("data", "model"))
        kernel = nn.with_partitioning(init, ("model", None))
        weight = self.param("W2", kernel, (self.depth, x.shape[-1]))
        z = jnp.dot(y, weight)
        return jax.lax.with_sharding_constraint(z, PartitionSpec("data", None)), None


class _Mlp(nn.Module):
    """The model of the Flax guide on several devices."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            _DotReluDot,
            length=4,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: None},
        )
        return layers(1024)(x)[0]


def flax_guide() -> tuple[Any, ...]:
    """Flax: a training step in the form of its guide on several devices."""
    mesh = _mesh(("data", "model"), jax.device_count() // 4, 4)
    model = _Mlp()
    x = jnp.ones((8, 512))

    def init(key: jax.Array, x: jax.Array) -> train_state.TrainState:
        variables = model.init(key, x)
        return train_state.TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=_OPTIMIZER
        )

    jax.set_mesh(mesh)
    key = jax.random.key(0)
    abstract = jax.eval_shape(init, key, x)
    shardings = nn.get_sharding(abstract, mesh)
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    state = jax.jit(init, out_shardings=shardings)(key, jax.device_put(x, rows))

    def step(state: train_state.TrainState, x: jax.Array) -> train_state.TrainState:
        def loss(params: Any) -> jax.Array:
            return model.apply({"params": params}, x).sum()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=shardings)
    return jitted, state, jax.device_put(x, rows)


def equinox_mlp() -> tuple[Any, ...]:
    """Equinox 0.13: the step of its tutorial on several devices (data parallel)."""
    import equinox as eqx

    mesh = _mesh(("batch",), jax.device_count())
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())
    model = eqx.nn.MLP(256, 64, 1024, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    moments = _OPTIMIZER.init(arrays)
    arrays, moments = jax.device_put((arrays, moments), whole)

    def step(arrays: Any, moments: Any, x: Any, y: Any) -> tuple[Any, ...]:
        arrays, moments = eqx.filter_shard((arrays, moments), whole)
        x, y = eqx.filter_shard((x, y), rows)

        def loss(arrays: Any) -> Any:
            found = jax.vmap(eqx.combine(arrays, static))(x)
            return jnp.mean((y - found) ** 2)

        grads = jax.grad(loss)(arrays)
        updates, moments = _OPTIMIZER.update(grads, moments, arrays)
        arrays = eqx.apply_updates(arrays, updates)
        return eqx.filter_shard((arrays, moments), whole)

    x = jax.device_put(jnp.ones((512, 256)), rows)
    y = jax.device_put(jnp.ones((512, 64)), rows)
    return jax.jit(step), arrays, moments, x, y


class _Unread(types.ModuleType):
    """A package that a script imports for its data, and its step does not use."""

    def __getattr__(self, name: str) -> Any:
        return _Unread(name)


def flax_lm1b(rows_over: tuple[str, ...] = ("data",)) -> tuple[Any, ...]:
    """Flax: the model, sharding rules and training step of its example lm1b.

    Args:
      rows_over: mesh axes that split the batch; the example's own by default.
    """
    importlib.import_module("flax.io")  # Looks for tensorflow itself.
    for name in ("tensorflow", "clu", "input_pipeline", "temperature_sampler"):
        sys.modules.setdefault(name, _Unread(name))
    import models
    import train
    import utils
    from configs import default

    config = default.get_config()
    config.num_layers, config.vocab_size = 2, 4096
    config.ici_fsdp_parallelism, config.ici_tensor_parallelism = -1, 2
    shape = models.TransformerConfig(
        vocab_size=config.vocab_size,
        output_vocab_size=config.vocab_size,
        logits_via_embedding=config.logits_via_embedding,
        dtype=jnp.bfloat16,
        emb_dim=config.emb_dim,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        qkv_dim=config.qkv_dim,
        mlp_dim=config.mlp_dim,
        max_len=config.max_target_length,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        kernel_init=nn.initializers.xavier_uniform(),
        bias_init=nn.initializers.normal(stddev=1e-6),
    )
    mesh = jax.sharding.Mesh(utils.create_device_mesh(config), config.mesh_axes)
    model = models.TransformerLM(shape.replace(deterministic=True))
    rate = train.create_learning_rate_schedule(
        config.learning_rate, config.warmup_steps
    )
    optimizer = optax.adamw(rate, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    state, shardings = utils.setup_initial_state(
        model, optimizer, config, jax.random.PRNGKey(0), mesh
    )
    rows = NamedSharding(mesh, PartitionSpec(rows_over))
    step = jax.jit(
        train.train_step,
        in_shardings=(shardings, rows, None),
        out_shardings=(shardings, None),
        static_argnums=(2, 3, 4),
        donate_argnums=0,
    )
    batch = jnp.ones((8 * jax.device_count(), config.max_target_length), jnp.int32)
    batch = {"inputs": jax.device_put(batch, rows)}
    return step, state, batch, shape, rate, 0.0, jax.random.key(1)


def flax_lm1b_rows() -> tuple[Any, ...]:
    """Flax's lm1b with rows split over the axis that splits the weights."""
    return flax_lm1b(("data", "fsdp"))


def bonsai_qwen3() -> tuple[Any, ...]:
    """Bonsai: its Qwen 3 and its own `forward`, which fills the cache with a prompt."""
    import dataclasses

    from bonsai.models.qwen3 import modeling

    kinds = (AxisType.Explicit,) * 2
    names = modeling.ShardMode.FSDP.value, modeling.ShardMode.TP.value
    mesh = jax.make_mesh((jax.device_count() // 2, 2), names, axis_types=kinds)
    jax.set_mesh(mesh)
    config = dataclasses.replace(
        modeling.ModelConfig.qwen3_0_6b(True, True), num_layers=2, vocab_size=8192
    )
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))
    rows = 2 * jax.device_count()
    tokens = jnp.ones((rows, 128), jnp.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(names[0])))
    cache = modeling.init_cache(config, rows, 128, 1, jnp.float32)
    return modeling.forward, model, cache, tokens, 0
