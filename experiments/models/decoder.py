"""Decoder-only transformer in NNX: GPT-2 or Llama by configuration.

Shape letters, for the whole repository: B batch, L length, D embed, F mlp, N heads,
K kv_heads, H head_dim, V vocab. A suffix gives the logical dims, also of a shard.
Layers are stacked on a leading dim named "layers" and scanned.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import meshpar
from experiments.models.loss import blockwise_cross_entropy, cross_entropy, logits
from meshpar import layouts, vocabulary
from meshpar.ops.attention import causal_attention

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and kind of a decoder.

    Attributes:
      vocab: number of token ids; 0 until the data gives it.
      length: longest sequence, in tokens.
      depth: number of layers.
      embed: width of the residual stream.
      heads: number of query heads; divides `embed`.
      kv_heads: number of key and value heads (grouped-query attention).
      mlp: width of the feed-forward layer.
      position: "rope" or "learned".
      norm: "rmsnorm" or "layernorm".
      activation: "swiglu" or "gelu".
      bias: whether linear layers have biases.
      tied: whether the head is the transposed embedding.
      dropout: rate after the embedding, attention and mlp.
      rope_theta: base of the rotary wavelengths.
      norm_eps: added to the mean square before its root, in norms.
      init_std: standard deviation of initial weights; 0 for 1/sqrt(fan_in).
      loss_block: tokens of a sequence whose logits exist at once; 0 for all.
    """

    vocab: int = 256
    length: int = 128
    depth: int = 4
    embed: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    position: str = "rope"
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.0
    loss_block: int = 0

    def __post_init__(self):
        choices = {
            "position": ("rope", "learned"),
            "norm": ("rmsnorm", "layernorm"),
            "activation": ("swiglu", "gelu"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {known}")
        if self.vocab < 0:
            raise ValueError(f"vocab={self.vocab}: use at least 1, or 0 for the data's")
        for name in ("length", "depth", "embed", "heads", "kv_heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use at least 1")
        if self.embed % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"embed={self.embed}, heads={self.heads}, kv_heads={self.kv_heads}: "
                "kv_heads must divide heads, and heads must divide embed"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rope needs an even head_dim")
        if self.loss_block < 0 or (self.loss_block and self.length % self.loss_block):
            raise ValueError(
                f"loss_block={self.loss_block}: use a divisor of length={self.length}, "
                "or 0 for all at once"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: use 0 <= dropout < 1")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embed // self.heads

    def flops_per_token(self) -> float:
        """Training FLOPs per token, forward and backward.

        6 per weight of a matmul and 12 * depth * embed * length for attention.
        Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
        """
        attention = self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.embed * self.mlp * (3 if self.activation == "swiglu" else 2)
        weights = self.depth * (attention + mlp) + self.embed * self.vocab
        return 6 * weights + 12 * self.depth * self.embed * self.length


GPT2_KIND = dict(
    position="learned", norm="layernorm", activation="gelu", bias=True, tied=True
)
"""What makes a decoder a GPT-2; the defaults make it a Llama."""


def _weight(
    rngs: nnx.Rngs, config: DecoderConfig, fan_in: int, scale: float = 1.0, **dims: int
) -> nnx.Param:
    """A normal weight whose dims are named and sized by `dims`, in order."""
    std = (config.init_std or fan_in**-0.5) * scale
    value = jax.random.normal(rngs.params(), tuple(dims.values())) * std
    return nnx.Param(value, out_sharding=tuple(dims))


def _bias(config: DecoderConfig, **dims: int) -> nnx.Param | None:
    if not config.bias:
        return None
    return nnx.Param(jnp.zeros(tuple(dims.values())), out_sharding=tuple(dims))


def _plus(x: Array, bias: nnx.Param | None) -> Array:
    if bias is None:
        return x
    b = bias[...]
    return x + b.reshape((1,) * (x.ndim - b.ndim) + b.shape)


def _residual(x_BLD: Array) -> Array:
    """The stream between blocks: split over `tensor` along the length.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
      Models, arXiv:2205.05198, section 4.2.2 (sequence parallelism).
    """
    return layouts.constrain(x_BLD, "batch", "residual_length", "embed")


def _gathered(x_BLD: Array) -> Array:
    """What attention, mlp and head see: whole sequences."""
    return layouts.constrain(x_BLD, "batch", "length", "embed")


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the embed dim, computed in float32."""

    def __init__(self, config: DecoderConfig):
        self.centered, self.eps = config.norm == "layernorm", config.norm_eps
        self.scale = nnx.Param(jnp.ones((config.embed,)), out_sharding=("embed",))
        zeros = nnx.Param(jnp.zeros((config.embed,)), out_sharding=("embed",))
        self.bias = zeros if self.centered else None

    def __call__(self, x_BLD: Array) -> Array:
        y = x_BLD.astype(jnp.float32)
        if self.centered:
            y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return _plus(y.astype(x_BLD.dtype) * self.scale[...][None, None], self.bias)


def rotate(x_BLNH: Array, theta: float) -> Array:
    """Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864)."""
    length, dim = x_BLNH.shape[1], x_BLNH.shape[-1]
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None]
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al., GQA, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        d, n, k, h = config.embed, config.heads, config.kv_heads, config.head_dim
        self.q = _weight(rngs, config, d, embed=d, heads=n, head_dim=h)
        self.k = _weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        self.v = _weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        out_scale = (2 * config.depth) ** -0.5
        self.o = _weight(rngs, config, d, out_scale, heads=n, head_dim=h, embed=d)
        self.q_bias = _bias(config, heads=n, head_dim=h)
        self.k_bias = _bias(config, kv_heads=k, head_dim=h)
        self.v_bias = _bias(config, kv_heads=k, head_dim=h)
        self.o_bias = _bias(config, embed=d)

    def __call__(self, x_BLD: Array) -> Array:
        q_BLNH = jnp.einsum("BLD,DNH->BLNH", x_BLD, self.q[...])
        k_BLKH = jnp.einsum("BLD,DKH->BLKH", x_BLD, self.k[...])
        v_BLKH = jnp.einsum("BLD,DKH->BLKH", x_BLD, self.v[...])
        q_BLNH = _plus(q_BLNH, self.q_bias)
        k_BLKH = _plus(k_BLKH, self.k_bias)
        v_BLKH = _plus(v_BLKH, self.v_bias)
        if self.config.position == "rope":
            q_BLNH = rotate(q_BLNH, self.config.rope_theta)
            k_BLKH = rotate(k_BLKH, self.config.rope_theta)
        q_BLNH = layouts.constrain(q_BLNH, "batch", "length", "heads", "head_dim")
        k_BLKH = layouts.constrain(k_BLKH, "batch", "length", "kv_heads", "head_dim")
        v_BLKH = layouts.constrain(v_BLKH, "batch", "length", "kv_heads", "head_dim")
        y_BLNH = causal_attention(q_BLNH, k_BLKH, v_BLKH)
        y_BLNH = layouts.constrain(y_BLNH, "batch", "length", "heads", "head_dim")
        return _plus(jnp.einsum("BLNH,NHD->BLD", y_BLNH, self.o[...]), self.o_bias)


class Mlp(nnx.Module):
    """Feed-forward layer: SwiGLU (Shazeer, arXiv:2002.05202) or GELU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, f = config.embed, config.mlp
        gated = config.activation == "swiglu"
        self.gate = _weight(rngs, config, d, embed=d, mlp=f) if gated else None
        self.up = _weight(rngs, config, d, embed=d, mlp=f)
        out_scale = (2 * config.depth) ** -0.5
        self.down = _weight(rngs, config, f, out_scale, mlp=f, embed=d)
        self.up_bias = _bias(config, mlp=f)
        self.down_bias = _bias(config, embed=d)

    def __call__(self, x_BLD: Array) -> Array:
        h_BLF = _plus(jnp.einsum("BLD,DF->BLF", x_BLD, self.up[...]), self.up_bias)
        if self.gate is None:
            h_BLF = jax.nn.gelu(h_BLF)
        else:
            h_BLF *= jax.nn.silu(jnp.einsum("BLD,DF->BLF", x_BLD, self.gate[...]))
        h_BLF = layouts.constrain(h_BLF, "batch", "length", "mlp")
        y_BLD = jnp.einsum("BLF,FD->BLD", h_BLF, self.down[...])
        return _plus(y_BLD, self.down_bias)


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = Norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config)
        self.mlp = Mlp(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BLD: Array) -> Array:
        y_BLD = self.attention(_gathered(self.attention_norm(x_BLD)))
        x_BLD = _residual(x_BLD + self.dropout(_residual(y_BLD)))
        y_BLD = self.mlp(_gathered(self.mlp_norm(x_BLD)))
        return _residual(x_BLD + self.dropout(_residual(y_BLD)))


class Decoder(nnx.Module):
    """Decoder-only language model.

    Source: Radford et al., GPT-2 (2019); Touvron et al., Llama, arXiv:2302.13971.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        if config.vocab == 0:
            raise ValueError("vocab=0: the data has to give it before a model is made")
        self.config = config
        d, v = config.embed, config.vocab
        # 1/sqrt(fan_in) of a lookup is 1; a tied head wants logits of order one.
        std = d**-0.5 if config.tied else 1.0
        self.embedding = _weight(rngs, config, 1, std, vocab=v, embed=d)
        positions = dict(length=config.length, embed=d)
        self.positions = (
            _weight(rngs, config, 1, 0.1 * std, **positions)
            if config.position == "learned"
            else None
        )

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.blocks = stacked(rngs)
        self.norm = Norm(config)
        self.head = None if config.tied else _weight(rngs, config, d, embed=d, vocab=v)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, tokens_BL: Array) -> Array:
        """Returns logits_BLV for token ids of at most `config.length`."""
        graph, params, rest = nnx.split(self.blocks, nnx.Param, ...)

        def layer(x_BLD: Array, state) -> tuple[Array, None]:
            return nnx.merge(graph, *state)(x_BLD), None

        x_BLD, _ = jax.lax.scan(layer, self.embed(tokens_BL), (params, rest))
        return logits(self.norm(x_BLD), self.head_weight())

    def embed(self, tokens_BL: Array) -> Array:
        """Returns x_BLD, what the first layer sees."""
        if tokens_BL.shape[1] > self.config.length:
            raise ValueError(
                f"tokens {tokens_BL.shape} are longer than length={self.config.length}"
            )
        # ZeRO-3 gathers the table; looking up shards of rows would move activations.
        w_VD = layouts.constrain(self.embedding[...], "vocab", None)
        x_BLD = vocabulary.lookup(w_VD, tokens_BL)
        if self.positions is not None:
            x_BLD += self.positions[...][None, : tokens_BL.shape[1]]
        return _residual(self.dropout(x_BLD))

    def head_weight(self) -> Array:
        """The head w[D, V]; the transposed embedding if it is tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def head_loss(self, x_BLD: Array, targets_BL: Array) -> Array:
        """Mean next-token cross-entropy, in nats, of what the last layer returned."""
        x_BLD, w_DV = _gathered(self.norm(x_BLD)), self.head_weight()
        if not self.config.loss_block:
            return cross_entropy(logits(x_BLD, w_DV), targets_BL)
        return blockwise_cross_entropy(x_BLD, w_DV, targets_BL, self.config.loss_block)


def language_model(config: DecoderConfig) -> meshpar.Model:
    """The decoder with next-token cross-entropy, in layered form.

    Its batches are {"tokens": ids_BL, "targets": ids_BL}.
    """
    stages = meshpar.LayerStack(
        stack="blocks",
        embed=lambda decoder, batch: decoder.embed(batch["tokens"]),
        layer=lambda block, x_BLD: block(x_BLD),
        head_loss=lambda decoder, x_BLD, batch: decoder.head_loss(
            x_BLD, batch["targets"]
        ),
    )
    return meshpar.from_nnx(lambda rngs: Decoder(config, rngs), stages)
