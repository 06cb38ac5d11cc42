"""Fine-tuning after Tunix's PeftTrainer: LoRA in a decoder, batches of a class."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from outside_models import nnx_gemma

import meshpar


@flax.struct.dataclass
class TrainingInput:
    input_tokens: jax.Array
    input_mask: jax.Array


def apply_lora(model, rank, *, rngs):
    """Puts LoRA into the linear modules, as a library that rewrites modules does."""
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            sizes = linear.in_features, rank, linear.out_features
            setattr(layer.mlp, name, Adapted(linear, nnx.LoRA(*sizes, rngs=rngs)))
    return model


class Adapted(nnx.Module):
    def __init__(self, base, lora):
        self.base, self.lora = base, lora
        self.lora.lora_b.set_value(0.1 * jnp.ones_like(lora.lora_b.get_value()))

    def __call__(self, x, out_sharding=None):
        return self.base(x, out_sharding=out_sharding) + self.lora(x)


def make(rngs):
    sharding = nnx_gemma.ShardingConfig.fsdp_tp_sharding()
    return apply_lora(nnx_gemma.Transformer(sharding, rngs=rngs), 2, rngs=rngs)


def loss_fn(model, batch):
    """PeftTrainer's default loss: of the tokens that the mask keeps."""
    tokens, mask = batch.input_tokens, batch.input_mask
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, dtype=bool))
    logits = model(tokens, positions, mask[:, None] & causal[None])[:, :-1]
    target_mask = mask[:, 1:].astype(jnp.float32)
    one_hot = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
    losses = optax.softmax_cross_entropy(logits, one_hot) * target_mask
    return meshpar.metrics.Mean(losses.sum(), target_mask.sum())


def make_batch(seed, batch_size, length=8):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, nnx_gemma.VOCAB, (batch_size, length))
    ends = rng.integers(3, length + 1, (batch_size, 1))
    return TrainingInput(tokens, np.arange(length)[None] < ends)
