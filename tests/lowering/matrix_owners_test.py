"""Updates at owners of whole matrices equal optax on one device, on random plans."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from optax import contrib
from support.marks import slow
from support.own_trees import keys_of, nested

from meshpar.arrays import parameter_path
from meshpar.contracts.contract import Contract
from meshpar.contracts.formula import formula_violations
from meshpar.contracts.hlo import parse_hlo
from meshpar.contracts.written import written_collectives, written_terms
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import LeafPlan, Plan, partition_spec
from meshpar.lowering.automatic_axes import optimizer_bounds
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.matrix_owners import FROM_OWNERS, TO_OWNERS, OwnedUpdate
from meshpar.lowering.optimizer import make_optimizer

LOSS = np.float32(0.5)
AXES = ("pipe", "data", "fsdp", "tensor")


def rotated_adam(rate=1e-2):
    """Adam between two factors of a matrix, as SOAP: whole ones before and after."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        left = jax.tree.map(lambda x: jnp.zeros((x.shape[0],) * 2), params)
        return {"second": zeros, "left": left}

    def one(g, second, left):
        if g.ndim != 2:
            return -rate * g, second, left
        left = 0.9 * left + 0.1 * g @ g.T
        factor = jnp.linalg.cholesky(left + jnp.eye(len(left)))
        turned = factor.T @ g
        second = 0.9 * second + 0.1 * turned**2
        return -rate * factor @ (turned / (jnp.sqrt(second) + 1e-2)), second, left

    def update(updates, state, params=None):
        del params
        trees = updates, state["second"], state["left"]
        leaves, structures = zip(*map(jax.tree.flatten, trees), strict=True)
        columns = zip(*itertools.starmap(one, zip(*leaves, strict=True)), strict=True)
        changes, second, left = map(jax.tree.unflatten, structures, columns)
        return changes, {"second": second, "left": left}

    return optax.GradientTransformation(init, update)


def narrow():
    """Newton-Schulz in bfloat16, which is what travels."""

    def one(x):
        if x.ndim != 2:
            return x
        x = x.astype(jnp.bfloat16)
        x = x / (jnp.linalg.norm(x) + 1e-3)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x.astype(jnp.float32)

    ortho = optax.stateless(lambda u, _: jax.tree.map(one, u))
    return optax.chain(optax.trace(0.9), ortho, optax.scale(-1e-2))


def of_last_dims(params):
    """Matrices of stacks that the model itself holds, too."""

    def numbers(x):
        dims = x.ndim - 2, x.ndim - 1
        return contrib.MuonDimensionNumbers(*dims) if x.ndim >= 2 else None

    return jax.tree.map(numbers, params)


OPTIMIZERS = {
    "muon": contrib.muon(1e-2, weight_decay=0.1),
    "adaptive": contrib.muon(1e-2, adaptive=True, nesterov=False),
    "aol": contrib.muon(1e-2, preconditioning="aol", ns_steps=3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), contrib.muon(1e-2)),
    "stacks": contrib.muon(1e-2, muon_weight_dimension_numbers=of_last_dims),
    "rotated": rotated_adam(),
    "narrow": narrow(),
}
ALIKE = "muon", "adaptive", "aol"
"""Kinds of Muon that run the same code of ours as the others; for -m slow."""


class Case(NamedTuple):
    """A random tree of parameters, and how it lies on 8 devices.

    Attributes:
      shapes: {path: shape} of the model's own tensors.
      rows: how layers are stacked.
      mesh: the mesh.
      specs: {path as stored: mesh axes for each dim}.
    """

    shapes: dict
    rows: LayerRows
    mesh: Mesh
    specs: dict


def draw(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.permutation([8] if rng.random() < 0.3 else [4, 2] * 1 + [1]).tolist()
    sizes = (sizes + [1] * 4)[:4]
    sizes = [int(n) for n in rng.permutation(sizes)]
    if math.prod(sizes) != 8:
        sizes = [1, 2, 2, 2]
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), AXES)
    depth = int(rng.choice([2, 3, 4])) * sizes[0]
    layered = {"q": (8, 16), "k": (8, 16), "up": (16, 8), "bias": (8,)}
    alone = {"head": (8, 16), "table": (24, 8), "stack": (8, 16, 8)}
    alone["experts"] = (3, 4, 8, 16)
    shapes = {f"layers/{i}/{n}": s for n, s in layered.items() for i in range(depth)}
    shapes |= alone
    stacked = rng.random() < 0.7
    rows = LayerRows(
        {f"layers/{n}": tuple(f"layers/{i}/{n}" for i in range(depth)) for n in layered}
        if stacked
        else {}
    )

    def spec(shape):
        free = [a for a in AXES[1:] if mesh.shape[a] > 1 and rng.random() < 0.7]
        free = rng.permutation(free).tolist()
        dims = [[] for _ in shape]
        for axis in free:
            dim = int(rng.integers(len(shape)))
            ways = math.prod(mesh.shape[a] for a in dims[dim]) * mesh.shape[axis]
            if shape[dim] % ways == 0:
                dims[dim].append(axis)
        return tuple(map(tuple, dims))

    pipe = ("pipe",) if mesh.shape["pipe"] > 1 else ()
    if stacked:
        specs = {f"layers/{n}": (pipe, *spec(s)) for n, s in layered.items()}
        specs |= {n: spec(s) for n, s in alone.items()}
    else:
        specs = {path: spec(shape) for path, shape in shapes.items()}
    return Case(shapes, rows, mesh, specs)


