"""An encoder-decoder in Linen after Flax's wmt example: two lengths, shared table."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, EMB, HEADS, LAYERS = 32, 16, 2, 2


def shift_right(x):
    return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(EMB)(nn.relu(nn.Dense(2 * EMB)(inputs)))


class Encoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, inputs, encoder_mask):
        x = nn.LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(x, mask=encoder_mask)
        x = x + inputs
        return x + MlpBlock()(nn.LayerNorm()(x))


class EncoderDecoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, targets, encoded, decoder_mask, encoder_decoder_mask):
        x = nn.LayerNorm()(targets)
        x = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(x, mask=decoder_mask)
        x = x + targets
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(
            y, encoded, mask=encoder_decoder_mask
        )
        y = y + x
        return y + MlpBlock()(nn.LayerNorm()(y))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, encoder_mask):
        for lyr in range(LAYERS):
            x = Encoder1DBlock(name=f"encoderblock_{lyr}")(x, encoder_mask)
        return nn.LayerNorm(name="encoder_norm")(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, y, encoded, decoder_mask, encoder_decoder_mask):
        for lyr in range(LAYERS):
            y = EncoderDecoder1DBlock(name=f"encoderdecoderblock_{lyr}")(
                y, encoded, decoder_mask, encoder_decoder_mask
            )
        return nn.LayerNorm(name="encoderdecoder_norm")(y)


class Transformer(nn.Module):
    def setup(self):
        self.shared_embedding = nn.Embed(VOCAB, EMB)
        self.encoder, self.decoder = Encoder(), Decoder()

    def __call__(self, inputs, targets):
        encoder_mask = nn.make_attention_mask(inputs > 0, inputs > 0)
        encoded = self.encoder(self.shared_embedding(inputs), encoder_mask)
        decoder_mask = nn.combine_masks(
            nn.make_attention_mask(targets > 0, targets > 0),
            nn.make_causal_mask(targets),
        )
        cross_mask = nn.make_attention_mask(targets > 0, inputs > 0)
        y = self.shared_embedding(shift_right(targets))
        y = self.decoder(y, encoded, decoder_mask, cross_mask)
        return self.shared_embedding.attend(y) / jnp.sqrt(EMB)


def loss_fn(apply_fn, batch):
    logits = apply_fn(batch["inputs"], batch["targets"])
    weights = jnp.where(batch["targets"] > 0, 1, 0).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * weights).sum() / weights.sum(), {"weight": weights.sum()}


def make_batch(seed, batch_size):
    rng = np.random.default_rng(seed)

    def tokens(length):
        ids = rng.integers(1, VOCAB, (batch_size, length))
        ends = rng.integers(3, length + 1, (batch_size, 1))
        return np.where(np.arange(length)[None] < ends, ids, 0)

    return {"inputs": tokens(9), "targets": tokens(7)}
