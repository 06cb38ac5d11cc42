"""Functions of jax that are parts of random models.

Each takes features and gives features of the same shape, [B, L, D] of sequences or
[B, H, W, D] of images.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

HEADS = 2


def decayed(x_BLD):
    """A linear state space, one step at a time."""

    def step(h_BD, u_BD):
        h_BD = 0.8 * h_BD + u_BD
        return h_BD, jnp.tanh(h_BD)

    u_LBD = jnp.swapaxes(x_BLD, 0, 1)
    h_LBD = lax.scan(step, jnp.zeros(u_LBD.shape[1:]), u_LBD)[1]
    return jnp.swapaxes(h_LBD, 0, 1)


def decayed_at_once(x_BLD):
    """The same state space by an associative scan."""

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    factors = jnp.full(x_BLD.shape, 0.8)
    return jnp.tanh(lax.associative_scan(combine, (factors, x_BLD), axis=1)[1])


def decayed_by_row(x_BLD):
    """A state space of one row under vmap."""

    def one(x_LD):
        def step(h_D, u_D):
            h_D = 0.8 * h_D + u_D
            return h_D, h_D

        return lax.scan(step, jnp.zeros(x_LD.shape[1:]), x_LD)[1]

    return jnp.tanh(jax.vmap(one)(x_BLD))


def repeated(x):
    """A fixed number of rounds of fori_loop."""
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(0.5 * h + x), jnp.zeros(x.shape))


def counted(x):
    """A while_loop by a counter; it has no gradient of its own."""

    def body(carry):
        number, h = carry
        return number + 1, 0.5 * h + lax.stop_gradient(x)

    start = 0, jnp.zeros(x.shape)
    return x + 0.1 * lax.while_loop(lambda carry: carry[0] < 3, body, start)[1]


def until_settled(x_BLD):
    """A while_loop under vmap that runs as long as a row asks for."""

    def one(x_LD):
        def unsettled(carry):
            number, h_LD = carry
            return (number < 4) & (jnp.abs(h_LD).max() > 0.5)

        def body(carry):
            return carry[0] + 1, 0.5 * carry[1]

        return lax.while_loop(unsettled, body, (0, x_LD))[1]

    return x_BLD + lax.stop_gradient(jax.vmap(one)(x_BLD))


def row_by_row(x):
    """`lax.map` over rows."""
    return lax.map(lambda row: jnp.tanh(row - row.mean()), x)


def scanned_rows(x):
    """A scan over rows that carries nothing."""
    return lax.scan(lambda none, row: (none, jnp.tanh(2 * row)), None, x)[1]


def position_by_position(x_BLD):
    """`lax.map` along the length."""
    y_LBD = lax.map(lambda x_BD: jnp.tanh(2 * x_BD), jnp.swapaxes(x_BLD, 0, 1))
    return jnp.swapaxes(y_LBD, 0, 1)


def spectrum(x_BLD):
    """FNet's mixing."""
    return jnp.fft.fft2(x_BLD, axes=(1, 2)).real / 8


def filtered(x_BLD):
    """A long convolution by rfft."""
    length = x_BLD.shape[1]
    kernel_L = jnp.exp(-jnp.arange(length, dtype=jnp.float32))
    modes = jnp.fft.rfft(x_BLD, 2 * length, axis=1)
    modes *= jnp.fft.rfft(kernel_L, 2 * length)[None, :, None]
    return jnp.fft.irfft(modes, 2 * length, axis=1)[:, :length]


def sorted_features(x):
    return jnp.sort(x, axis=-1)


def top_features(x):
    """The two largest features of each position stay."""
    values, places = lax.top_k(x, 2)
    hot = jax.nn.one_hot(places, x.shape[-1])
    return (hot * values[..., None]).sum(axis=-2)


def picked(x_BLD):
    """Each row reads its positions in an order of its own."""
    order_BL = jnp.argsort(x_BLD[..., 0], axis=1)
    return jnp.take_along_axis(x_BLD, order_BL[..., None], axis=1)


def chosen(x):
    """`lax.cond` by a number that no row has."""
    return lax.cond(x.shape[-1] > 4, jnp.tanh, jnp.negative, x)


