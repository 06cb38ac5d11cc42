"""Restricted Boltzmann machines by CD-1 and sparse coding, as models for meshpar.

Both are trained by ordinary gradients of a loss, so that layouts split them as any
model: `data` the pictures, `tensor` the hidden units or bases.

Source: Raina, Madhavan and Ng, Large-scale Deep Unsupervised Learning using Graphics
  Processors, ICML 2009, sections 4 and 5; Hinton, Training Products of Experts, 2002
  (contrastive divergence); Beck and Teboulle, FISTA, 2009.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import meshpar
from meshpar.arrays import Array

_STEPS = 30
"""Iterations that find the codes of a batch."""


class Boltzmann(nnx.Module):
    """A restricted Boltzmann machine: visible units V, hidden units H, both binary."""

    def __init__(self, visible: int, hidden: int, rngs: nnx.Rngs):
        weight = 0.01 * rngs.params.normal((visible, hidden))
        self.weight = nnx.Param(weight, out_sharding=("embed", "mlp"))
        self.visible = nnx.Param(jnp.zeros(visible), out_sharding=(None,))
        self.hidden = nnx.Param(jnp.zeros(hidden), out_sharding=("mlp",))

    def up(self, v_BV: Array) -> Array:
        """Chances of the hidden units [B, H]."""
        return jax.nn.sigmoid(v_BV @ self.weight[...] + self.hidden[...][None])

    def down(self, h_BH: Array) -> Array:
        """Chances of the visible units [B, V]."""
        return jax.nn.sigmoid(h_BH @ self.weight[...].T + self.visible[...][None])

    def free_energy(self, v_BV: Array) -> Array:
        """-log of the unnormalized chance of visible units, summed over hidden [B]."""
        scores_BH = v_BV @ self.weight[...] + self.hidden[...][None]
        return -v_BV @ self.visible[...] - jax.nn.softplus(scores_BH).sum(1)


def divergence(
    model: Boltzmann, batch: dict[str, Array], key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """A loss whose gradient is that of CD-1.

    The gradient of the mean free energy of the data, less that of the reconstruction:
    for the weight -(v0' p(h|v0) - v1' p(h|v1)) / B. The noise of the hidden units is a
    function of the key and their place alone, so that it is the same on every mesh.

    Args:
      model: the machine.
      batch: {"x": pictures [B, V] in 0..1}.
      key: of the noise; None for no noise (evaluation).

    Returns:
      The loss, and the squared error of the reconstruction.
    """
    v0_BV = batch["x"]
    h0_BH = model.up(v0_BV)
    if key is not None:
        noise_BH = jax.random.uniform(key, h0_BH.shape)
        h0_BH = (noise_BH < h0_BH).astype(h0_BH.dtype)
    v1_BV = lax.stop_gradient(model.down(h0_BH))
    loss = (model.free_energy(v0_BV) - model.free_energy(v1_BV)).mean()
    return loss, {"error": jnp.square(v0_BV - v1_BV).sum(1).mean()}


class SparseCoder(nnx.Module):
    """Sparse coding: pictures as sums of few of K unit-length bases."""

    def __init__(self, visible: int, bases: int, penalty: float, rngs: nnx.Rngs):
        self.penalty = penalty
        weight = rngs.params.normal((visible, bases)) * visible**-0.5
        self.weight = nnx.Param(weight, out_sharding=("embed", "mlp"))

    def bases(self) -> Array:
        """Bases of unit length [V, K]."""
        weight_VK = self.weight[...]
        return weight_VK / jnp.sqrt(jnp.square(weight_VK).sum(0, keepdims=True) + 1e-12)

    def codes(self, x_BV: Array) -> Array:
        """Codes [B, K] that are close to the minimum of the objective (FISTA)."""
        bases_VK = lax.stop_gradient(self.bases())
        gram_KK = bases_VK.T @ bases_VK
        start_BK = x_BV @ bases_VK
        # The largest eigenvalue is at most the largest sum of a row of magnitudes.
        rate = 1 / jnp.abs(gram_KK).sum(1).max()

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            a_BK, point_BK, momentum = carry
            moved_BK = point_BK - rate * (point_BK @ gram_KK - start_BK)
            size_BK = jnp.maximum(jnp.abs(moved_BK) - rate * self.penalty, 0)
            next_BK = jnp.sign(moved_BK) * size_BK
            after = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
            point_BK = next_BK + (momentum - 1) / after * (next_BK - a_BK)
            return (next_BK, point_BK, after), None

        zeros_BK = jnp.zeros_like(start_BK)
        carry = zeros_BK, zeros_BK, jnp.ones((), start_BK.dtype)
        return lax.stop_gradient(lax.scan(step, carry, None, length=_STEPS)[0][0])


def reconstruction(
    model: SparseCoder, batch: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Half the squared error of the coded batch, and its whole objective."""
    x_BV = batch["x"]
    codes_BK = model.codes(x_BV)
    errors_BV = x_BV - codes_BK @ model.bases().T
    loss = jnp.square(errors_BV).sum(1).mean() / 2
    penalty = model.penalty * jnp.abs(codes_BK).sum(1).mean()
    return loss, {"objective": loss + penalty}


def boltzmann(visible: int, hidden: int) -> meshpar.Model:
    """The machine for `meshpar.lower`."""
    return meshpar.from_nnx(lambda rngs: Boltzmann(visible, hidden, rngs), divergence)


def sparse_coder(visible: int, bases: int, penalty: float) -> meshpar.Model:
    """Sparse coding for `meshpar.lower`."""
    return meshpar.from_nnx(
        lambda rngs: SparseCoder(visible, bases, penalty, rngs), reconstruction
    )


def lower(
    model: meshpar.Model, layout: str, rows: int, visible: int, rate: float
) -> meshpar.TrainProgram:
    """A model under a layout with momentum, on as many devices as the layout fills."""
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    dtype = jax.dtypes.canonicalize_dtype(float)  # 64 bits where jax has them.
    batch = {"x": jax.ShapeDtypeStruct((rows, visible), dtype)}
    optimizer = optax.sgd(rate, momentum=0.5)
    return meshpar.lower(model, optimizer, layout, batch, devices=devices)


def train(
    program: meshpar.TrainProgram, x: np.ndarray, steps: int, rows: int, seed: int
) -> dict[str, np.ndarray]:
    """Trains on random rows of x; returns the parameters on the host."""
    draws = np.random.default_rng([seed, 2])
    state = program.init(seed)
    for _ in range(steps):
        chosen = draws.integers(0, len(x), rows)
        state, _ = program.step(state, {"x": x[chosen]})
    return {path: np.asarray(value) for path, value in state.params.items()}


def features(
    program: meshpar.TrainProgram, params: dict[str, np.ndarray], x: np.ndarray
) -> np.ndarray:
    """Chances of the hidden units of a machine [rows, H], or codes [rows, K]."""
    module = program.model.bind(params)
    if isinstance(module, Boltzmann):
        return np.asarray(jax.jit(module.up)(x))
    return np.asarray(jax.jit(module.codes)(x))
