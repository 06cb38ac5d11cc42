"""Embedding and loss over a split vocabulary equal those over a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.marks import slow

from meshpar import layouts
from meshpar.layouts.axes import PIPE
from meshpar.mesh.mesh import make_mesh
from meshpar.ops import vocabulary

VOCAB, EMBED, STAGES = 8, 4, 4


def by_logits(w_VD, ids_BL, targets_BL):
    x_BLD = vocabulary.lookup(w_VD, ids_BL)
    logits_BLV = jnp.einsum("bld,vd->blv", x_BLD, w_VD)
    return vocabulary.token_losses(logits_BLV, targets_BL).mean()


def masked(w_VD, ids_BL, targets_BL):
    """The tokens of large rows are impossible: on the last stage, all of them."""
    x_BLD, first_VD = vocabulary.lookup(w_VD, ids_BL), w_VD[:, :1]
    logits_BLV = jnp.einsum("bld,vd->blv", x_BLD, w_VD) - 1000
    logits_BLV = jnp.where(first_VD[None, :, 0] > 50, -jnp.inf, logits_BLV)
    return vocabulary.token_losses(logits_BLV, targets_BL % 4).mean()


def by_blocks(w_VD, ids_BL, targets_BL, block=4):
    x_BLD = jnp.tanh(vocabulary.lookup(w_VD, ids_BL))
    return vocabulary.head_losses(x_BLD, 60 * w_VD.T, targets_BL, block).mean()


def at_once(*args):
    return by_blocks(*args, block=0)


def arguments():
    w_VD = jax.random.normal(jax.random.key(0), (VOCAB, EMBED))
    ids_BL = jax.random.randint(jax.random.key(1), (2, 16), 0, VOCAB)
    return w_VD, ids_BL, jnp.roll(ids_BL, -1, axis=1)


def test_outside_a_layout_they_are_the_plain_functions():
    w_VD, ids_BL, targets_BL = arguments()
    np.testing.assert_array_equal(vocabulary.lookup(w_VD, ids_BL), w_VD[ids_BL])
    logits_BLV = 100 * w_VD[ids_BL] @ w_VD.T
    log_probabilities_BLV = jax.nn.log_softmax(logits_BLV)
    expected_BL = -jnp.take_along_axis(log_probabilities_BLV, targets_BL[..., None], 2)
    losses_BL = vocabulary.token_losses(logits_BLV, targets_BL)
    np.testing.assert_allclose(losses_BL, expected_BL[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "loss, plain",
    [slow(by_logits, by_logits), (masked, masked), slow(by_blocks, at_once)],
)
def test_a_split_vocabulary_gives_the_same_loss_and_gradient(loss, plain):
    layout = layouts.parse(f"pipe={STAGES},vocab=pipe")
    mesh = make_mesh(layout, jax.devices()[:STAGES])
    scopes = []

    def on_stages(w_VD, ids_BL, targets_BL):
        with layouts.use(layout, mesh, (PIPE,)) as scope:
            scopes.append(scope)
            return loss(w_VD, ids_BL, targets_BL)

    split = jax.shard_map(
        on_stages,
        mesh=mesh,
        in_specs=(P(PIPE), P(), P()),
        out_specs=P(),
        axis_names={PIPE},
    )
    w_VD, *tokens = arguments()
    if loss is masked:
        w_VD = w_VD.at[-VOCAB // STAGES :, 0].set(100.0)
    value, w_gradient_VD = jax.jit(jax.value_and_grad(split))(w_VD, *tokens)
    expected, expected_VD = jax.value_and_grad(plain)(w_VD, *tokens)
    assert np.isfinite(expected)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(w_gradient_VD, expected_VD, rtol=1e-4, atol=1e-6)
    size = VOCAB // STAGES
    assert scopes[0].vocabulary_used == {"lookup": size, "token_losses": size}