def random(shapes, seed):
    rng = np.random.default_rng(seed)
    return {p: rng.normal(size=s).astype(np.float32) for p, s in shapes.items()}


def trained_plainly(optimizer, shapes):
    """The parameters after three updates of optax on the model's own tree."""
    params = nested(random(shapes, 0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(1, 4):
        updates, state = update(nested(random(shapes, step)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def plan_of(case, optimizer):
    """A plan that lays state out as the parameters of its shape."""

    def leaf(path, kind, x, spec):
        return LeafPlan(path, kind, x.shape, x.dtype, None, spec, "", 0)

    stored = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for path, x in case.rows.stacked(random(case.shapes, 0)).items()
    }
    params = {p: leaf(p, "parameter", x, case.specs[p]) for p, x in stored.items()}
    leaves = []
    flat = jax.tree_util.tree_flatten_with_path(optimizer.abstract_state)[0]
    for keys, x in flat:
        path = parameter_path(keys, params) if x.shape else None
        spec = ((),) * len(x.shape)
        if path is not None and params[path].shape == x.shape:
            spec = case.specs[path]
        elif path in case.rows.rows:
            spec = (case.specs[path][0], *spec[1:])
        leaves.append(leaf(str(keys), "optimizer", x, spec))
    return Plan(Layout(), params, params, params, tuple(leaves), None)


@functools.cache
def owned(name, seed):
    """(case, optimizer, its plan, its update at owners) of a random case."""
    return owned_of(name, draw(seed))


def owned_of(name, case, optimizer=None):
    shapes = case.rows.stacked(random(case.shapes, 0))
    shapes = {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in shapes.items()}
    keys = {path: keys_of(path) for path in case.shapes}
    given = OPTIMIZERS[name] if optimizer is None else optimizer
    optimizer = make_optimizer(given, shapes, keys, case.rows)
    plan = plan_of(case, optimizer)
    return case, optimizer, plan, OwnedUpdate.of(optimizer, plan, case.mesh)


def placed(case, tree):
    return {
        path: jax.device_put(
            x, NamedSharding(case.mesh, partition_spec(case.specs[path]))
        )
        for path, x in tree.items()
    }


def draws():
    """Most optimizers by default on one of two plans, and all on 20 in sweeps."""
    for number, name in enumerate(OPTIMIZERS):
        for seed in range(20):
            default = seed == number % 2 and name not in ALIKE
            kind = pytest.param if default else slow
            yield kind(name, seed)


@pytest.mark.parametrize("name, seed", list(draws()))
def test_updates_at_owners_equal_optax_on_one_device(name, seed):
    case, optimizer, plan, update = owned(name, seed)
    assert update.is_whole
    params = placed(case, case.rows.stacked(random(case.shapes, 0)))
    leaves = jax.tree.unflatten(
        jax.tree.structure(optimizer.abstract_state), plan.optimizer
    )
    state = jax.tree.map(
        lambda x, leaf: jax.device_put(x, leaf.sharding(case.mesh)),
        optimizer.init(jax.device_get(params)),
        leaves,
    )
    with jax.set_mesh(case.mesh):
        traced = jax.jit(update.update).trace(params, state, params, LOSS)
        step = traced.lower().compile()
        for number in range(1, 4):
            grads = placed(case, case.rows.stacked(random(case.shapes, number)))
            changes, state = step(grads, state, params, LOSS)
            changes, state = jax.device_put((changes, state), shardings(case, leaves))
            params = placed(case, optax.apply_updates(params, changes))
    found = nested(case.rows.unstacked(jax.device_get(params)))
    expected = trained_plainly(OPTIMIZERS[name], case.shapes)
    tolerance = 3e-3 if name == "narrow" else 1e-5
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
    check_traffic(case, optimizer, update, traced, step)


def shardings(case, leaves):
    """Of the changes of parameters, and of the state."""
    sharding = lambda spec: NamedSharding(case.mesh, partition_spec(spec))  # noqa: E731
    changes = {path: sharding(spec) for path, spec in case.specs.items()}
    return changes, jax.tree.map(lambda leaf: leaf.sharding(case.mesh), leaves)


def check_traffic(case, optimizer, update, traced, step):
    """The formula says what is written, and nothing else is compiled but sums."""
    sizes = {axis: size for axis, size in case.mesh.shape.items() if size > 1}
    written = written_collectives(traced.jaxpr, sizes, widens=True)
    terms = list(update.terms())
    assert formula_violations(written_terms(written), terms) == []
    reach = dataclasses.replace(optimizer.reach, moves=False)
    sums = optimizer_bounds(tuple(sizes), 8, len(case.specs), reach)
    contract = Contract((*written_terms(written), *sums))
    assert contract.violations(parse_hlo(step.as_text(), case.mesh.shape)) == []


def test_the_bytes_that_muon_sends_by_hand():
    """A stack of 6 matrices [8, 16] over fsdp=4: 2 matrices each, 2 of them copies."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 4, 1), AXES)
    shapes = {f"layers/{i}/q": (8, 16) for i in range(6)}
    rows = LayerRows({"layers/q": tuple(shapes)})
    case = Case(shapes, rows, mesh, {"layers/q": ((), ("fsdp",), ())})
    _, _, _, update = owned_of("muon", case)
    (group,) = update.groups
    matrix = 8 * 16 * 4
    terms = [(t.kind, t.axes, t.payload_bytes, t.why) for t in update.terms()]
    assert terms == [
        ("all_to_all", ("fsdp",), 2 * matrix, TO_OWNERS),
        ("all_gather", ("data",), 2 * matrix, FROM_OWNERS),
        ("all_to_all", ("fsdp",), 2 * matrix, FROM_OWNERS),
    ]
    # 8 owners have one matrix each: 5 iterations of three products.
    assert group.own == 1
    assert group.flops == 5 * (2 * 8 * 8 * 16 + 2 * 8 * 8 * 8 + 2 * 8 * 8 * 16)


def test_matrices_of_one_form_are_dealt_out_together_where_that_is_less():
    """Of 3 and 3 over 4 owners, each alone would leave one owner idle in both."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 1, 4, 1), AXES)
    spec = {"layers/q": ((), ("fsdp",), ()), "layers/k": ((), ("fsdp",), ())}
    for depth, groups, own in ((2, 1, 1), (4, 2, 1), (6, 1, 3)):
        shapes = {f"layers/{i}/{n}": (8, 16) for n in "qk" for i in range(depth)}
        rows = LayerRows(
            {f"layers/{n}": tuple(p for p in shapes if p.endswith(n)) for n in "qk"}
        )
        update = owned_of("muon", Case(shapes, rows, mesh, spec))[3]
        assert [group.own for group in update.groups] == [own] * groups


def test_regions_begin_and_end_where_values_are_narrow():
    """bfloat16 travels: half the bytes of the gradients."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 8, 1), AXES)
    case = Case({"w": (8, 16)}, LayerRows({}), mesh, {"w": ((), ("fsdp",))})
    (group,) = owned_of("narrow", case)[3].groups
    (region,) = group.regions
    moved = [group.tensors[x.number].dtype for x in (*region.entries, *region.exits)]
    assert moved == [jnp.bfloat16, jnp.bfloat16]


def test_dims_in_opposite_orders_of_axes_are_left_to_the_compiler():
    """Parts of one come in the order of fsdp, and of the other in that of tensor."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 4, 2), AXES)
    spec = {"a": ((), ("fsdp", "tensor")), "b": ((), ("tensor", "fsdp"))}
    case = Case({"a": (8, 16), "b": (8, 16)}, LayerRows({}), mesh, spec)

    def update(updates, _):
        a, b = updates["a"], updates["b"]
        return {"a": a @ b.T @ a, "b": b}

    assert owned_of("both", case, optax.stateless(update))[3] is None
    same = case._replace(specs=spec | {"b": spec["a"]})
    assert owned_of("both", same, optax.stateless(update))[3].is_whole


def test_updates_leave_as_what_enters_lies():
    """Through reshapes, too: heads and their widths are one dim of the matrix."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 4, 2), AXES)
    spec = ((), ("fsdp",), ("tensor",), ())
    case = Case({"q": (3, 8, 4, 8)}, LayerRows({}), mesh, {"q": spec})
    dims = contrib.MuonDimensionNumbers(1, (2, 3))
    numbers = lambda params: jax.tree.map(lambda _: dims, params)  # noqa: E731
    heads = contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)
    (group,) = owned_of("heads", case, heads)[3].groups
    (region,) = group.regions
    lies = [group.tensors[x.number].spec for x in (*region.entries, *region.exits)]
    assert (region.batch, group.own, lies) == ((3,), 1, [spec, spec])


@pytest.mark.parametrize(
    "name, shape", [("muon", (8,)), ("adam", (8, 16)), ("neighbours", (4, 8, 16))]
)
def test_nothing_is_dealt_out_where_no_matrix_has_to_be_whole(name, shape):
    """Nor where a stack's matrices meet: all would be whole on one device."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 8, 1), AXES)
    case = Case({"w": shape}, LayerRows({}), mesh, {"w": ((),) * len(shape)})
    others = {"adam": optax.adam(1e-2), "neighbours": neighbours()}
    update = owned_of(name, case, others.get(name))[3]
    assert update is None or (update.groups == [] and not update.is_whole)


def neighbours():
    """Each matrix of a stack times its neighbour, which no device may miss."""

    def one(x):
        return x @ jnp.roll(x, 1, 0).swapaxes(1, 2) @ x

    return optax.stateless(lambda updates, _: jax.tree.map(one, updates))
