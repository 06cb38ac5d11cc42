"""Small training steps as users write them, clean or with one defect planted.

Each builder takes the name of a defect, "" for none, and returns (step, arguments).
The line that a report has to name for a defect ends with a comment that names it: what
is planted, or where a program shows it, as no program has the lines of shardings of
arguments, of meshes and of the options of jax.jit.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, HIDDEN, CLASSES = 1024, 96, 320, 640
OPTIMIZER = optax.adam(1e-3)


def mesh_of(**sizes):
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def line_of(defect):
    """The "file:line" of the line that a defect is planted in."""
    module = inspect.getmodule(line_of)
    lines = inspect.getsource(module).splitlines()
    # A line has the names of its defects behind "#".
    names = [x.rpartition("  # ")[2].split(", ") for x in lines]
    (number,) = [i for i, found in enumerate(names, 1) if defect in found]
    return f"{module.__file__}:{number}"


def abstract(tree, mesh, spec_of):
    """Arrays of a tree with the sharding that spec_of(path, leaf) gives them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(path, x))
        ),
        tree,
    )


# Plain jax.jit with NamedShardings: a classifier under FSDP.


def jit_step(defect=""):
    mesh = mesh_of(rows=4, cols=2)
    batch_axes = ("rows", "cols") if defect != "idle axis" else "rows"

    def hold(x):
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, P(batch_axes, None))
        )

    def loss(params, batch):
        x = hold(batch["x"])
        hidden = jax.nn.relu(hold(x @ params["in"]))
        if defect == "whole activation":
            whole = NamedSharding(mesh, P())
            hidden = jax.lax.with_sharding_constraint(hidden, whole)  # whole activation
            hidden = jnp.sin(hidden)
        if defect == "fighting":
            across = NamedSharding(mesh, P(None, batch_axes))
            hidden = jax.lax.with_sharding_constraint(hidden, across) * 2
            rows = NamedSharding(mesh, P(batch_axes))
            hidden = jax.lax.with_sharding_constraint(hidden, rows)  # fighting
        if defect == "host print":
            jax.debug.callback(lambda x: None, jnp.max(hidden))  # host print
        logits = hold(hidden @ params["head"])  # head whole, same matmul
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["y"]
        ).mean()

    def step(state, batch):  # not donated, other sharding, idle axis
        params, moments = state["params"], state["optimizer"]
        value, grads = jax.value_and_grad(loss)(params, batch)
        if defect == "gradient per microbatch":

            def add(total, part):
                value, grads = jax.value_and_grad(loss)(params, part)
                total = jax.tree.map(jnp.add, total, grads)  # gradient per microbatch
                return total, value

            parts = jax.tree.map(
                lambda x: x.reshape(x.shape[0] // 4, 4, *x.shape[1:]).swapaxes(0, 1),
                batch,
            )
            grads, values = jax.lax.scan(
                add, jax.tree.map(jnp.zeros_like, params), parts
            )
            value = values.mean()
        updates, moments = OPTIMIZER.update(grads, moments, params)  # moments whole
        params = optax.apply_updates(params, updates)
        if defect == "narrow result":
            narrow = jnp.bfloat16
            params = jax.tree.map(lambda x: x.astype(narrow), params)  # narrow result
        return {"params": params, "optimizer": moments}, value

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        if x.ndim < 2:
            return P()
        if defect == "head whole" and "head" in name:
            return P()
        if defect == "moments whole" and ".mu" in name:
            return P()
        return P(batch_axes)

    params = {
        "in": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
        "head": jax.ShapeDtypeStruct((HIDDEN, CLASSES), jnp.float32),
    }
    state = {"params": params, "optimizer": jax.eval_shape(OPTIMIZER.init, params)}
    state = abstract(state, mesh, spec)
    batch = {
        "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        "y": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    batch = abstract(batch, mesh, lambda path, x: P(batch_axes))
    options = {} if defect == "not donated" else {"donate_argnums": 0}
    shardings = jax.tree.map(lambda x: x.sharding, state)
    if defect == "other sharding":
        shardings["params"]["in"] = NamedSharding(mesh, P(None, batch_axes))
    if defect != "narrow result":
        options["out_shardings"] = shardings, None
    return jax.jit(step, **options), (state, batch)


# shard_map: everything is written by hand.


def shard_map_step(defect=""):
    mesh = mesh_of(shards=8)
    axis = "shards"

    def gathered(w):
        if defect == "wide gather":
            return jax.lax.all_gather(w, axis, tiled=True).astype(  # wide gather
                jnp.bfloat16
            )
        return jax.lax.all_gather(w.astype(jnp.bfloat16), axis, tiled=True)

    def loss(params, x, y):
        w = gathered(params["in"])
        hidden = jax.nn.relu(x.astype(jnp.bfloat16) @ w)
        if defect == "gathered twice":
            again = jax.lax.all_gather(  # gathered twice
                params["in"].T.astype(jnp.bfloat16), axis, axis=1, tiled=True
            )
            hidden += jnp.tanh(x.astype(jnp.bfloat16) @ again.T)
        logits = (hidden @ gathered(params["head"])).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        if defect == "gathered and sliced":
            every = jax.lax.all_gather(hidden, axis, tiled=True)  # gathered and sliced
            own = jax.lax.axis_index(axis) * hidden.shape[0]
            mine = jax.lax.dynamic_slice_in_dim(every, own, hidden.shape[0])
            losses += mine.astype(jnp.float32).mean(-1)
        return losses.sum() / ROWS

    def step(params, biases, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        value = jax.lax.psum(value, axis)
        if defect == "summed twice":
            value = jax.lax.psum(value * 2, axis)  # summed twice
        if defect == "gather in a loop":

            def round_(total, part):
                w = jax.lax.all_gather(  # gather in a loop
                    params["head"], axis, tiled=True
                )
                return total + jnp.sum(jnp.sin(w)[:5] * part), None

            parts = jax.lax.psum(jnp.arange(4.0), axis)
            extra = jax.lax.scan(round_, jnp.zeros(()), parts)[0]
            value += extra
        sums = {
            name: jnp.float32(i) * b * jnp.sum(x)
            for i, (name, b) in enumerate(biases.items())
        }
        if defect == "many small sends":
            ring = [(i, (i + 1) % 8) for i in range(8)]
            sums = {
                name: jax.lax.ppermute(b, axis, ring)  # many small sends
                for name, b in sums.items()
            }
        else:
            flat = jax.lax.psum(jnp.stack(list(sums.values())), axis)
            sums = dict(zip(sums, flat, strict=True))
        if defect == "sum per microbatch":

            def add(total, part):
                grads = jax.grad(loss)(params, *part)
                wide = jnp.outer(grads["in"].sum(0), part[0].sum(0))
                return total + jax.lax.psum(wide, axis), None  # sum per microbatch

            parts = x.reshape(2, -1, WIDTH), y.reshape(2, -1)
            total, _ = jax.lax.scan(add, jnp.zeros((HIDDEN, WIDTH)), parts)
            value += total.sum()
        if defect == "sum sliced":
            whole = jnp.outer(x.sum(0), y.astype(jnp.float32))
            whole = jax.lax.psum(whole, axis)  # sum sliced
            own = jax.lax.axis_index(axis) * (WIDTH // 8)
            mine = jax.lax.dynamic_slice_in_dim(whole, own, WIDTH // 8)
            grads["in"] += mine.sum()
        if defect == "wide sum":
            narrow = (x.astype(jnp.bfloat16) ** 2).sum(0)
            narrow = jnp.outer(narrow, narrow)
            total = jax.lax.psum(narrow.astype(jnp.float32), axis)  # wide sum
            grads["in"] += total.astype(jnp.bfloat16).sum().astype(jnp.float32)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return params, {n: biases[n] - sums[n] for n in biases}, value

    split, rows = P(axis), P(axis)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(split, P(), rows, rows),
        out_specs=(split, P(), P()),
        check_vma=False,
    )
    params = {
        "in": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
        "head": jax.ShapeDtypeStruct((HIDDEN, CLASSES), jnp.float32),
    }
    biases = {f"b{i}": jax.ShapeDtypeStruct((), jnp.float32) for i in range(40)}
    batch = (
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
    arguments = (
        abstract(params, mesh, lambda path, x: split),
        abstract(biases, mesh, lambda path, x: P()),
        *abstract(batch, mesh, lambda path, x: rows),
    )
    return jax.jit(mapped, donate_argnums=(0, 1)), arguments


# Flax Linen with logical rules: a small transformer block under FSDP and tensor.


class Block(nn.Module):
    mesh: Any
    defect: str = ""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        dense = functools.partial(nn.Dense, use_bias=False)
        hidden = dense(  # no mesh
            HIDDEN, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp"))
        )(x)
        hidden = nn.with_logical_constraint(
            nn.relu(hidden), ("batch", None, "mlp"), mesh=self.mesh
        )
        x += dense(
            WIDTH, kernel_init=nn.with_logical_partitioning(init, ("mlp", "embed"))
        )(hidden)
        names = ("batch", None, None)
        if self.defect == "unknown name":
            names = (None, None, None)
        x = nn.with_logical_constraint(x, names, mesh=self.mesh)  # unknown name
        return jnp.sin(x)


class Model(nn.Module):
    mesh: Any
    defect: str = ""

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal()
        names = ("vocab", "embed")
        table = self.param(
            "table", nn.with_logical_partitioning(init, names), (CLASSES, WIDTH)
        )
        x = nn.with_logical_constraint(
            table[tokens]  # lookup of a split table
            if self.defect == "lookup of a split table"
            else jax.nn.one_hot(tokens, CLASSES) @ table,
            ("batch", None, None),
            mesh=self.mesh,
        )
        for i in range(2):
            x = Block(self.mesh, self.defect, name=f"block_{i}")(x)
        head = self.param(
            "head",
            nn.with_logical_partitioning(init, ("embed", "classes")),
            (WIDTH, CLASSES),
        )
        return nn.with_logical_constraint(
            x @ head,  # rule dropped
            ("batch", None, "classes"),
            mesh=self.mesh,
        )


def flax_step(defect=""):
    mesh = mesh_of(data=4, model=2)
    rules = [("batch", "data"), ("mlp", "model"), ("vocab", "model"), ("embed", "data")]
    if defect != "rule dropped":
        rules.append(("classes", "model"))
    model = Model(None if defect == "no mesh" else mesh, defect)

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def step(state, tokens):
        params, moments, count = state
        with nn.logical_axis_rules(rules):
            value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        count += jnp.int32(1) if defect == "weak count" else 1  # weak count
        return (optax.apply_updates(params, updates), moments, count), value

    tokens = jax.ShapeDtypeStruct((16, 24), jnp.int32)
    with nn.logical_axis_rules(rules):
        boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)
    params = nn.meta.unbox(boxed)
    whole = NamedSharding(mesh, P())
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params,
        shardings,
    )
    moments = jax.eval_shape(OPTIMIZER.init, params)
    moments = optax.tree_map_params(
        OPTIMIZER,
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        moments,
        shardings,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=whole
        ),
    )
    count = np.int32(0) if defect != "weak count" else 0
    state = params, moments, count
    tokens = jax.ShapeDtypeStruct(
        tokens.shape, tokens.dtype, sharding=NamedSharding(mesh, P("data"))
    )
    placed = jax.tree.map(
        lambda x: getattr(x, "sharding", whole),
        state,
    )
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, None)), (
        state,
        tokens,
    )
