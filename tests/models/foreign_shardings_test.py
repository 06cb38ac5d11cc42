"""Models that state PartitionSpecs themselves run, or are refused with a remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import meshpar
from meshpar.errors import LayoutError

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


@pytest.mark.parametrize("layout", ["data=8", "fsdp=4,tensor=2"])
def test_out_sharding_of_a_matmul_is_refused(layout):
    config = Shardings(act_btf=P("fsdp", None, "tensor"))
    with pytest.raises(LayoutError, match="dot_general.*Explicit.*layouts.constrain"):
        lowered(config, layout)


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


def test_a_constraint_over_axes_of_shard_map_is_refused():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = rngs.params.normal((2, 4, 4))
            self.layers = nnx.Dict(
                w=nnx.Param(init, out_sharding=("layers", None, None))
            )

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["tokens"].astype(jnp.float32),
        layer=lambda layer, x: with_sharding_constraint(x @ layer.w[...], P("data")),
        head_loss=lambda net, x, batch: (x**2).mean(),
    )
    model = meshpar.from_nnx(Net, stack)
    with pytest.raises(LayoutError, match="shard_map splits that axis.*lowering=jit"):
        meshpar.lower(model, optax.sgd(1.0), "data=8", DATA)
    program = meshpar.lower(model, optax.sgd(1.0), "data=8", DATA, lowering="jit")
    assert program.contract.terms
