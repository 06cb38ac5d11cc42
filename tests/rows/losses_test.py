"""Losses by layouts against plain jax: each is equal to the whole batch, or refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import refused_row_losses as refused
from support import row_losses
from support.marks import first
from support.refused_row_losses import CHOOSING, COUNTING, OF_ALL_ROWS, OWN_DRAWS
from support.row_losses import ACCEPTED, DRAWING, Net

import meshpar
from meshpar.errors import LayoutError
from meshpar.models.row_check import Split, check_losses

BATCH = row_losses.batch()

LAYOUTS = {
    "jit": ("", "data=8"),
    "shard_map": ("layers", "data=8"),
    "microbatches": ("", "data=2,microbatches=4"),
    "layers": ("layers", "data=4,microbatches=2"),
    "pipe": ("layers", "data=2,pipe=4,microbatches=2"),
}
"""{name: (names of the layers, layout)}; only jit sees the whole batch at once."""

_COUNTS = "counts rows|number of rows|numbers for every row|rows|cannot be traced"
REFUSED = {
    **{name: (loss, _COUNTS) for name, loss in COUNTING.items()},
    **{
        name: (loss, "number computed from all|kept") for name, loss in CHOOSING.items()
    },
    **OWN_DRAWS,
    **OF_ALL_ROWS,
}
ALLOWED = {loss.__name__: loss for loss in (*ACCEPTED, *DRAWING)}
COMPILED = [
    ("drawn_times", "microbatches"),
    ("masked_mean", "pipe"),
    ("focal", "shard_map"),
    ("drawn_times", "layers"),
    ("a_key_for_each_row", "pipe"),
    ("first_half", "jit"),
]
"""A few of the pairs of a loss and a layout that the slow tests compile."""


def model(loss, layers=""):
    asks = "key" in inspect.signature(loss).parameters
    options = {"evaluation_loss_fn": row_losses.squared} if asks else {}
    return meshpar.from_nnx(Net, loss, layers=layers, **options)


def plain(loss):
    """(loss, gradients) of the whole batch, and the weights after a step of SGD."""
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    rows = jax.tree.map(jnp.asarray, BATCH)

    def value(params):
        key = {}
        if "key" in inspect.signature(loss).parameters:
            key["key"] = jax.random.fold_in(  # Seed 0, step 0, the key of the loss.
                jax.random.fold_in(jax.random.key(0), 0), 3
            )
        result = loss(nnx.merge(graph, params), rows, **key)
        result = result[0] if type(result) is tuple else result
        if isinstance(result, meshpar.metrics.Mean):
            return result.total / result.weight
        return result

    found, grads = jax.jit(jax.value_and_grad(value))(params)
    update = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
    return found, optax.tree.norm(grads), update.head.kernel[...]


def lower(loss, name):
    layers, layout = LAYOUTS[name]
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    of, sgd = model(loss, layers), optax.sgd(0.1)
    return meshpar.lower(of, sgd, layout, BATCH, devices=devices)


def assert_equal_to_plain(loss, name):
    program = lower(loss, name)
    state, metrics = program.step(program.init(params=Net(nnx.Rngs(0))), BATCH)
    want, norm, head = plain(loss)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    head = np.asarray(head)
    np.testing.assert_allclose(
        state.params["head/kernel"], head, rtol=1e-4, atol=1e-5 * abs(head).max()
    )


@pytest.mark.parametrize("name", ALLOWED)
def test_means_over_rows_are_accepted(name):
    split = Split(4, "microbatches=4")
    check_losses(model(ALLOWED[name]), BATCH, split, evaluates=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_parts_cannot_give_is_refused(name):
    loss, cause = REFUSED[name]
    with pytest.raises(LayoutError, match=f"(?s)({cause}).*microbatches=4 splits"):
        split = Split(4, "microbatches=4")
        check_losses(model(loss), BATCH, split, evaluates=False)


def line_of(fn):
    return inspect.getsourcelines(fn)[1]


@pytest.mark.parametrize(
    "loss, words",
    [
        (refused.first_half, "counts rows of the batch.*put it into the batch"),
        (refused.unbiased, "the number of rows.*put it into the batch"),
        (refused.own_noise, "a key of its own.*draw from the key that the loss"),
        (refused.pairs, "counts rows of the batch.*weight for every row into"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_errors_name_the_line_and_the_remedy(loss, words):
    with pytest.raises(LayoutError) as error:
        lower(loss, "shard_map")
    cause, remedy = words.split(".*")
    first, after = str(error.value).split(", at ")
    path, line = after.split(";")[0].rsplit(":", 1)
    assert cause in first and remedy in after and path.endswith("row_losses.py")
    start = line_of(loss)
    assert start < int(line) < start + 6


@pytest.mark.parametrize("name, layout", first(1, COMPILED))
def test_accepted_losses_equal_plain_jax(name, layout):
    loss = ALLOWED[name] if name in ALLOWED else COUNTING[name]
    assert_equal_to_plain(loss, layout)


UNLAYERED = {"gradient_penalty": "inside a transformation of jax"}
"""Losses that layers by name refuse, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*ALLOWED, *REFUSED])
def test_every_loss_is_equal_or_refused(name, layout):
    if name in UNLAYERED and LAYOUTS[layout][0]:
        with pytest.raises(ValueError, match=UNLAYERED[name]):
            lower(ALLOWED[name], layout)
        return
    if name in ALLOWED or layout == "jit":
        loss = ALLOWED[name] if name in ALLOWED else REFUSED[name][0]
        assert_equal_to_plain(loss, layout)
        return
    with pytest.raises(LayoutError):
        lower(REFUSED[name][0], layout)