def switched(x_BLD):
    """`lax.switch` under vmap, by each row."""

    def one(x_LD):
        cases = (jnp.tanh, jnp.sin, lambda x_LD: 0.5 * x_LD)
        return lax.switch(jnp.clip(x_LD.sum().astype(int), 0, 2), cases, x_LD)

    return jax.vmap(one)(x_BLD)


def whitened(x_BLD):
    """A triangular solve in each row."""
    gram = jnp.einsum("bld,ble->bde", x_BLD, x_BLD) + 4 * jnp.eye(x_BLD.shape[-1])[None]
    lower = jnp.linalg.cholesky(gram)
    solved = jax.scipy.linalg.solve_triangular(
        lower, jnp.swapaxes(x_BLD, 1, 2), lower=True
    )
    return jnp.swapaxes(solved, 1, 2)


def rolled(x_BLD):
    return jnp.tanh(jnp.roll(x_BLD, 1, axis=1) + jnp.flip(x_BLD, axis=1))


def added_up(x_BLD):
    return jnp.cumsum(x_BLD, axis=1) / 4 + lax.cummax(x_BLD, axis=1)


def masked_attention(x_BLD):
    """Causal attention without weights, with a mask made inside."""
    x_BLHD = x_BLD.reshape(*x_BLD.shape[:2], HEADS, -1)
    return jax.nn.dot_product_attention(x_BLHD, x_BLHD, x_BLHD, is_causal=True).reshape(
        x_BLD.shape
    )


def written(x_BLD):
    """`.at[].set` and `.at[].add` at places of each row."""
    y_BLD = x_BLD.at[:, 0].set(0.0)
    return y_BLD.at[:, 1:].add(0.5 * x_BLD[:, :-1])


def segments(x_BLD):
    """Sums over segments of each row."""
    ids = jnp.arange(x_BLD.shape[1]) // 2
    sums = jax.vmap(lambda x_LD: jax.ops.segment_sum(x_LD, ids, 3))(x_BLD)
    return jnp.tanh(sums[:, ids])


@jax.custom_vjp
def _straight(x):
    return jnp.round(4 * x) / 4


_straight.defvjp(lambda x: (_straight(x), None), lambda _, grad: (grad,))


def straight_through(x):
    """Rounded, with the gradient of the identity."""
    return _straight(x)


def recomputed(x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)))(x)


def jitted(x):
    return jax.jit(lambda x: jax.nn.silu(x) + jax.nn.glu(jnp.concatenate([x, x], -1)))(
        x
    )


def with_own_gradient(x):
    """The gradient of an energy of each row, as in energy-based models."""
    energy = jax.vmap(jax.grad(lambda row: jnp.sum(jnp.cosh(0.3 * row))))
    return energy(x)


def pooled(x_BLD):
    return nn.avg_pool(x_BLD, (3,), (1,), "SAME") + nn.max_pool(
        x_BLD, (2,), (1,), "SAME"
    )


def image_pooled(x_BHWD):
    small = nn.avg_pool(x_BHWD, (2, 2), (2, 2)) + nn.max_pool(x_BHWD, (2, 2), (2, 2))
    shape = x_BHWD.shape
    return jax.image.resize(small, shape, "bilinear")


def patched(x_BHWD):
    """Patches mixed and put back, by reshapes and transposes."""
    batch, height, width, depth = x_BHWD.shape
    x = x_BHWD.reshape(batch, height // 2, 2, width // 2, 2, depth)
    x = jnp.tanh(x.transpose(0, 1, 3, 2, 4, 5)).reshape(batch, -1, 4 * depth)
    x = x.reshape(batch, height // 2, width // 2, 2, 2, depth)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(x_BHWD.shape)


FUNCTIONS = {
    fn.__name__: fn
    for fn in (
        *(decayed, decayed_at_once, decayed_by_row, repeated, counted, until_settled),
        *(row_by_row, scanned_rows, position_by_position, spectrum, filtered),
        *(sorted_features, top_features, picked, chosen, switched, whitened, rolled),
        *(added_up, masked_attention, written, segments, straight_through, recomputed),
        *(jitted, with_own_gradient, pooled),
    )
}
"""{name: function of features of sequences}."""

IMAGE_FUNCTIONS = {
    fn.__name__: fn
    for fn in (
        *(repeated, counted, row_by_row, scanned_rows, sorted_features, top_features),
        *(chosen, straight_through, recomputed, jitted, with_own_gradient),
        *(image_pooled, patched),
    )
}
"""{name: function of features of images}."""
