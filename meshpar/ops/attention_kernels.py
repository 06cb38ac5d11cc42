"""Causal attention of whole sequences: cuDNN on GPUs, splash on TPUs, or plain jnp.

All forms are equal within the rounding of the dtype. The kernels never hold the scores
[B, N, L, L]; plain jnp holds them and runs on every platform. Shape letters are those
of `meshpar.arrays`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from meshpar.arrays import Array
from meshpar.mesh.platform import GPU, TPU, platform_named, traced_platform
from meshpar.ops.kernels import on_shards

_TILE = 128
MOST_FUSED = 8
"""Most blocks of keys for which one kernel computes all gradients.

It writes a gradient of the queries for each block of keys, which are summed later: 64
times the queries with 32,768 tokens. Two kernels compute scores twice and write one.
"""
DIM_NAMES = ("batch", "length", "heads", "head_dim")
"""Names of the dims of queries, keys, values and outputs, for rules of layouts."""


def by_platform(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Causal attention by the kernel of the platform that the program is traced for.

    Args:
      q_BLNH: queries, any float dtype; cuDNN needs bfloat16 or float16, splash a length
        that is a multiple of 128, and other arrays take plain jnp.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.

    Returns:
      y_BLNH, in the dtype of the queries.

    Raises:
      LayoutError: a dim that does not divide over its axes.

    Source: Dao et al., FlashAttention, arXiv:2205.14135.
    """
    platform = traced_platform()
    if platform is TPU and splash_fits(q_BLNH):
        return on_shards(splash, DIM_NAMES, q_BLNH, k_BLKH, v_BLKH)
    half = q_BLNH.dtype in (jnp.bfloat16, jnp.float16)
    if platform is GPU and half and platform_named(jax.default_backend()) is GPU:
        return on_shards(cudnn, DIM_NAMES, q_BLNH, k_BLKH, v_BLKH)
    return reference(q_BLNH, k_BLKH, v_BLKH)


def reference(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Attention in plain jnp; holds all scores."""
    return jax.nn.dot_product_attention(
        q_BLNH, k_BLKH, v_BLKH, is_causal=True, implementation="xla"
    )


def cudnn(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Flash attention by cuDNN; half precision only."""
    return jax.nn.dot_product_attention(
        q_BLNH, k_BLKH, v_BLKH, is_causal=True, implementation="cudnn"
    )


def splash_fits(q_BLNH: Array) -> bool:
    """Whether the length is a multiple of the kernel's tile."""
    return q_BLNH.shape[1] % _TILE == 0


def splash(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    part: Array | int = 0,
    interpret: bool = False,
) -> Array:
    """Pallas splash attention.

    Each head's dim is padded with zeros to whole tiles, which costs FLOPs.

    Args:
      q_BLNH: queries, of equal parts of the sequence or all of it.
      k_BLKH: keys of the whole sequence.
      v_BLKH: their values.
      part: number of the part whose queries are given.
      interpret: whether to run on any platform, slowly.
    """
    length, heads, head_dim = q_BLNH.shape[1:]
    whole = k_BLKH.shape[1]
    block = next(size for size in (512, 256, 128) if length % size == 0)
    fused = whole // block <= MOST_FUSED
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
    causal = splash_attention_mask.CausalMask((whole, whole))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * heads),
        head_shards=1,
        q_seq_shards=whole // length,
        block_sizes=sizes,
        interpret=interpret,
    )
    kernel = _of_part(kernel, part, whole // length)
    q_BLNH *= jnp.asarray(head_dim**-0.5, q_BLNH.dtype)
    padding = (0, 0), (0, 0), (0, 0), (0, -head_dim % _TILE)
    y_BNLH = jax.vmap(kernel)(
        *(jnp.pad(x, padding).swapaxes(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    )
    return y_BNLH.swapaxes(1, 2)[..., :head_dim]


def _of_part(kernel: Any, part: Array | int, num_parts: int) -> Any:
    """The splash kernel for one part of the queries: its rows of the mask's tables."""

    def rows(info: Any) -> Any:
        if info is None:
            return None
        tables = {}
        for name, x in info._asdict().items():
            dim = 0 if name == "q_sequence" else 1
            if x is not None and name != "partial_mask_blocks":  # Those are shared.
                size = x.shape[dim] // num_parts
                x = lax.dynamic_slice_in_dim(x, part * size, size, dim)
            tables[name] = x
        return type(info)(**tables)

    if num_parts == 1:
        return kernel
    infos, options = kernel.tree_flatten()
    return type(kernel).tree_unflatten(options, tuple(map(rows, infos)))
