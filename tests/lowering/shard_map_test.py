"""The shard_map lowering: what it moves and keeps; its layouts are in matrix_test."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.equality import first_step
from support.marks import slow
from support.tiny_models import batch, host, lower, model, relative_error

import meshpar
from meshpar import compat, layouts
from meshpar.collectives import transport
from meshpar.errors import LayoutError
from meshpar.fsdp import buckets, sharding
from meshpar.jaxprs.walk import equations
from meshpar.lowering import frame
from meshpar.lowering.shard_map import ShardMapLowering

TINY = model(depth=3)


@pytest.mark.parametrize(
    "shape, gathers_around_rings, kinds",
    [
        slow((2, 2), False, {"all_gather", "permute"}),
        ((4,), True, {"permute"}),
    ],
)
def test_around_rings_gradients_are_the_same(
    monkeypatch, shape, gathers_around_rings, kinds
):
    """Transports as on TPUs, where the steps of a ring overlap with compute."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    monkeypatch.setattr(transport, "LARGE_BYTES", 16)
    layout = "data=2,fsdp=4,prefetch=attention/q"
    want = lower(layout, TINY)
    _, gradients = one_device()
    rings = transport.Rings({"fsdp": shape})
    transports = transport.Transports(
        weights=rings if gathers_around_rings else transport.ONE_SHOT,
        prefetched=rings,
        gradients=rings,
        once=dataclasses.replace(rings, loop=True),
        widens=True,
    )
    monkeypatch.setattr(frame, "transports_for", lambda *_: transports)
    program = lower(layout, TINY)
    assert program.lowering.zero.reduces_by_parts
    assert not lower("fsdp=4,tensor=2", TINY).lowering.zero.reduces_by_parts
    _, by_rings = program.gradients(program.init(0), batch())
    assert relative_error(host(by_rings), host(gradients)) < 1e-5
    # Loops of rings, which CPUs mix up, are for TPUs.
    assert [x for x in program.violations() if "CPUs mix" not in x] == []
    depth = TINY.layered.depth
    layered = {c.kind for c in program.collectives if c.executions % depth == 0}
    assert layered == kinds
    if shape == (4,):  # Outside the layers the three steps of a ring are a loop.
        once = [c.kind for c in program.collectives if c.executions == 1]
        prefetches = 2 * 3  # The first layer of both passes, in three steps each.
        assert once.count("permute") == prefetches
    assert program.contract.wire_bytes == pytest.approx(want.contract.wire_bytes)


def test_on_cpus_collectives_outside_loops_wait_for_those_inside(monkeypatch):
    """Compilers for CPUs let them mix where no dependency says their order."""
    assert lower("fsdp=4,zero=1", TINY).violations() == []
    transports = transport.Transports(widens=True)
    monkeypatch.setattr(frame, "transports_for", lambda *_: transports)
    (line, *_) = lower("fsdp=4,zero=1", TINY).violations()
    assert line.startswith("reduce_scatter") and "CPUs mix them up" in line


@pytest.mark.parametrize(
    "layout", [slow("pipe=2,fsdp=2,microbatches=2,vocab=pipe"), "fsdp=2,tensor=2"]
)
def test_loops_over_blocks_of_the_loss_run_in_turn(layout):
    program = lower(layout, model(depth=4, kv_heads=2, loss_block=4))
    assert program.violations() == []


@pytest.mark.parametrize("layout", ["fsdp=4", slow("fsdp=2,remat=full,microbatches=2")])
def test_weights_gathered_one_layer_ahead_are_declared(layout):
    program = lower(f"{layout},prefetch=attention/[qkv]$,prefetch=mlp", TINY)
    assert len(program.lowering.zero.prefetched) > 4
    early = [term for term in program.contract.terms if "one layer ahead" in term.why]
    assert {term.kind for term in early} == {"all_gather"}
    # Every pass gathers once more than there are layers.
    assert all(term.count % (TINY.layered.depth + 1) == 0 for term in early)


