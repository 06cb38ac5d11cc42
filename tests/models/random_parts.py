"""Parts of random models: the layers of flax.nnx and flax.linen, and functions of jax.

A part takes features and gives features of the same shape, [B, L, D] of sequences or
[B, H, W, D] of images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from models.random_functions import FUNCTIONS, HEADS, IMAGE_FUNCTIONS

WIDTH = 8


NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
"""{matmul of a dense part: names of its dims}."""


class Dense(nnx.Module):
    def __init__(self, rngs):
        def linear(name, inputs, outputs):
            named = {"out_sharding": NAMES[name]}
            return nnx.Linear(inputs, outputs, kernel_metadata=named, rngs=rngs)

        self.up, self.down = (
            linear("up", WIDTH, 2 * WIDTH),
            linear("down", 2 * WIDTH, WIDTH),
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Counter(nnx.Module):
    """Counts its calls and keeps a running mean; returns what it gets, scaled."""

    def __init__(self, rngs):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.training = True

    def __call__(self, x):
        if self.training:
            self.count.set_value(self.count.get_value() + 1)
            now = x.mean(axis=tuple(range(x.ndim - 1)))
            self.mean.set_value(0.9 * self.mean.get_value() + 0.1 * now)
        return x * self.scale[...]

    def set_mode(self, **modes):
        self.training = modes.get("training", self.training)
        return super().set_mode(**modes)


class Sown(nnx.Module):
    """Sows an auxiliary loss, a mean over rows."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        gates = jax.nn.sigmoid(self.gate(x))
        self.sow(nnx.Intermediate, "aux", jnp.square(gates).mean())
        return gates * x


class Silent(nnx.Module):
    """Dropout whose noise no number shows, so that any noise is right."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        return x + 0.0 * self.dropout(x)


class Twice(nnx.Module):
    """The same module called twice."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.dense(jnp.tanh(self.dense(x)))


class Shared(nnx.Module):
    """Two modules that share one, and a kernel that is also used transposed."""

    def __init__(self, rngs):
        self.first = Twice(rngs)
        self.second = Twice(rngs)
        self.second.dense = self.first.dense

    def __call__(self, x):
        return self.first(x) + self.second(x) @ self.first.dense.kernel.T


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.branches = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in "ab"])
        self.named = nnx.Dict(a=nnx.Linear(WIDTH, WIDTH, rngs=rngs), b=Dense(rngs))
        self.plain = nnx.data([nnx.LayerNorm(WIDTH, rngs=rngs)])

    def __call__(self, x):
        x = self.plain[0](x)
        x = sum(branch(x) for branch in self.branches)
        return self.named["a"](x) + self.named["b"](x)


@nnx.split_rngs(splits=3)
@nnx.vmap
def three_layers(rngs):
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Ensemble(nnx.Module):
    """Modules that nnx.vmap has stacked, and runs side by side."""

    def __init__(self, rngs):
        self.members = three_layers(rngs)

    def __call__(self, x):
        run = nnx.vmap(lambda member, x: jnp.tanh(member(x)), in_axes=(0, None))
        return run(self.members, x).mean(axis=0)


class Stacked(nnx.Module):
    """Modules that nnx.vmap has stacked, and nnx.scan runs."""

    def __init__(self, rngs):
        self.members = three_layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(member, x):
            return x + 0.5 * jnp.tanh(member(x))

        return run(self.members, x)


class Remat(nnx.Module):
    def __init__(self, rngs):
        self.inner = Dense(rngs)

    def __call__(self, x):
        return nnx.remat(lambda inner, x: inner(x))(self.inner, x)


class Cached(nnx.Module):
    """The last feature mean it saw, mixed into the next step's: state of the rows."""

    def __init__(self, rngs):
        self.last = nnx.Cache(jnp.zeros(WIDTH))
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        last_D = self.last.get_value()
        self.last.set_value(x.mean(axis=tuple(range(x.ndim - 1))))
        return self.dense(x + 0.1 * last_D)


class Applied(nnx.Module):
    """A module, and how it is applied."""

    def __init__(self, module, run=None):
        self.module, self.run = module, run

    def __call__(self, x):
        return self.module(x) if self.run is None else self.run(self.module, x)


def _recurrent(cell):
    return lambda rngs: nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)


def _both_ways(rngs):
    forth, back = (
        nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs) for _ in "ab"
    )

    def add(forward, backward):
        return forward + backward

    return nnx.Bidirectional(forth, back, merge_fn=add, rngs=rngs)


