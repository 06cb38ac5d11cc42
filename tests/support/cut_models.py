"""Tiny models whose layers are called one by one, as public scripts write them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

VOCAB, EMBED, MLP, ROWS, LENGTH, DEPTH = 32, 16, 32, 16, 8, 4


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, VOCAB, (2, ROWS, LENGTH), np.int32)
    ids[:, :, -2:] = 0  # Padding.
    return {"tokens": ids[0], "targets": ids[1]}


def masked_loss(logits_BLV: Any, batch: dict[str, Any]) -> meshpar.metrics.Mean:
    """A mean over the tokens that are no padding."""
    targets = batch["targets"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets)
    weights = (targets > 0).astype(jnp.float32)
    return meshpar.metrics.Mean((losses * weights).sum(), weights.sum())


# NNX: mask and positions for every layer, which returns a cache beside its output.


def _linear(*dims: tuple[str, int], rngs: nnx.Rngs) -> nnx.Linear:
    names, sizes = zip(*dims, strict=True)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(*sizes, use_bias=False, kernel_init=init, rngs=rngs)


class NnxBlock(nnx.Module):
    def __init__(self, width: int, rate: float, rngs: nnx.Rngs) -> None:
        self.frequencies = jnp.exp(-jnp.arange(float(EMBED)))
        self.up = _linear(("embed", EMBED), ("mlp", width * MLP), rngs=rngs)
        self.down = _linear(("mlp", width * MLP), ("embed", EMBED), rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x_BLD, mask_BL, positions_BL, *, scale):
        angles = positions_BL[..., None] * self.frequencies[None, None]
        h = jax.nn.gelu(self.up(x_BLD + jnp.sin(angles).astype(x_BLD.dtype)))
        mixed = jnp.cumsum(self.down(h) * mask_BL[..., None], axis=1) / LENGTH
        return None, x_BLD + scale * self.dropout(mixed)


class NnxNet(nnx.Module):
    def __init__(self, widths: tuple[int, ...], rate: float, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
        self.embed = nnx.Embed(VOCAB, EMBED, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, rate, rngs) for width in widths])
        self.head = _linear(("embed", EMBED), ("vocab", VOCAB), rngs=rngs)

    def __call__(self, tokens_BL):
        x_BLD, mask_BL = self.embed(tokens_BL), tokens_BL > 0
        positions_BL = jnp.broadcast_to(jnp.arange(LENGTH)[None], tokens_BL.shape)
        for block in self.blocks:
            _, x_BLD = block(x_BLD, mask_BL, positions_BL, scale=0.5)
        return self.head(x_BLD)


def nnx_loss(net: nnx.Module, batch: dict[str, Any]) -> meshpar.metrics.Mean:
    return masked_loss(net(batch["tokens"]), batch)


# Linen.


def _dense(size: int, *names: str) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.Dense(size, use_bias=False, kernel_init=init)


class LinenBlock(nn.Module):
    """A layer; `pairs` returns its output as `nn.scan` wants it."""

    width: int = 1
    rate: float = 0.0
    train: bool = True
    pairs: bool = False

    @nn.compact
    def __call__(self, x_BLD, mask_BL):
        h = nn.gelu(_dense(self.width * MLP, "embed", "mlp")(x_BLD))
        h = _dense(EMBED, "mlp", "embed")(h) * mask_BL[..., None]
        h = nn.Dropout(self.rate, deterministic=not self.train)(h)
        x_BLD = x_BLD + jnp.cumsum(h, axis=1) / LENGTH
        return (x_BLD, None) if self.pairs else x_BLD


def _embed() -> nn.Embed:
    init = nn.with_logical_partitioning(
        nn.initializers.normal(0.25), ("vocab", "embed")
    )
    return nn.Embed(VOCAB, EMBED, embedding_init=init)


class LinenNet(nn.Module):
    """Layers are called in a loop, each rematerialized if `remat`, or by `nn.scan`."""

    widths: tuple[int, ...] = (1,) * DEPTH
    rate: float = 0.0
    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, tokens_BL, train: bool = False):
        embed = _embed()
        x_BLD, mask_BL = embed(tokens_BL), tokens_BL > 0
        block = nn.remat(LinenBlock) if self.remat else LinenBlock
        if self.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=len(self.widths),
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(1, self.rate, train, pairs=True, name="block")
            x_BLD, _ = stack(x_BLD, mask_BL)
        else:
            for number, width in enumerate(self.widths):
                layer = block(width, self.rate, train, name=f"block_{number}")
                x_BLD = layer(x_BLD, mask_BL)
        return embed.attend(x_BLD)


def linen_loss(apply: Callable, batch: dict[str, Any], **options: Any) -> Any:
    return masked_loss(apply(batch["tokens"], **options), batch)


class CrossBlock(nn.Module):
    """Reads the encoder's output and a bias of relative positions, both trained."""

    @nn.compact
    def __call__(self, x_BLD, encoded_BLD, bias_LM, mask_BL, train: bool):
        del train
        q_BLD = _dense(EMBED, "embed", "mlp")(x_BLD)
        k_BMD = _dense(EMBED, "embed", "mlp")(encoded_BLD)
        scores_BLM = jnp.einsum("BLD,BMD->BLM", q_BLD, k_BMD) / 4 + bias_LM[None]
        scores_BLM = jnp.where(mask_BL[:, None], scores_BLM, -1e9)
        weights_BLM = nn.softmax(scores_BLM)
        v_BMD = _dense(EMBED, "embed", "mlp")(encoded_BLD)
        mixed_BLD = jnp.einsum("BLM,BMD->BLD", weights_BLM, v_BMD)
        return x_BLD + _dense(EMBED, "mlp", "embed")(mixed_BLD)


