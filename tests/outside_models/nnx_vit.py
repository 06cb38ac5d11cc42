"""A vision transformer in NNX after its tutorials: patches, a class token, labels."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

CLASSES = 5


class EncoderBlock(nnx.Module):
    def __init__(self, features, norm, *, rngs):
        self.norm1 = norm(features, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            num_heads=2, in_features=features, decode=False, use_bias=False, rngs=rngs
        )
        self.norm2 = norm(features, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(features, 2 * features, rngs=rngs),
            nnx.gelu,
            nnx.Linear(2 * features, features, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    def __init__(self, features=16, norm=nnx.LayerNorm, *, rngs):
        self.patch_embeddings = nnx.Conv(
            3, features, kernel_size=(4, 4), strides=(4, 4), padding="VALID", rngs=rngs
        )
        self.cls_token = nnx.Param(jnp.zeros((1, 1, features)))
        init = nnx.initializers.truncated_normal(0.02)
        self.position_embeddings = nnx.Param(init(rngs.params(), (1, 5, features)))
        self.encoder = nnx.Sequential(
            *[EncoderBlock(features, norm, rngs=rngs) for _ in range(2)]
        )
        self.final_norm = norm(features, rngs=rngs)
        self.classifier = nnx.Linear(features, CLASSES, rngs=rngs)

    def __call__(self, images):
        patches = self.patch_embeddings(images)
        patches = patches.reshape(images.shape[0], -1, patches.shape[-1])
        cls_token = jnp.tile(self.cls_token[...], [images.shape[0], 1, 1])
        x = jnp.concat([cls_token, patches], axis=1) + self.position_embeddings[...]
        return self.classifier(self.final_norm(self.encoder(x))[:, 0])


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def make_batch(seed, batch_size):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(batch_size, 8, 8, 3)).astype(np.float32),
        "label": rng.integers(0, CLASSES, batch_size),
    }
