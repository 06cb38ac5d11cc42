"""Models with loops of their own train under every layout: a plain loop judges."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from support import equality
from support.marks import slow

import meshpar

WIDTH, DEPTH = 8, 4
X = np.random.default_rng(0).normal(size=(16, 5, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


def state_space(x_BLD):
    def step(h_BD, u_BD):
        h_BD = 0.9 * h_BD + u_BD
        return h_BD, jnp.tanh(h_BD)

    inputs = jnp.swapaxes(nn.Dense(WIDTH)(x_BLD), 0, 1)
    outputs = jax.lax.scan(step, jnp.zeros(inputs.shape[1:]), inputs)[1]
    return jnp.swapaxes(outputs, 0, 1)


def counted(x_BLD):
    def body(carry):
        number, h = carry
        return number + 1, h + jax.lax.stop_gradient(y)

    y = nn.Dense(WIDTH)(x_BLD)
    start = 0, jnp.zeros(y.shape)
    return y + 0.1 * jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)[1]


def repeated(x_BLD):
    y = nn.Dense(WIDTH)(x_BLD)
    return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h + y), jnp.zeros(y.shape))


def both_ways(x_BLD):
    forth, back = (nn.RNN(nn.OptimizedLSTMCell(WIDTH)) for _ in range(2))
    return nn.Dense(WIDTH)(nn.Bidirectional(forth, back)(x_BLD))


INNER = {
    "gru": lambda x: nn.RNN(nn.GRUCell(WIDTH))(x),
    "lstm both ways": both_ways,
    "state space": state_space,
    "while": counted,
    "fori": repeated,
    "slash in a name": lambda x: nn.WeightNorm(nn.Dense(WIDTH))(x),
}


class Block(nn.Module):
    inner: str

    @nn.compact
    def __call__(self, x):
        return x + INNER[self.inner](x)


class LinenNet(nn.Module):
    inner: str

    @nn.compact
    def __call__(self, x):
        for number in range(DEPTH):
            x = Block(self.inner, name=f"block_{number}")(x)
        return x


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x):
        return x + self.rnn(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Recurrent(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def model_of(inner, with_layers):
    if inner == "nnx gru":
        return meshpar.from_nnx(NnxNet, loss, layers="layers" if with_layers else "")
    layers = "block_*" if with_layers else ""
    return meshpar.from_linen(LinenNet(inner), loss, X[:1], layers=layers)


LAYOUTS = {
    "parts": ("data=4", False),
    "layers": ("fsdp=4,remat=full", True),
    "pipe": ("pipe=2,data=2,microbatches=4", True),
}
DEFAULT = {("while", "parts")}
ROWS = [
    (inner, layout) if (inner, layout) in DEFAULT else slow(inner, layout)
    for inner in (*INNER, "nnx gru")
    for layout in LAYOUTS
]


@pytest.mark.parametrize("inner, layout", ROWS)
def test_loops_of_a_model_train(inner, layout):
    text, with_layers = LAYOUTS[layout]
    program = meshpar.lower(
        model_of(inner, with_layers),
        optax.sgd(0.01, momentum=0.9),
        text,
        BATCH,
        devices=jax.devices()[:4],
        lowering="shard_map",
    )
    report = equality.compare(program, None, [BATCH, BATCH])
    assert report.ok, report


def test_loops_outside_of_models_are_jax_s_own():
    """Jax still refuses a loop that changes what its state varies over."""

    def body(x):
        return jax.lax.scan(lambda c, u: (c + u, None), jnp.zeros(()), x)[0][None]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    spec = PartitionSpec("x")
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(TypeError, match="carry"):
        jax.eval_shape(fn, jnp.ones(8))
