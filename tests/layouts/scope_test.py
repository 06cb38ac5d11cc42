"""Activations and layers follow the layout that a model is traced under."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.mesh.mesh import make_mesh


def test_constrain_and_remat_outside_a_layout_do_nothing():
    x = jnp.ones((2, 3))
    assert layouts.constrain(x, "anything", "at all") is x
    assert layouts.remat(abs) is abs


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constrain_shards_over_automatic_and_explicit_axes(kind):
    layout = layouts.parse("data=2,fsdp=2,tensor=2")
    mesh = make_mesh(layout, axis_type=kind)

    @jax.jit
    def f(x_BLF):
        with layouts.use(layout, mesh):
            return layouts.constrain(2 * x_BLF, "batch", "length", "mlp")

    with jax.set_mesh(mesh):
        y_BLF = f(jnp.ones((8, 4, 6)))
    assert y_BLF.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert (y_BLF == 2).all()


@pytest.mark.parametrize(
    "shape, names, words",
    [
        ((8, 4), ("batch",), ["1 names for 2 dims"]),
        ((8, 4), ("batch", "lenght"), ["did you mean 'length'"]),
        ((6, 4), ("batch", "length"), ["batch=6 does not divide over data*fsdp=4"]),
        (
            (8, 4),
            ("mlp", "heads"),
            ["two dims on axis 'tensor'", "activations.mlp=none"],
        ),
    ],
)
def test_constrain_errors(shape, names, words):
    layout = layouts.parse("data=2,fsdp=2,tensor=2")
    with layouts.use(layout, make_mesh(layout)):
        with pytest.raises(LayoutError) as error:
            layouts.constrain(jnp.ones(shape), *names)
    for word in words:
        assert word in str(error.value)


def test_two_dims_on_one_axis_are_refused_where_the_axis_is_manual():
    layout = layouts.parse("fsdp=2,tensor=4,activations.mlp=fsdp")
    with layouts.use(layout, make_mesh(layout), manual_axes=("fsdp",)):
        with pytest.raises(LayoutError, match="two dims on axis 'fsdp'"):
            layouts.constrain(jnp.ones((8, 4)), "batch", "mlp")


def test_names_used_in_a_scope_are_those_of_the_scope_around_it():
    layout = layouts.parse("fsdp=8")
    mesh = make_mesh(layout)
    with layouts.use(layout, mesh) as outer:
        with layouts.use(layout, mesh, manual_axes=("fsdp",)):
            layouts.constrain(jnp.ones((8, 4)), "batch", "mlp")
            layouts.remat(abs)
    assert outer.names_used == {"batch", "mlp"} and outer.remat_used


def test_jitted_functions_inside_a_model_follow_each_layout():
    inner = jax.jit(lambda x_BLF: layouts.constrain(x_BLF, "batch", "length", "mlp"))
    specs = []
    for text in ("data=4,tensor=2", "data=4,tensor=2,activations.mlp=none"):
        layout = layouts.parse(text)
        mesh = make_mesh(layout)

        def f(x_BLF, layout=layout, mesh=mesh):
            with layouts.use(layout, mesh) as scope:
                y_BLF = inner(x_BLF)
            assert scope.names_used == {"batch", "length", "mlp"}
            return y_BLF

        specs.append(jax.jit(f)(jnp.ones((8, 4, 6))).sharding.spec)
    assert specs == [PartitionSpec("data", None, "tensor"), PartitionSpec("data")]
