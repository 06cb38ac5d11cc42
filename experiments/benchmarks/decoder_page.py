"""A decoder and its training step on one page of plain JAX, as a yardstick on CPUs.

No Flax, optax or meshpar: parameters in a dictionary, one scan over the layers, one jit
around one shard_map whose collectives are written by hand, and Adam in four lines. It
is written for speed on CPUs: matmuls of two dims, attention by heads, softmax divided
last, activations that save their slope.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.models.decoder_config import DecoderConfig
from meshpar.arrays import Array, Params

_STACK = "blocks/"
_TENSOR, _FSDP = "tensor", "fsdp"
_AXIS_OF_DIM = {
    "embed": _FSDP,
    "heads": _TENSOR,
    "kv_heads": _TENSOR,
    "mlp": _TENSOR,
    "vocab": _TENSOR,
}
_RATE, _MEAN_DECAY, _SQUARE_DECAY, _EPS = 3e-4, 0.9, 0.95, 1e-8


def specs_of(names: dict[str, tuple[str, ...]]) -> dict[str, PartitionSpec]:
    """Shardings of parameters by the names of their dims; biases and scales are whole.

    Args:
      names: {path: names of the dims}, "layers" first in a stack.
    """
    specs = {}
    for path, dims in names.items():
        is_small = len(dims) - dims.count("layers") == 1 and dims[-1] == "embed"
        axes = [None if is_small else _AXIS_OF_DIM.get(dim) for dim in dims]
        specs[path] = PartitionSpec(*axes)
    return specs


def _matmul(x: Array, w: Array, dims: int = 1) -> Array:
    """Contracts the last dims of x[B, L, ...] with the first of w, as one matmul."""
    size = int(np.prod(w.shape[:dims]))
    y = x.reshape(-1, size) @ w.reshape(size, -1)
    return y.reshape(*x.shape[:2], *w.shape[dims:])


@jax.custom_vjp
def _gelu(x: Array) -> Array:
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    scale = np.float32(np.sqrt(2 / np.pi))
    t = jnp.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)
    return lax.optimization_barrier((0.5 * x * (1 + t), slope))


_gelu.defvjp(_gelu_and_slope, lambda slope, dy: (slope * dy,))


@jax.custom_vjp
def _swiglu(gate: Array, up: Array) -> Array:
    return _swiglu_and_slopes(gate, up)[0]


def _swiglu_and_slopes(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    slopes = up * (sigmoid + silu * (1 - sigmoid)), silu
    return lax.optimization_barrier((silu * up, slopes))


_swiglu.defvjp(_swiglu_and_slopes, lambda slopes, dy: tuple(s * dy for s in slopes))


def _rotate(x_BLNH: Array, theta: float) -> Array:
    half = x_BLNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(x_BLNH.shape[1])[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x_BLNH[..., :half], x_BLNH[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(q_BLNH: Array, k_BLNH: Array, v_BLNH: Array) -> Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q_BLNH, k_BLNH, v_BLNH))
    length, width = q.shape[2:]
    scores = jnp.einsum("BNLH,BNMH->BNLM", q * width**-0.5, k)
    seen = jnp.arange(length)[:, None] >= jnp.arange(length)[None]
    scores = jnp.where(seen, scores, -1e30)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y = jnp.einsum("BNLM,BNMH->BNLH", weights, v) / weights.sum(-1, keepdims=True)
    return y.transpose(0, 2, 1, 3)


def _norm(x: Array, params: Params, name: str, eps: float) -> Array:
    bias = params.get(f"{name}/bias")
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * params[f"{name}/scale"]
    return y if bias is None else y + bias


class Page:
    """The step of a decoder in float32.

    Args:
      config: without experts, windows, dropout or grouped queries.
      specs: {path: sharding}, of `specs_of`.
      mesh: with some of the axes data, fsdp and tensor.
    """

    def __init__(
        self, config: DecoderConfig, specs: dict[str, PartitionSpec], mesh: Mesh
    ):
        used = {axis for axis, size in mesh.shape.items() if size > 1}

        def of_mesh(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*[axis if axis in used else None for axis in spec])

        self._config, self._mesh = config, mesh
        self._specs = {path: of_mesh(spec) for path, spec in specs.items()}
        self._tensor = _TENSOR if _TENSOR in used else None
        rows = tuple(axis for axis in ("data", _FSDP) if axis in used)
        self._rows, self._batch_spec = rows, PartitionSpec(rows or None)

    def step(self) -> Callable[[Any, Any], Any]:
        """(state, batch) -> (state, loss), jitted; the state is donated."""
        local = jax.shard_map(
            self._loss,
            mesh=self._mesh,
            in_specs=(self._specs, self._batch_spec, self._batch_spec),
            out_specs=PartitionSpec(),
        )

        def step(state: Any, batch: dict[str, Array]) -> Any:
            params, means, squares, count = state
            loss, grads = jax.value_and_grad(local)(
                params, batch["tokens"], batch["targets"]
            )
            count, tree = count + 1, jax.tree.map
            c = 1 - _MEAN_DECAY**count, 1 - _SQUARE_DECAY**count
            means = tree(lambda m, g: m + (1 - _MEAN_DECAY) * (g - m), means, grads)
            squares = tree(
                lambda v, g: v + (1 - _SQUARE_DECAY) * (g * g - v), squares, grads
            )
            params = tree(
                lambda p, m, v: p - _RATE * (m / c[0]) / (jnp.sqrt(v / c[1]) + _EPS),
                params,
                means,
                squares,
            )
            return (params, means, squares, count), loss

        return jax.jit(step, donate_argnums=0)

    def state(self, params: Params) -> Any:
        """Parameters, moments of zeros and the count of steps, on the devices."""
        place = jax.device_put
        shardings = {p: NamedSharding(self._mesh, s) for p, s in self._specs.items()}
        zeros = {path: np.zeros_like(x) for path, x in params.items()}
        whole = NamedSharding(self._mesh, PartitionSpec())
        return (
            place(params, shardings),
            place(zeros, shardings),
            place(zeros, shardings),
            place(np.float32(0), whole),
        )

    def place_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """The batch, split by rows over the devices."""
        return jax.device_put(batch, NamedSharding(self._mesh, self._batch_spec))

    def _gathered(self, params: Params, prefix: str) -> Params:
        """Gathers over fsdp the weights of one layer, or those outside the layers."""
        found = {}
        for path, x in params.items():
            spec = self._specs[prefix + path][1 if prefix else 0 :]
            if _FSDP in spec:
                x = lax.all_gather(x, _FSDP, axis=spec.index(_FSDP), tiled=True)
            found[path] = x
        return found

    def _sum(self, x: Array) -> Array:
        return lax.psum(x, self._tensor) if self._tensor else x

    def _layer(self, x_BLD: Array, stack: Params) -> Array:
        p, config = self._gathered(stack, _STACK), self._config
        h_BLD = _norm(x_BLD, p, "attention_norm", config.norm_eps)
        q, k, v = (
            _matmul(h_BLD, p[f"attention/{n}"]) + p.get(f"attention/{n}_bias", 0)
            for n in "qkv"
        )
        if config.position == "rope":
            q, k = _rotate(q, config.rope_theta), _rotate(k, config.rope_theta)
        y_BLD = self._sum(_matmul(_attend(q, k, v), p["attention/o"], 2))
        x_BLD = x_BLD + y_BLD + p.get("attention/o_bias", 0)
        h_BLD = _norm(x_BLD, p, "mlp_norm", config.norm_eps)
        up_BLF = _matmul(h_BLD, p["mlp/up"]) + p.get("mlp/up_bias", 0)
        if config.activation == "swiglu":
            h_BLF = _swiglu(_matmul(h_BLD, p["mlp/gate"]), up_BLF)
        else:
            h_BLF = _gelu(up_BLF)
        y_BLD = self._sum(_matmul(h_BLF, p["mlp/down"]))
        return x_BLD + y_BLD + p.get("mlp/down_bias", 0)

    def _embed(self, w_VD: Array, tokens_BL: Array) -> Array:
        if not self._tensor:
            return w_VD[tokens_BL]
        row = tokens_BL - lax.axis_index(self._tensor) * len(w_VD)
        x_BLD = w_VD[jnp.clip(row, 0, len(w_VD) - 1)]
        inside = (row >= 0) & (row < len(w_VD))
        return self._sum(jnp.where(inside[..., None], x_BLD, 0))

    def _losses(self, logits_BLV: Array, targets_BL: Array) -> Array:
        if not self._tensor:
            picked = jnp.take_along_axis(logits_BLV, targets_BL[..., None], -1)
            return jax.nn.logsumexp(logits_BLV, -1) - picked[..., 0]
        size = logits_BLV.shape[-1]
        row = targets_BL - lax.axis_index(self._tensor) * size
        inside = (row >= 0) & (row < size)
        at = jnp.clip(row, 0, size - 1)[..., None]
        picked = jnp.take_along_axis(logits_BLV, at, -1)[..., 0]
        top = lax.pmax(lax.stop_gradient(logits_BLV.max(-1)), self._tensor)
        total = self._sum(jnp.exp(logits_BLV - top[..., None]).sum(-1))
        return jnp.log(total) + top - self._sum(jnp.where(inside, picked, 0))

    def _loss(self, params: Params, tokens_BL: Array, targets_BL: Array) -> Array:
        stack = {
            path.removeprefix(_STACK): x
            for path, x in params.items()
            if path.startswith(_STACK)
        }
        rest = {path: x for path, x in params.items() if not path.startswith(_STACK)}
        p = self._gathered(rest, "")
        x_BLD = self._embed(p["embedding"], tokens_BL)
        if self._config.position == "learned":
            x_BLD = x_BLD + p["positions"][: x_BLD.shape[1]]
        x_BLD, _ = lax.scan(lambda x, w: (self._layer(x, w), None), x_BLD, stack)
        x_BLD = _norm(x_BLD, p, "norm", self._config.norm_eps)
        head_DV = p["embedding"].T if self._config.tied else p["head"]
        loss = jnp.mean(self._losses(_matmul(x_BLD, head_DV), targets_BL))
        return lax.pmean(loss, self._rows) if self._rows else loss
