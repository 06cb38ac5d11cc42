"""Models that state PartitionSpecs themselves run, or are refused with a remedy."""

import contextlib
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.marks import slow

import meshpar
from meshpar.errors import LayoutError
from meshpar.explain.verify import verify
from meshpar.layouts.rules import as_axes

FOUR = jax.devices()[:4]
DATA = {"tokens": np.arange(32, dtype=np.int32).reshape(8, 4) % 16}


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The sharding configuration of Flax's gemma example, in small."""

    tensor: str = "tensor"
    act_btd: P | None = None
    act_btf: P | None = None

    @property
    def emb_vd(self):
        return P(self.tensor, "fsdp")

    @property
    def ffw_df(self):
        return P("fsdp", self.tensor)

    @property
    def ffw_fd(self):
        return P(self.tensor, "fsdp")


class Block(nnx.Module):
    def __init__(self, config, rngs):
        def linear(sizes, sharding):
            metadata = {"out_sharding": sharding}
            return nnx.Linear(
                *sizes, use_bias=False, kernel_metadata=metadata, rngs=rngs
            )

        self.config = config
        self.up = linear((8, 16), config.ffw_df)
        self.down = linear((16, 8), config.ffw_fd)

    def __call__(self, x_BTD):
        h_BTF = nnx.gelu(self.up(x_BTD, out_sharding=self.config.act_btf))
        return x_BTD + self.down(h_BTF, out_sharding=self.config.act_btd)


