"""Causal attention of whole sequences: cuDNN on GPUs, splash on TPUs, or plain jnp.

All forms are equal within the rounding of the dtype. The kernels never hold the scores
[B, N, L, L]; plain jnp holds them and runs on every platform. Shape letters are those
of `meshpar.arrays`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from meshpar import compat
from meshpar.arrays import Array
from meshpar.layouts.remat import ATTENTION, CUDNN, SPLASH, SPLASH_INPUTS
from meshpar.mesh.platform import CPU, GPU, TPU, traced_platform
from meshpar.ops.attention_by_heads import attention_by_heads
from meshpar.ops.block_sums import MOST_ADDED, by_additions
from meshpar.ops.kernels import Packed, on_shards

LANES = 128
"""Numbers in a row of a TPU's tile, to which narrower heads are padded."""

MOST_FUSED = MOST_ADDED
"""Most blocks of keys for which one kernel computes all gradients.

It writes a gradient of the queries for each block of keys, which are added later: 64
times the queries with 32,768 tokens. Two kernels compute scores twice and write one.
"""
DIM_NAMES = ("batch", "length", "heads", "head_dim")
"""Names of the dims of queries, keys, values and outputs, for rules of layouts."""


NAMES = {CPU: ATTENTION, GPU: CUDNN, TPU: SPLASH}
"""{platform: name by which policies of rematerialization keep attention}."""

_BY_HEADS = "batch", "heads", "length", "head_dim"
"""Names of the dims of what splash reads and gives."""

SEGMENT_NAMES = DIM_NAMES[:2]
"""Names of the dims of segments."""


def by_platform(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    segments_BL: Array | None = None,
    window: int = 0,
) -> Array:
    """Causal attention by the kernel of the platform that the program is traced for.

    Args:
      q_BLNH: queries, any float dtype; cuDNN needs bfloat16 or float16 and a head_dim
        that it supports, splash a length that is a multiple of 128, and other arrays
        take plain jnp.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.
      segments_BL: number of the document of each token; None for one document.
      window: tokens that each token sees, itself among them; 0 for all.

    Returns:
      y_BLNH, in the dtype of the queries.

    Raises:
      LayoutError: a dim that does not divide over its axes.

    Source: Dao et al., FlashAttention, arXiv:2205.14135.
    """
    platform, qkv = traced_platform(), (q_BLNH, k_BLKH, v_BLKH)
    options = {
        "others": [] if segments_BL is None else [(segments_BL, SEGMENT_NAMES)],
        "saves": NAMES[platform],
    }
    half = q_BLNH.dtype in (jnp.bfloat16, jnp.float16)
    if platform is TPU and splash_fits(q_BLNH):
        kernel = functools.partial(splash_by_heads, window=window)
        return splash(kernel, *qkv, others=options["others"], inputs=SPLASH_INPUTS)
    if platform is GPU and half and compat.has_cudnn() and cudnn_fits(*qkv):
        kernel = functools.partial(cudnn, window=window)
        return on_shards(kernel, DIM_NAMES, *qkv, **options)
    plain = attention_by_heads if platform is CPU else reference
    return checkpoint_name(plain(*qkv, segments_BL, window=window), ATTENTION)


def reference(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    segments_BL: Array | None = None,
    *,
    window: int = 0,
    implementation: str = "xla",
) -> Array:
    """Attention by `jax.nn`; holds all scores unless a kernel implements it."""
    mask = None
    if segments_BL is not None:
        mask = (segments_BL[:, :, None] == segments_BL[:, None])[:, None]
    return jax.nn.dot_product_attention(
        q_BLNH,
        k_BLKH,
        v_BLKH,
        mask=mask,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )


cudnn = functools.partial(reference, implementation="cudnn")
"""Flash attention by cuDNN; half precision only."""


