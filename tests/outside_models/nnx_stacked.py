"""A decoder in NNX whose layers are stacked by nnx.vmap and run by lax.scan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, EMBED, LAYERS = 32, 16, 4


def dims(*names):
    return {"out_sharding": names}


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.RMSNorm(EMBED, scale_metadata=dims("embed"), rngs=rngs)
        self.mix = nnx.Linear(
            EMBED, EMBED, use_bias=False, kernel_metadata=dims("embed", None), rngs=rngs
        )
        self.up = nnx.Linear(
            EMBED,
            2 * EMBED,
            kernel_metadata=dims("embed", "mlp"),
            bias_metadata=dims("mlp"),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            2 * EMBED,
            EMBED,
            kernel_metadata=dims("mlp", "embed"),
            bias_metadata=dims("embed"),
            rngs=rngs,
        )

    def __call__(self, x):
        weights = jnp.tril(jnp.ones((x.shape[1],) * 2))
        means = jnp.einsum("ts,bsd->btd", weights / weights.sum(1, keepdims=True), x)
        x = x + self.mix(self.norm(means))
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class StackedLM(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(rngs):
            return Layer(rngs=rngs)

        self.embed = nnx.Embed(
            VOCAB, EMBED, embedding_metadata=dims("vocab", "embed"), rngs=rngs
        )
        self.layers = create(rngs)
        self.norm = nnx.RMSNorm(EMBED, scale_metadata=dims("embed"), rngs=rngs)

    def __call__(self, tokens):
        graphdef, state = nnx.split(self.layers)

        def layer(x, layer_state):
            return nnx.merge(graphdef, layer_state)(x), None

        x, _ = jax.lax.scan(layer, self.embed(tokens), state)
        return self.logits(x)

    def logits(self, x):
        """The tied head."""
        return self.embed.attend(self.norm(x))


def masked_loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    count = batch["loss_mask"].sum()
    return (losses * batch["loss_mask"]).sum() / count, {"weight": count}


def loss_fn(model, batch):
    return masked_loss(model(batch["tokens"]), batch)


def make_batch(seed, batch_size, length=6):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, (batch_size, length + 1))
    ends = rng.integers(1, length + 1, (batch_size, 1))
    mask = (np.arange(length)[None] < ends).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask}
