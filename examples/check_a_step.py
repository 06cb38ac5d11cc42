"""What a step of one's own moves, and what is amiss with it.

    python examples/check_a_step.py
    python -m experiments.check examples/check_a_step.py:make_step

The step is plain JAX: its parameters are not donated, and one of them is whole on every
device.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshpar


def update(params, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def make_step(devices=None, mended=False):
    """The step and its arguments; mended, both findings are gone."""
    devices = devices or jax.devices()
    shape, axis_types = (len(devices),), (AxisType.Auto,)
    mesh = jax.make_mesh(shape, ("rows",), axis_types=axis_types, devices=devices)
    rows, whole = (
        NamedSharding(mesh, PartitionSpec(*dims)) for dims in (("rows",), ())
    )
    up, down = jnp.ones((512, 2048)), jnp.ones((2048, 512))
    params = {
        "in": jax.device_put(up, whole if mended else rows),
        "out": jax.device_put(down, whole),
    }
    x = jax.device_put(jnp.ones((1024, 512)), rows)
    step = jax.jit(
        update,
        donate_argnums=0 if mended else (),
        out_shardings=jax.tree.map(lambda w: w.sharding, params),
    )
    return step, params, x


if __name__ == "__main__":
    meshpar.simulate(8)
    print(meshpar.check(*make_step()))