@pytest.mark.parametrize(
    "layout, lowering, words",
    [
        ("fsdp=2,prefetch=nothing", "", "prefetch=nothing matches no sharded .*mlp"),
        (
            "fsdp=2,zero=2,prefetch=mlp",
            "",
            "mlp with fsdp=2,zero=2: .*only zero=3",
        ),
        ("fsdp=2,prefetch=mlp", "jit", "prefetch=mlp: .*the compiler runs"),
    ],
)
def test_a_prefetch_that_cannot_be_is_refused(layout, lowering, words):
    with pytest.raises(LayoutError, match=words):
        lower(layout, TINY, lowering=lowering)


def test_zero_3_keeps_no_gathered_weight():
    """One more layer takes less memory than its whole weights, without remat."""
    sizes = dict(embed=256, heads=4, kv_heads=4, mlp=1024)
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    memory = []
    for depth in (2, 6):
        program = lower("fsdp=8", model(depth=depth, **sizes))
        memory.append(program.compiled.memory_analysis().temp_size_in_bytes)
    growth = (memory[1] - memory[0]) / 4
    # A layer adds two copies of its shard's gradient, and its activations.
    assert growth < layer / 2


@pytest.mark.parametrize("layout", [slow("data=2"), "tensor=2,layers=fsdp"])
def test_with_microbatches_no_loop_gives_a_stack_of_gradients(layout):
    """It has the shapes of the weights; the sums are carried from round to round."""

    def stacks(layout):
        program = lower(layout, TINY)
        leaves = (
            program.plan.parameters[path]
            for path in ("blocks/mlp/up", "blocks/attention/q")
        )
        shapes = {x.sharding(program.mesh).shard_shape(x.shape) for x in leaves}
        loops = (
            eqn
            for eqn in equations(program.inspection.traced.jaxpr.jaxpr)
            if eqn.primitive.name == "scan"
        )
        given = (v for eqn in loops for v in eqn.outvars[compat.scan_counts(eqn)[1] :])
        return shapes.intersection(v.aval.shape for v in given)

    assert len(stacks(layout)) == 2
    assert not stacks(f"{layout},microbatches=2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [slow("fsdp=4,zero=1"), "fsdp=2,tensor=2,zero=2"])
def test_bfloat16_at_every_level_of_zero(layout):
    program = lower(layout, TINY, compute_dtype=jnp.bfloat16)
    _, gradients = first_step(program, batch())
    _, want = one_device()
    error = relative_error(gradients, host(want))
    assert 1e-4 < error < 3e-2
    assert program.violations() == []


@functools.cache
def one_device():
    alone = lower("data=1", TINY)
    return alone.gradients(alone.init(0), batch())


class Stack(nnx.Module):
    """Three residual layers with noise, after an embedding by a matrix."""

    def __init__(self, rngs):
        self.inside = nnx.Param(rngs.params.normal((4, 8)), out_sharding=(None, "mlp"))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((8, 8)), out_sharding=("embed", None))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(x @ self.w[...]))


def masked_mean(stack, x, batch):
    error = batch["mask"] * (x.sum(-1) - batch["y"]) ** 2
    count = batch["mask"].sum()
    error = error / jnp.maximum(count, 1e-6)
    return error.sum(), {"weight": count, "error": error.sum()}


STAGES = meshpar.LayerStack(
    stack="layers",
    embed=lambda stack, batch: batch["x"] @ stack.inside[...],
    layer=lambda layer, x: layer(x),
    head_loss=masked_mean,
)


