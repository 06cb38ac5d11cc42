"""A Llama and its training step on one page of plain JAX, as a yardstick on one GPU.

No Flax, optax or meshpar: a scan over rematerialized layers, attention by cuDNN, the
loss in blocks of tokens, float32 master weights with copies in bfloat16, and Adam.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.models.decoder_config import DecoderConfig
from meshpar.arrays import Array, Params
from meshpar.layouts import mixes

_STACK = "blocks/"
_RATE, _MEAN_DECAY, _SQUARE_DECAY, _EPS = 3e-4, 0.9, 0.95, 1e-8


def _keeps_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy that keeps the results of cuDNN's forward kernel."""
    return "dot_product_attention_fwd" in primitive.name


_POLICIES = {
    "full": None,
    "attention": _keeps_attention,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keeps_attention
    ),
}


def make_step(
    config: DecoderConfig, remat: str, unroll: int, attention: str
) -> Callable[[Any, Any], Any]:
    """(state, batch) -> (state, loss), jitted; the state is donated.

    Args:
      config: of a Llama.
      remat: as in a layout: "full", "attention", "dots", "none", or a mix of them.
      unroll: layers that a round of a loop over them runs.
      attention: the implementation of `jax.nn.dot_product_attention`.
    """

    def step(state: Any, batch: dict[str, Array]) -> Any:
        params, means, squares, count = state
        loss_fn = functools.partial(_loss, config, remat, unroll, attention)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        count, tree = count + 1, jax.tree.map
        scale = 1 / (1 - _MEAN_DECAY**count), 1 / (1 - _SQUARE_DECAY**count)
        means = tree(lambda m, g: m + (1 - _MEAN_DECAY) * (g - m), means, grads)
        squares = tree(
            lambda v, g: v + (1 - _SQUARE_DECAY) * (g * g - v), squares, grads
        )
        params = tree(
            lambda p, m, v: p - _RATE * m * scale[0] / (jnp.sqrt(v * scale[1]) + _EPS),
            params,
            means,
            squares,
        )
        return (params, means, squares, count), loss

    return jax.jit(step, donate_argnums=0)


def make_state(params: Params) -> Any:
    """Parameters, moments of zeros and the count of steps."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return params, zeros(params), zeros(params), jnp.float32(0)


def _norm(x: Array, scale: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype) * scale


def _rotate(x_BLNH: Array, theta: float) -> Array:
    half = x_BLNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(x_BLNH.shape[1])[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x_BLNH[..., :half], x_BLNH[..., half:]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return rotated.astype(x_BLNH.dtype)


def _layer(config: DecoderConfig, attention: str, x_BLD: Array, p: Params) -> Array:
    h_BLD = _norm(x_BLD, p["attention_norm/scale"], config.norm_eps)
    q, k, v = (jnp.einsum("BLD,DNH->BLNH", h_BLD, p[f"attention/{n}"]) for n in "qkv")
    q, k = _rotate(q, config.rope_theta), _rotate(k, config.rope_theta)
    y_BLNH = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation=attention
    )
    x_BLD += jnp.einsum("BLNH,NHD->BLD", y_BLNH, p["attention/o"])
    h_BLD = _norm(x_BLD, p["mlp_norm/scale"], config.norm_eps)
    h_BLF = jax.nn.silu(h_BLD @ p["mlp/gate"]) * (h_BLD @ p["mlp/up"])
    return x_BLD + h_BLF @ p["mlp/down"]


def _loss(
    config: DecoderConfig,
    remat: str,
    unroll: int,
    attention: str,
    params: Params,
    batch: dict[str, Array],
) -> Array:
    p = {path: x.astype(jnp.bfloat16) for path, x in params.items()}
    stack = {k.removeprefix(_STACK): x for k, x in p.items() if k.startswith(_STACK)}
    x_BLD, start = p["embedding"][batch["tokens"]], 0
    for policy, count in mixes.segments(remat, config.depth):
        layer = functools.partial(_layer, config, attention)
        if policy != "none":
            layer = jax.checkpoint(layer, policy=_POLICIES[policy])
        own = {path: w[start : start + count] for path, w in stack.items()}
        x_BLD, _ = lax.scan(
            lambda x, w, layer=layer: (layer(x, w), None),
            x_BLD,
            own,
            unroll=min(unroll, count),
        )
        start += count
    x_BLD = _norm(x_BLD, p["norm/scale"], config.norm_eps)
    head_DV = p["embedding"].T if config.tied else p["head"]

    @jax.checkpoint
    def block_loss(x_BKD: Array, targets_BK: Array) -> Array:
        # Products in float32 would run their gradients as TF32, at half the speed.
        logits = (x_BKD @ head_DV).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets_BK[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).sum()

    blocks = config.length // (config.loss_block or config.length)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(len(x), blocks, -1, *x.shape[2:]), 1, 0)

    losses = lax.map(
        lambda block: block_loss(*block), (split(x_BLD), split(batch["targets"]))
    )
    return losses.sum() / batch["targets"].size