class Gemma(nnx.Module):
    def __init__(self, config, rngs):
        self.embedder = nnx.Embed(
            16, 8, embedding_metadata={"out_sharding": config.emb_vd}, rngs=rngs
        )
        self.layers = nnx.List([Block(config, rngs) for _ in range(2)])

    def __call__(self, tokens):
        x_BTD = self.embedder(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.embedder.attend(x_BTD)


def lowered(config, layout, change=lambda logits: logits):
    def loss(module, batch):
        logits = change(module(batch["tokens"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"]
        )
        return losses.mean()

    model = meshpar.from_nnx(lambda rngs: Gemma(config, rngs), loss)
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    return meshpar.lower(model, optax.sgd(1.0), layout, DATA, devices=devices)


@pytest.mark.slow
def test_metadata_with_mesh_axes_and_constraints_over_them_run():
    losses = []
    for layout in ("data=8", "fsdp=4,tensor=2", "fsdp=2,tensor=2,microbatches=2"):
        program = lowered(
            Shardings(),
            layout,
            lambda x: with_sharding_constraint(x, P(("data", "fsdp"), None, "tensor")),
        )
        losses.append(float(program.step(program.init(0), DATA)[1]["loss"]))
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)
    assert program.plan.specs["embedder/embedding"] == P("tensor", "fsdp")


def test_a_parameter_on_an_axis_of_another_name_is_named():
    with pytest.raises(LayoutError, match="embedder/embedding.*'tp'.*params.tp="):
        lowered(Shardings(tensor="tp"), "fsdp=4,tensor=2")
    program = lowered(Shardings(tensor="tp"), "fsdp=4,tensor=2,params.tp=tensor")
    assert program.plan.specs["embedder/embedding"] == P("tensor", "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=8", "fsdp=4,tensor=2"])
def test_out_shardings_are_constraints(layout):
    def change(logits):
        logits = jnp.einsum("bld->bdl", logits)  # Of one array: without out_sharding.
        both = P(("data", "fsdp"), "tensor", None)
        logits = jax.sharding.reshard(logits, both)
        eye = jnp.eye(16)
        logits = jnp.einsum("bdl,dk->blk", logits, eye, out_sharding=P("fsdp"))
        order = jnp.arange(16).at[jnp.arange(16)].get(out_sharding=P("tensor"))
        return jnp.matmul(logits, eye[order], out_sharding=P("fsdp", None, "tensor"))

    config = Shardings(act_btf=P("fsdp", None, "tensor"), act_btd=P("fsdp"))
    program, plain = lowered(config, layout, change), lowered(Shardings(), layout)
    report = verify(program, None, [DATA, DATA])
    assert report.ok, report
    constraints = [
        p.lowered.as_text().count("sharding_constraint") for p in (program, plain)
    ]
    assert constraints[0] >= constraints[1] + 8  # Of 4 layers, and 4 of `change`.
    both = (p.step(p.init(0), DATA)[1]["loss"] for p in (program, plain))
    np.testing.assert_allclose(*both, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=8", "fsdp=4,tensor=2"])
def test_out_shardings_of_new_arrays_are_constraints(layout):
    rows, names = P(("data", "fsdp")), P("tensor")

    def change(logits):
        flat = jnp.reshape(logits, (len(logits), -1), out_sharding=rows)
        logits = flat.reshape(logits.shape, out_sharding=P("fsdp", None, "tensor"))
        zeros = jnp.zeros(logits.shape, out_sharding=rows)
        added = zeros.at[..., 0].add(logits[..., 1], out_sharding=rows)
        three = jnp.einsum(
            "bld,dk,kj->blj", added, *[jnp.eye(16)] * 2, out_sharding=rows
        )
        steps = jnp.arange(16.0, out_sharding=names) + jnp.ones(16, out_sharding=names)
        noise = jax.random.normal(jax.random.key(0), 16, out_sharding=names)
        doubled = jax.sharding.auto_axes(lambda x: 2 * x, out_sharding=names)(noise)
        wide = jnp.broadcast_to(steps + doubled, logits.shape, out_sharding=rows)
        return logits + three + wide

    def plain(logits):
        first = jnp.arange(16) == 0
        steps = jnp.arange(1.0, 17.0) + 2 * jax.random.normal(jax.random.key(0), 16)
        return logits + logits[..., 1:2] * first[None, None] + steps[None, None]

    program, same = (lowered(Shardings(), layout, x) for x in (change, plain))
    report = verify(program, None, [DATA, DATA])
    assert report.ok, report
    constraints = [
        p.lowered.as_text().count("sharding_constraint") for p in (program, same)
    ]
    assert constraints[0] >= constraints[1] + 10
    both = (p.step(p.init(0), DATA)[1]["loss"] for p in (program, same))
    np.testing.assert_allclose(*both, rtol=1e-5)


def test_an_out_sharding_that_is_no_constraint_is_refused():
    def change(logits):
        return jnp.repeat(logits, 1, axis=0, out_sharding=P("fsdp"))

    with pytest.raises(LayoutError, match="repeat.*Explicit.*layouts.constrain"):
        lowered(Shardings(), "fsdp=4,tensor=2", change)


def test_a_constraint_on_an_unknown_axis_is_refused():
    with pytest.raises(LayoutError, match="no mesh axis is called 'tp'.*known: .*data"):
        lowered(Shardings(), "data=8", lambda x: with_sharding_constraint(x, P("tp")))


def test_a_constraint_that_does_not_divide_is_refused():
    def seven(logits):
        return with_sharding_constraint(logits[..., :7], P(None, None, "tensor"))

    with pytest.raises(LayoutError, match="dim 2=7 does not divide over tensor=2"):
        lowered(Shardings(), "fsdp=4,tensor=2", lambda x: x + seven(x).sum())


def test_a_constraint_inside_a_nested_function_is_found():
    @jax.checkpoint
    def seven(logits):
        def body(carry, row):
            row = with_sharding_constraint(row[:, :7], P(None, "tensor"))
            return carry + jnp.sum(row), None

        return jax.lax.scan(body, jnp.zeros(()), logits)[0]

    with pytest.raises(LayoutError, match="dim 1=7 does not divide over tensor=2"):
        lowered(Shardings(), "fsdp=4,tensor=2", lambda x: x + seven(x))


def test_other_errors_of_a_model_pass_unchanged():
    def broken(logits):
        raise ValueError("of the model's own")

    with pytest.raises(ValueError, match="^of the model's own") as error:
        lowered(Shardings(), "data=8", broken)
    assert not isinstance(error.value, LayoutError)


@pytest.mark.parametrize("spec", [slow(P("data")), P(None, "data")])
def test_a_constraint_over_axes_of_shard_map(spec):
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = rngs.params.normal((2, 4, 4))
            self.layers = nnx.Dict(
                w=nnx.Param(init, out_sharding=("layers", None, None))
            )

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["tokens"].astype(jnp.float32),
        layer=lambda layer, x: with_sharding_constraint(x @ layer.w[...], spec),
        head_loss=lambda net, x, batch: (x**2).mean(),
    )
    model = meshpar.from_nnx(Net, stack)
    if spec == P("data"):  # Each device has its rows.
        program = meshpar.lower(model, optax.sgd(1.0), "data=4", DATA, devices=FOUR)
        assert verify(program, None, [DATA]).ok
        return
    with pytest.raises(LayoutError, match="shard_map splits that axis.*lowering=jit"):
        meshpar.lower(model, optax.sgd(1.0), "data=4", DATA, devices=FOUR)
    program = meshpar.lower(
        model, optax.sgd(1.0), "data=4", DATA, lowering="jit", devices=FOUR
    )
    assert program.contract.terms


class LinenBlock(nn.Module):
    """Names the axes of a mesh of its own: "fsdp" and "tp"."""

    @nn.compact
    def __call__(self, x_BTD):
        def dense(size, *axes):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(size, use_bias=False, kernel_init=init)

        h_BTF = nn.gelu(dense(16, "fsdp", "tp")(x_BTD))
        h_BTF = with_sharding_constraint(h_BTF, P("fsdp", None, "tp"))
        x_BTD = x_BTD + dense(8, "tp", "fsdp")(h_BTF)
        return with_sharding_constraint(x_BTD, P("fsdp", None, None))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.with_partitioning(nn.initializers.normal(1.0), ("tp", "fsdp"))
        embed = nn.Embed(16, 8, embedding_init=init)
        x_BTD = embed(tokens)
        for number in range(2):
            x_BTD = LinenBlock(name=f"block_{number}")(x_BTD)
        return embed.attend(x_BTD)


def linen_loss(apply, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        apply(batch["tokens"]), batch["tokens"]
    )
    return losses.mean()


def linen_loop(num_steps):
    """(parameters, losses) of the user's loop, on a mesh of one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    module, optimizer = LinenNet(), optax.adam(0.1)
    with jax.set_mesh(mesh):
        start = params = nn.unbox(module.init(jax.random.key(1), DATA["tokens"]))
        state, losses = optimizer.init(params), []
        for _ in range(num_steps):
            value, gradients = jax.jit(
                jax.value_and_grad(
                    lambda v: linen_loss(lambda tokens: module.apply(v, tokens), DATA)
                )
            )(params)
            updates, state = optimizer.update(gradients, state)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
    return jax.device_get((start, params)), losses


@pytest.mark.parametrize(
    "layers, layout",
    [
        ("block_*", "pipe=2,tensor=2"),
        *(
            slow(layers, layout)
            for layers in ("", "block_*")
            for layout in ("data=4", "fsdp=4", "fsdp=2,tensor=2")
        ),
    ],
)
def test_a_model_that_names_axes_trains_as_in_its_own_loop(layers, layout):
    model = meshpar.from_linen(LinenNet(), linen_loss, DATA["tokens"], layers=layers)
    names = {"tensor": "tp"}
    program = meshpar.lower(
        model, optax.adam(0.1), layout, DATA, axis_names=names, devices=FOUR
    )
    compare_with_the_loop(program, layout)


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_a_mesh_of_the_users_own_may_be_in_use(kind):
    config = Shardings(tensor="tp", act_btf=P("fsdp", None, "tp"), act_btd=P("fsdp"))
    layout = "fsdp=4,tensor=2,axes.tp=tensor"
    users = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(kind,) * 2)
    if kind == AxisType.Auto:
        config = dataclasses.replace(config, act_btf=None, act_btd=None)
    losses = []
    for context in (contextlib.nullcontext(), jax.set_mesh(users)):
        with context:
            program = lowered(config, layout)
            state, metrics = program.step(program.init(0), DATA)
            losses += [metrics["loss"], program.evaluate(state, DATA)["loss"]]
            program.in_model_order(state)
    np.testing.assert_array_equal(losses[:2], losses[2:])


def compare_with_the_loop(program, layout):
    (start, end), losses = linen_loop(3)
    assert str(program.layout).endswith("axes.tp=tensor")
    assert meshpar.layouts.parse(str(program.layout)) == program.layout
    if "tensor" in layout:
        assert "tensor" in str(program.plan.specs["Embed_0/embedding"])
    state = program.init(params=start)
    for value in losses:
        state, metrics = program.step(state, DATA)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
        program.update(start, state),
        end,
    )
    assert program.violations() == []


class DropoutNet(nnx.Module):
    """Shards by a mesh of the user's own, if it is given one."""

    def __init__(self, mesh, rngs):
        self.mesh = mesh
        init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), sharding=(None, "model"), mesh=mesh
        )
        self.up = nnx.Linear(8, 16, use_bias=False, kernel_init=init, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        h = self.drop(jnp.tanh(self.up(x)))
        if self.mesh is None:
            return h
        return with_sharding_constraint(h, NamedSharding(self.mesh, P("data", "model")))


def test_constraints_over_a_mesh_of_the_users_own():
    users = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("data", "model"))
    data = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}

    def loss(net, batch):
        return jnp.square(net(batch["x"]) - 1).mean()

    metrics, constraints = [], []
    for mesh in (users, None):
        model = meshpar.from_nnx(functools.partial(DropoutNet, mesh), loss)
        layout = "data=2,tensor=2,axes.model=tensor"
        program = meshpar.lower(model, optax.adam(0.1), layout, data, devices=FOUR)
        state = program.init(1)
        for _ in range(2):
            state, found = program.step(state, data)
        metrics.append(jax.device_get(found))
        text = program.lowered.as_text()
        constraints.append(text.count("sharding_constraint"))
    for name, x in metrics[0].items():
        np.testing.assert_allclose(x, metrics[1][name], rtol=1e-5)
    assert constraints[0] > constraints[1]