def cudnn_fits(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> bool:
    """Whether jax calls cuDNN for these shapes: it refuses some values of head_dim."""
    try:
        jax.eval_shape(cudnn, q_BLNH, k_BLKH, v_BLKH)
    except NotImplementedError:
        return False
    return True


def splash_fits(q_BLNH: Array) -> bool:
    """Whether the length is a multiple of the kernel's tile."""
    return q_BLNH.shape[1] % LANES == 0


def splash(
    kernel: Callable[..., Array],
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    others: Sequence[tuple[Array, Sequence[str]]] = (),
    inputs: str = "",
) -> Array:
    """Pallas splash attention on the shards of each device.

    A policy of rematerialization keeps the results of the kernel, as `SPLASH`, without
    its inputs. Each head's dim is padded with zeros to whole tiles, which costs FLOPs.

    Args:
      kernel: `splash_by_heads` with its options.
      q_BLNH: queries, of equal parts of the sequence or all of it.
      k_BLKH: keys of the whole sequence.
      v_BLKH: their values.
      others: segments and their dim names, as `on_shards` takes them.
      inputs: a name by which a policy keeps the inputs of the kernel; by default none.
    """
    arrays = _by_heads(q_BLNH, k_BLKH, v_BLKH)
    if inputs:
        arrays = [checkpoint_name(x, inputs) for x in arrays]
    y_BNLH = on_shards(
        kernel,
        _BY_HEADS,
        *arrays,
        others=others,
        saves=SPLASH,
        packed=_dense(q_BLNH.shape[-1]),
        derivative=by_additions,
    )
    return y_BNLH.swapaxes(1, 2)[..., : q_BLNH.shape[-1]]


def _by_heads(*qkv: Array) -> list[Array]:
    """Queries, scaled, and keys and values in the form that splash reads."""
    q_BLNH, head_dim = qkv[0], qkv[0].shape[-1]
    scaled = q_BLNH * jnp.asarray(head_dim**-0.5, q_BLNH.dtype), *qkv[1:]
    padding = (0, 0), (0, 0), (0, 0), (0, -head_dim % LANES)
    return [jnp.pad(x, padding).swapaxes(1, 2) for x in scaled]


def _dense(head_dim: int) -> Packed | None:
    """The form of outputs of splash without padding; None if they have none."""
    if head_dim % LANES == 0:
        return None

    def pack(y_BNLH: Array) -> Array:
        y_BLNH = y_BNLH.swapaxes(1, 2)[..., :head_dim]
        return y_BLNH.reshape(*y_BLNH.shape[:2], -1)

    def unpack(y_BLD: Array) -> Array:
        y_BLNH = y_BLD.reshape(*y_BLD.shape[:2], -1, head_dim)
        padding = (0, 0), (0, 0), (0, 0), (0, -head_dim % LANES)
        return jnp.pad(y_BLNH, padding).swapaxes(1, 2)

    return Packed(pack, unpack, ("batch", "length", "heads"))


def splash_by_heads(
    q_BNLH: Array,
    k_BKMH: Array,
    v_BKMH: Array,
    q_segments_BL: Array | None = None,
    k_segments_BM: Array | None = None,
    *,
    window: int = 0,
    part: Array | int = 0,
    places: np.ndarray | None = None,
    interpret: bool = False,
) -> Array:
    """Pallas splash attention of padded arrays whose heads come before the length.

    Args:
      q_BNLH: scaled queries, of equal parts of the sequence or all of it.
      k_BKMH: keys of the whole sequence.
      v_BKMH: their values.
      q_segments_BL: number of the document of each query; None for one document.
      k_segments_BM: that of each key; None for those of the queries.
      window: as in `by_platform`.
      part: number of the part whose queries are given.
      places: places in the sequence of the queries of all parts, one part after
        another; None if those are in order.
      interpret: whether to run on any platform, slowly.
    """
    heads, length = q_BNLH.shape[1:3]
    whole = k_BKMH.shape[2]
    mask = splash_mask(whole, window, places)
    kernel = splash_kernel([mask] * heads, whole // length, interpret)
    kernel = _of_part(kernel, part, whole // length)
    segments = None
    if q_segments_BL is not None:
        keys = q_segments_BL if k_segments_BM is None else k_segments_BM
        segments = splash_attention_kernel.SegmentIds(q_segments_BL, keys)
    return jax.vmap(kernel)(q_BNLH, k_BKMH, v_BKMH, segments)


def splash_mask(length: int, window: int, places: np.ndarray | None) -> Any:
    """The mask of one head; the arguments are those of `splash_by_heads`."""
    shape = length, length
    if window:
        mask = splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = splash_attention_mask.CausalMask(shape)
    if places is not None:
        mask.q_sequence = places.astype(np.int32)
    return mask


def splash_kernel(masks: Sequence[Any], num_parts: int, interpret: bool = False) -> Any:
    """The kernel, with tables of the blocks that each part of the queries computes.

    Args:
      masks: one for each head.
      num_parts: equal parts of the queries.
      interpret: as in `splash`.
    """
    length = masks[0].shape[0] // num_parts
    block = next(size for size in (512, 256, 128) if length % size == 0)
    fused = masks[0].shape[1] // block <= MOST_FUSED
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
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask(masks),
        head_shards=1,
        q_seq_shards=num_parts,
        block_sizes=sizes,
        interpret=interpret,
    )


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
