"""Updates of stacked layers equal those of the model's own tree, for each optimizer."""

import functools

import jax
import numpy as np
import optax
import pytest
from support.marks import slow
from support.own_trees import keys_of, nested

from meshpar.commands.optimizers import OPTIMIZERS
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.layer_update import MODEL, ROWS, STACKS
from meshpar.lowering.optimizer import make_optimizer, with_extra_args

SHAPES = {"layers/*/up/kernel": (8, 6), "layers/*/norm/scale": (8,), "head": (8, 4)}
DEPTH, LOSS = 4, np.float32(0.5)
ORDERS = {"as in the model": (0, 1, 2, 3), "padded": (0, 2, None, 3, 1, None)}
LAYER_BY_LAYER = {"first layers frozen", "odd layers by muon", "noisy_sgd"}
AT_ONCE = {
    "adafactor",
    "lamb",
    "lars",
    "muon",
    "sm3",
    "adaptive clipping",
    "centralized gradients",
    "clipping by block",
    "decay of matrices alone",
    "several steps of muon",
}
ELEMENTWISE = {"adam", "adamw", "lion", "sgd", "rmsprop", "several steps", "yogi"}


def own_paths():
    layers = [p for p in SHAPES if "*" in p]
    paths = [p.replace("*", str(i)) for p in layers for i in range(DEPTH)]
    return {**{p: SHAPES["/".join(_starred(p))] for p in paths}, "head": SHAPES["head"]}


def _starred(path):
    return ("*" if part.isdigit() else part for part in path.split("/"))


def random(seed):
    rng = np.random.default_rng(seed)
    return {p: rng.normal(size=s).astype(np.float32) for p, s in own_paths().items()}


def rows_in(order):
    return LayerRows(
        {
            path.replace("/*", ""): tuple(
                None if i is None else path.replace("*", str(i)) for i in order
            )
            for path in SHAPES
            if "*" in path
        }
    )


@functools.cache
def trained_plainly(name):
    """The parameters after three updates of optax on the model's own tree."""
    plain = with_extra_args(OPTIMIZERS[name])
    params = nested(random(0))
    state = plain.init(params)

    @jax.jit
    def update(grads, state, params):
        """One update of optax, with the extra arguments that it takes."""
        extra = {"value": LOSS, "grad": grads}
        for names in (("value", "grad"), ()):
            try:
                given = {n: extra[n] for n in names}
                return plain.update(grads, state, params, **given)
            except TypeError as error:
                if not names or "unexpected keyword" not in str(error):
                    raise

    for step in range(1, 4):
        updates, state = update(nested(random(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def rows_to_try():
    """All optimizers; by default Adam alone of those that treat elements alike."""
    for name in OPTIMIZERS:
        kind = pytest.param if name in LAYER_BY_LAYER | AT_ONCE | {"adam"} else slow
        yield from (kind(name, order) for order in ORDERS)


@pytest.mark.parametrize("name, order", list(rows_to_try()))
def test_updates_equal_those_of_the_models_own_tree(name, order):
    rows = rows_in(ORDERS[order])
    stacks = rows.stacked(random(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stacks)
    keys = {path: keys_of(path) for path in own_paths()}
    optimizer = make_optimizer(OPTIMIZERS[name], shapes, keys, rows)
    if order == "as in the model":
        how = MODEL if name in LAYER_BY_LAYER else ROWS if name in AT_ONCE else STACKS
        if name in LAYER_BY_LAYER | AT_ONCE | ELEMENTWISE:
            assert optimizer.layers == how
    stored = optimizer.init(stacks)
    update = jax.jit(optimizer.update)
    for step in range(1, 4):
        changes, stored = update(rows.stacked(random(step)), stored, stacks, LOSS)
        stacks = optax.apply_updates(stacks, changes)
    found = nested(rows.unstacked(jax.device_get(stacks)))
    expected = trained_plainly(name)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    for stack, paths in rows.rows.items():
        padding = [i for i, path in enumerate(paths) if path is None]
        assert not np.asarray(stacks[stack])[padding].any()