@pytest.mark.parametrize(
    ("items", "spec", "message"),
    [
        ("axes.pt=tensor,params.tp=tensor", None, "axes.pt: the model has no mesh axi"),
        ("axes.tp=tenser", None, "no such mesh axis.*did you mean 'tensor'"),
        ("axes.fsdp=tensor", None, "fsdp is an axis of every.*axes.fsdp=fsdp.tensor"),
        (
            "params.tp=tensor",
            P(None, None, "pt"),
            "no mesh axis is called 'pt'.*the layout has fsdp=4, tensor=2"
            ".*axis_names=.AXIS: 'pt'.*axes.pt=AXIS",
        ),
    ],
)
def test_names_of_axes_that_fit_nothing_are_refused(items, spec, message):
    def change(x):
        return x if spec is None else with_sharding_constraint(x, spec)

    with pytest.raises(LayoutError, match=message):
        lowered(Shardings(tensor="tp"), f"fsdp=4,tensor=2,{items}", change)


def test_several_axes_may_have_one_name():
    layout = "data=2,fsdp=2,tensor=2,axes.tp=tensor,axes.dp=data+fsdp"
    names = {"fsdp": "dp", "tensor": ("tp",), "data": "dp"}
    axes = meshpar.layouts.parse(layout).axes
    assert dict(axes) == as_axes(names)