class EncoderDecoder(nn.Module):
    """Two encoder layers; decoder layers attend to their output."""

    @nn.compact
    def __call__(self, inputs_BL, targets_BL):
        embed, mask_BL = _embed(), inputs_BL > 0
        encoded_BLD = embed(inputs_BL)
        for number in range(2):
            encoded_BLD = LinenBlock(name=f"encoder_{number}")(encoded_BLD, mask_BL)
        distance_LM = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None])
        bias_LM = self.param("bias", nn.initializers.normal(1.0), (LENGTH,))
        bias_LM = bias_LM[distance_LM]
        x_BLD = jnp.pad(embed(targets_BL)[:, :-1], ((0, 0), (1, 0), (0, 0)))
        for number in range(DEPTH):
            layer = CrossBlock(name=f"decoder_{number}")
            x_BLD = layer(x_BLD, encoded_BLD, bias_LM, mask_BL, True)
        return embed.attend(x_BLD)


def encoder_decoder_loss(
    apply: Callable, batch: dict[str, Any]
) -> meshpar.metrics.Mean:
    return masked_loss(apply(batch["tokens"], batch["targets"]), batch)


# The models for meshpar, cut at their layers or not.


@dataclasses.dataclass(frozen=True)
class Cut:
    """A model that has layers.

    Attributes:
      make: layers -> the model for meshpar, cut if they are named.
      layers: name of the layers.
    """

    make: Callable[[str], meshpar.Model]
    layers: str


def nnx_cut(*widths: int, rate: float = 0.0) -> Cut:
    def make(layers: str) -> meshpar.Model:
        return meshpar.from_nnx(
            lambda rngs: NnxNet(widths, rate, rngs), nnx_loss, layers=layers
        )

    return Cut(make, "blocks")


def linen_cut(layers: str = "block_*", **fields: Any) -> Cut:
    def make(layers: str) -> meshpar.Model:
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        training = functools.partial(linen_loss, train=True)
        net = LinenNet(**fields)
        return meshpar.from_linen(net, training, tokens, linen_loss, layers=layers)

    return Cut(make, layers)


def encoder_decoder() -> Cut:
    def make(layers: str) -> meshpar.Model:
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        net, loss = EncoderDecoder(), encoder_decoder_loss
        return meshpar.from_linen(net, loss, (tokens, tokens), layers=layers)

    return Cut(make, "decoder_*")


CUTS = {
    "nnx": nnx_cut(1, 1, 1, 1),
    "nnx_pattern": nnx_cut(1, 2, 1, 2),
    "linen": linen_cut(),
    "linen_pattern": linen_cut(widths=(1, 2, 1, 2), remat=True),
    "linen_scan": linen_cut("block", scan=True, remat=True),
    "encoder_decoder": encoder_decoder(),
}