@pytest.mark.parametrize(
    "layout", [slow("fsdp=4"), "data=2,fsdp=2,zero=1,microbatches=2"]
)
def test_shards_weigh_by_their_weight_and_draw_their_own_noise(layout):
    """Masks that differ between shards, and dropout, give the values of one device."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(8, 4)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
        "mask": np.array([1, 0, 1, 1, 1, 0, 1, 0.5], np.float32),
    }
    stack, results = meshpar.from_nnx(Stack, STAGES), []
    for text in ("data=1", layout):
        n = layouts.parse(text).num_devices
        program = meshpar.lower(
            stack, optax.sgd(0.1), text, data, devices=jax.devices()[:n]
        )
        results.append(host(program.gradients(program.init(0), data)))
    (want_metrics, want), (metrics, gradients) = results
    assert metrics.keys() == {"loss", "error", "weight"}
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5)
    assert relative_error(gradients, want) < 1e-5


@pytest.mark.parametrize(
    "layout, words",
    [
        slow("fsdp=2,activations.batch=none", "moves the batch axes"),
        ("fsdp=2,params.layers=fsdp,params.embed=none", "splits the stack"),
    ],
)
def test_layouts_that_it_cannot_lower_go_to_jit_unless_asked_for(layout, words):
    with pytest.raises(LayoutError, match=f"{words}.*use lowering=jit"):
        lower(layout, model(depth=2), lowering="shard_map")
    assert not isinstance(lower(layout, model(depth=2)).lowering, ShardMapLowering)


def test_batch_axes_have_to_stand_before_tensor_in_a_rule():
    layout = "fsdp=2,tensor=2,params.embed=none,params.mlp=tensor+fsdp"
    with pytest.raises(LayoutError, match="data and fsdp before tensor"):
        lower(layout, TINY)


def test_activations_of_a_layer_stay_off_the_batch_axes():
    words = "activations.length=fsdp: the rule moves the batch axes"
    with pytest.raises(LayoutError, match=words):
        lower("fsdp=2,activations.length=fsdp", TINY, lowering="shard_map")


def test_models_without_layers_go_to_the_compiler():
    plain = dataclasses.replace(TINY, layered=None)
    with pytest.raises(LayoutError, match="no layered form.*meshpar.LayerStack"):
        lower("fsdp=2,tensor=2", plain, lowering="shard_map")
    assert lower("fsdp=2", plain).lowering.name == "jit"
    with pytest.raises(LayoutError, match="lowering='shard' .*shard_map"):
        lower("fsdp=2", plain, lowering="shard")


@pytest.mark.parametrize(
    "stages, words",
    [
        (dataclasses.replace(STAGES, stack="layer"), "no attribute 'layer'.*layers"),
        (dataclasses.replace(STAGES, stack="layers.dropout"), "number of layers"),
    ],
)
def test_stages_that_do_not_fit_are_an_error(stages, words):
    with pytest.raises(ValueError, match=words):
        meshpar.from_nnx(Stack, stages)


def test_a_bucket_holds_tensors_of_one_kind_up_to_its_size():
    plain = sharding.ManualSharding(((0, ("fsdp",)),), (), jax.sharding.PartitionSpec())
    over_tensor = dataclasses.replace(
        plain, automatic=jax.sharding.PartitionSpec("tensor")
    )
    quarter = buckets.BUCKET_BYTES // 4
    sizes = {"a": 8, "b": quarter, "c": quarter - 4, "d": 16, "e": 8}
    tree = {k: jax.ShapeDtypeStruct((n // 4,), jnp.float32) for k, n in sizes.items()}
    shardings = dict.fromkeys(tree, plain) | {"d": over_tensor}
    assert [*buckets.make_buckets(tree, shardings, 1)] == [
        ["b"],
        ["a", "c", "e"],
        ["d"],
    ]
    # Whole tensors are eight times larger, so that c moves alone, too.
    assert [*buckets.make_buckets(tree, shardings, 8)] == [
        ["b"],
        ["c"],
        ["a", "e"],
        ["d"],
    ]
    many = {str(i): tree["c"] for i in range(5)}
    same = dict.fromkeys(many, plain)
    assert [*buckets.make_buckets(many, same, 1)] == [["0", "1", "2", "3"], ["4"]]