def _conv(size, **options):
    return lambda rngs: nnx.Conv(WIDTH, WIDTH, size, rngs=rngs, **options)


_NNX = {
    "dense": Dense,
    "counter": Counter,
    "sown": Sown,
    "dropout": Silent,
    "twice": Twice,
    "shared": Shared,
    "listed": Listed,
    "ensemble": Ensemble,
    "stacked": Stacked,
    "remat": Remat,
    "cached": Cached,
    "general": lambda rngs: Applied(
        nnx.LinearGeneral(WIDTH, (HEADS, 4), rngs=rngs),
        lambda module, x: module(x).reshape(x.shape),
    ),
    "einsum": lambda rngs: nnx.Einsum("...d,de->...e", (WIDTH, WIDTH), rngs=rngs),
    "lora": lambda rngs: nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs),
    "prelu": lambda rngs: nnx.PReLU(),
    "layer_norm": lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
    "rms_norm": lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs),
    "group_norm": lambda rngs: nnx.GroupNorm(WIDTH, 2, rngs=rngs),
    "instance_norm": lambda rngs: nnx.InstanceNorm(WIDTH, rngs=rngs),
    "batch_norm": lambda rngs: nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs),
    "weight_norm": lambda rngs: nnx.WeightNorm(
        nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
    ),
    "spectral_norm": lambda rngs: nnx.SpectralNorm(
        nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
    ),
    "sequential": lambda rngs: nnx.Sequential(
        *(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu, Dense(rngs))
    ),
}

_NNX_SEQUENCES = {
    "conv": _conv((3,)),
    "depthwise": _conv((3,), feature_group_count=WIDTH),
    "causal_conv": _conv((3,), padding="CAUSAL", kernel_dilation=2),
    "conv_transpose": lambda rngs: nnx.ConvTranspose(WIDTH, WIDTH, (3,), rngs=rngs),
    "attention": lambda rngs: nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, rngs=rngs
    ),
    "causal_attention": lambda rngs: Applied(
        nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, normalize_qk=True, rngs=rngs
        ),
        lambda module, x: module(x, mask=nnx.make_causal_mask(x[..., 0])),
    ),
    "rnn": _recurrent(nnx.SimpleCell),
    "gru": _recurrent(nnx.GRUCell),
    "lstm": _recurrent(nnx.LSTMCell),
    "optimized_lstm": _recurrent(nnx.OptimizedLSTMCell),
    "bidirectional": _both_ways,
}

_NNX_IMAGES = {
    "conv": _conv((3, 3)),
    "depthwise": _conv((3, 3), feature_group_count=WIDTH),
    "conv_transpose": lambda rngs: nnx.ConvTranspose(WIDTH, WIDTH, (2, 2), rngs=rngs),
}


class LinenDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(name, features):
            init = nn.initializers.lecun_normal()
            named = nn.with_logical_partitioning(init, NAMES[name])
            return nn.Dense(features, kernel_init=named, name=name)

        return dense("down", WIDTH)(nn.gelu(dense("up", 2 * WIDTH)(x)))


class LinenShared(nn.Module):
    """Submodules of setup in a list and a dict, one of them called twice."""

    def setup(self):
        self.listed = [nn.Dense(WIDTH) for _ in "ab"]
        self.named = {"a": nn.Dense(WIDTH), "b": LinenDense()}

    def __call__(self, x):
        first, second = self.listed
        x = second(jnp.tanh(first(jnp.tanh(first(x)))))
        return self.named["a"](x) + self.named["b"](x)


class LinenCounter(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "count", lambda: jnp.zeros((), jnp.int32))
        mean = self.variable("means", "mean", jnp.zeros, (WIDTH,))
        if self.train and not self.is_initializing():
            count.value += 1
            now = x.mean(axis=tuple(range(x.ndim - 1)))
            mean.value = 0.9 * mean.value + 0.1 * now
        return x * self.param("scale", nn.initializers.ones, (WIDTH,))


class LinenSown(nn.Module):
    @nn.compact
    def __call__(self, x):
        gates = nn.sigmoid(nn.Dense(WIDTH)(x))
        self.sow("intermediates", "aux", jnp.square(gates).mean())
        return gates * x


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + 0.5 * nn.tanh(nn.Dense(WIDTH)(x)), None


def _linen_ensemble(x, train):
    members = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=3,
    )
    return members(WIDTH)(x).mean(axis=0)


