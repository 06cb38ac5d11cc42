"""Dim names in Flax's own functions count as those of `constrain`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import partitioning, with_logical_constraint
from jax.sharding import PartitionSpec

import meshpar
from meshpar.errors import LayoutError
from meshpar.mesh.mesh import make_mesh
from meshpar.models.model_scope import model_scope

LAYOUT = "data=2,fsdp=2,tensor=2"
DATA = {"x": np.ones((8, 8), np.float32)}


def logical_axes(h, names):
    return jax.lax.with_sharding_constraint(h, nn.logical_to_mesh_axes(names))


FUNCTIONS = [
    with_logical_constraint,
    nn.with_logical_constraint,
    partitioning.with_sharding_constraint,
    logical_axes,
]


def lowered(names, constrain=with_logical_constraint, layout=LAYOUT, width=16):
    class Public(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
            h = jnp.pad(x @ self.param("w", init, (8, 16)), ((0, 0), (0, width - 16)))
            return constrain(h, names).mean()

    public = meshpar.from_linen(
        Public(),
        lambda apply, batch: apply(batch["x"]),
        jax.ShapeDtypeStruct((8, 8), "float32"),
    )
    return meshpar.lower(public, optax.sgd(1.0), layout, DATA)


@pytest.mark.parametrize("constrain", FUNCTIONS[:3])
@pytest.mark.parametrize("kind", [tuple, lambda names: PartitionSpec(*names)])
def test_an_unknown_name_is_refused_with_the_near_ones(constrain, kind):
    with pytest.raises(LayoutError, match="'mlq'.*did you mean 'mlp'.*activations.mlq"):
        lowered(kind(("batch", "mlq")), constrain)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_names_are_recorded_and_shard_the_activation(function):
    layout = meshpar.layouts.parse(LAYOUT)
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh), model_scope(layout, mesh) as scope:
        h = jax.jit(lambda h: function(h, ("batch", "mlp")))(jnp.ones((8, 16)))
    assert scope.names_used == {"batch", "mlp"}
    assert h.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")


def test_a_rule_for_a_name_that_only_flax_sees_is_used():
    layout = LAYOUT + ",activations.features=tensor"
    assert lowered(("batch", "features"), layout=layout).layout.activations
    with pytest.raises(LayoutError, match="activations.features matches no dim"):
        lowered(("batch", "mlp"), layout=layout)


def test_two_dims_on_one_axis_are_refused():
    with pytest.raises(LayoutError, match="two dims on axis 'tensor'.*heads=none"):
        lowered(("heads", "mlp"))


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(
        LayoutError,
        match=r"\[8, 17\].*17 does not divide over tensor=2"
        ".*activations.mlp=none",
    ):
        lowered(("batch", "mlp"), width=17)
    lowered(("batch", "mlp"), width=17, layout=LAYOUT + ",activations.mlp=none")


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_names_of_parameters_are_no_names_of_activations(box):
    """Attention makes its kernels flat, and constrains them by their three names."""
    kernel = nn.initializers.ones
    attention = nn.MultiHeadDotProductAttention(
        num_heads=2,
        use_bias=False,
        kernel_init=box(kernel, ("embed", "groups", "kv")),
        out_kernel_init=box(kernel, ("groups", "kv", "embed")),
    )
    model = meshpar.from_linen(
        attention,
        lambda apply, batch: apply(batch["x"][:, None]).mean(),
        jnp.ones((8, 1, 8)),
    )
    layout = "data=2,fsdp=2,tensor=2,params.groups=tensor"
    program = meshpar.lower(model, optax.sgd(1.0), layout, DATA)
    assert program.plan.specs["query/kernel"] == PartitionSpec("fsdp", "tensor", None)
    assert float(program.step(program.init(0), DATA)[1]["loss"]) == 64.0


def test_boxes_constrain_outside_a_layout():
    mesh = make_mesh(meshpar.layouts.parse(LAYOUT))
    box = nn.LogicallyPartitioned(jnp.ones((8, 8)), ("embed", None))
    with jax.set_mesh(mesh), nn.logical_axis_rules([("embed", "fsdp")]):
        assert jax.jit(lambda: box.unbox())().sharding.spec == PartitionSpec("fsdp")


def test_names_inside_shard_map_split_what_is_left_to_the_compiler():
    """A layered model sees shards of the batch: `batch` names a manual dim there."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            def linear(rngs):
                dims = {"out_sharding": ("embed", "mlp")}
                return nnx.Linear(8, 8, use_bias=False, kernel_metadata=dims, rngs=rngs)

            stacked = nnx.vmap(
                linear, transform_metadata={nnx.PARTITION_NAME: "layers"}
            )
            self.layers = stacked(rngs.split(2))

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=lambda linear, x: with_logical_constraint(linear(x), ("batch", "mlp")),
        head_loss=lambda net, x, batch: (x**2).mean(),
    )
    model, losses = meshpar.from_nnx(Net, stack), []
    for layout in ("data=1,allow=idle_devices", LAYOUT):
        program = meshpar.lower(model, optax.sgd(1.0), layout, DATA)
        losses.append(float(program.step(program.init(0), DATA)[1]["loss"]))
        assert program.lowering.name == "shard_map"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
