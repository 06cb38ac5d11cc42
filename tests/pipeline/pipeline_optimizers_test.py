"""Optimizers of pipelines that reorder or pad layers, or run stage by stage."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from support.biased_model import lower, train, train_plainly
from support.marks import slow
from support.tiny_models import host, relative_error

from meshpar.errors import LayoutError
from meshpar.lowering.optimizer import make_optimizer
from meshpar.pipeline.moved_update import moved_update
from meshpar.pipeline.partition import make_partition

PADDED = "pipe=2,microbatches=2"  # Three layers on two stages.
PIPEDREAM = "pipe=3,microbatches=2,schedule=pipedream"
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
RMS = optax.chain(optax.clip_by_block_rms(1e-3), SGD)
NOISE = optax.chain(optax.add_noise(0.01, 0.5, key=0), SGD)


def test_norms_over_padded_layers_are_right():
    lamb = optax.lamb(1e-2)
    program = lower(PADDED, lamb)
    start = program.in_model_order(program.init(0)).params
    params = program.in_model_order(train(program, 2)).params
    want = train_plainly(lamb, start, 2)[-1]
    assert relative_error(host(params), want) < 1e-6


@pytest.mark.parametrize("name, optimizer", {"means": RMS, "noise": NOISE}.items())
def test_optimizers_that_see_padding_are_refused(name, optimizer):
    words = "layers/bias other updates if its layers are stored.*schedule=1f1b"
    with pytest.raises(LayoutError, match=words):
        lower(PADDED, optimizer)
    lower("pipe=3,microbatches=2", optimizer)  # In the order of the model.


def probed(optimizer, depth, stages, chunks, width):
    """The probe of a stack of matrices and vectors."""
    partition = make_partition(depth, stages, chunks)
    rows = len(partition.order)
    shapes = {"layers/w": (rows, width, 2 * width), "layers/v": (rows, width)}
    shapes["head"] = (width, 3)
    params = {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in shapes.items()}
    keys = {path: tuple(path.split("/")) for path in params}
    optimizer, stack = make_optimizer(optimizer, params, keys), list(params)[:2]
    return moved_update(optimizer, params, stack, partition)


@pytest.mark.parametrize(
    "optimizer, reordered, padded",
    [
        (ADAM, "", ""),
        slow(optax.lamb(0.1), "", ""),
        (optax.clip_by_global_norm(1.0), "", ""),
        (RMS, "", "layers/w"),
        (optax.chain(ADAM, optax.clip_by_block_rms(1e-3)), "", "layers/w"),
        slow(optax.MultiSteps(RMS, 40), "", "layers/w"),
        slow(NOISE, "layers/w", "layers/w"),
        # Its scale is that of the shape, if layers are fewer than their width.
        slow(contrib.muon(0.1), "", "layers/v"),
    ],
)
def test_the_probe_tells_reordering_from_padding(optimizer, reordered, padded):
    assert probed(optimizer, 32, stages=4, chunks=2, width=4096) == reordered
    assert probed(optimizer, 31, stages=4, chunks=1, width=4096) == padded


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (optax.lamb(0.1), "update of layers/bias depends on all layers"),
        (
            optax.chain(optax.clip_by_global_norm(1.0), ADAM),
            "update of ends/0/bias depends on other tensors",
        ),
        (NOISE, "random numbers, which would be the same on all stages"),
        (optax.chain(ADAM, contrib.reduce_on_plateau()), "uses the loss"),
        (optax.sm3(0.1), "mu.*belongs to several stages"),
    ],
)
def test_stages_run_elementwise_optimizers_alone(optimizer, words):
    with pytest.raises(LayoutError, match=f"schedule=pipedream.*{words}.*elementwise"):
        lower(PIPEDREAM, optimizer)


def test_stages_may_mask_by_path():
    lower(PIPEDREAM, optax.adamw(0.1, mask={"layers": True, "ends": False}))