def _linen_scan(x, train):
    steps = nn.scan(
        LinenStep,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )
    return steps()(x, None)[0]


def _linen_dropout(x, train):
    x = nn.Dense(WIDTH)(x)
    return x + 0.0 * nn.Dropout(0.5, deterministic=not train)(x)


def _linen_both_ways(x, train):
    forth, back = (nn.RNN(nn.GRUCell(WIDTH)) for _ in "ab")
    return nn.Bidirectional(forth, back, merge_fn=lambda a, b: a + b)(x)


def _linen_recurrent(cell):
    return lambda x, train: nn.RNN(cell(WIDTH))(x)


_LINEN = {
    "dense": lambda x, train: LinenDense()(x),
    "counter": lambda x, train: LinenCounter(train)(x),
    "sown": lambda x, train: LinenSown()(x),
    "dropout": _linen_dropout,
    "shared": lambda x, train: LinenShared()(x),
    "ensemble": _linen_ensemble,
    "stacked": _linen_scan,
    "remat": lambda x, train: nn.remat(LinenDense)()(x),
    "jit": lambda x, train: nn.jit(LinenDense)()(x),
    "general": lambda x, train: nn.DenseGeneral((HEADS, 4))(x).reshape(x.shape),
    "einsum": lambda x, train: nn.Einsum((WIDTH, WIDTH), "...d,de->...e")(x),
    "prelu": lambda x, train: nn.PReLU()(x),
    "layer_norm": lambda x, train: nn.LayerNorm()(x),
    "rms_norm": lambda x, train: nn.RMSNorm()(x),
    "group_norm": lambda x, train: nn.GroupNorm(2)(x),
    "instance_norm": lambda x, train: nn.InstanceNorm()(x),
    "batch_norm": lambda x, train: nn.BatchNorm(not train, momentum=0.9)(x),
    "weight_norm": lambda x, train: nn.WeightNorm(nn.Dense(WIDTH))(x),
    "spectral_norm": lambda x, train: nn.SpectralNorm(nn.Dense(WIDTH))(
        x, update_stats=train
    ),
    "sequential": lambda x, train: nn.Sequential(
        [nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH)]
    )(x),
}

_LINEN_SEQUENCES = {
    "conv": lambda x, train: nn.Conv(WIDTH, (3,))(x),
    "depthwise": lambda x, train: nn.Conv(WIDTH, (3,), feature_group_count=WIDTH)(x),
    "local_conv": lambda x, train: nn.ConvLocal(WIDTH, (3,))(x),
    "conv_transpose": lambda x, train: nn.ConvTranspose(WIDTH, (3,))(x),
    "attention": lambda x, train: nn.MultiHeadDotProductAttention(HEADS)(x),
    "causal_attention": lambda x, train: nn.MultiHeadAttention(
        HEADS, normalize_qk=True
    )(x, mask=nn.make_causal_mask(x[..., 0])),
    "rnn": _linen_recurrent(nn.SimpleCell),
    "gru": _linen_recurrent(nn.GRUCell),
    "mgu": _linen_recurrent(nn.MGUCell),
    "lstm": _linen_recurrent(nn.LSTMCell),
    "optimized_lstm": _linen_recurrent(nn.OptimizedLSTMCell),
    "bidirectional": _linen_both_ways,
}

_LINEN_IMAGES = {
    "conv": lambda x, train: nn.Conv(WIDTH, (3, 3))(x),
    "depthwise": lambda x, train: nn.Conv(WIDTH, (3, 3), feature_group_count=WIDTH)(x),
    "conv_transpose": lambda x, train: nn.ConvTranspose(WIDTH, (2, 2))(x),
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one framework for one kind of features.

    Attributes:
      modules: {name: makes a module (nnx: from rngs; linen: called in a module)}.
      functions: {name: function of features}.
    """

    modules: dict[str, Callable[..., Any]]
    functions: dict[str, Callable[[jax.Array], jax.Array]]


PARTS = {
    ("nnx", False): Parts(_NNX | _NNX_SEQUENCES, FUNCTIONS),
    ("nnx", True): Parts(_NNX | _NNX_IMAGES, IMAGE_FUNCTIONS),
    ("linen", False): Parts(_LINEN | _LINEN_SEQUENCES, FUNCTIONS),
    ("linen", True): Parts(_LINEN | _LINEN_IMAGES, IMAGE_FUNCTIONS),
}
"""{(framework, whether features are images): parts}."""
