"""Programs compiled for machines that are not present, with their real compilers."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.marks import slow
from support.tpu_programs import small, tpu

import meshpar
from experiments import recipes
from meshpar import collectives, compat, layouts, mesh
from meshpar.arrays import rounded
from meshpar.contracts import hlo
from meshpar.errors import MeshparError
from meshpar.local_sgd import contract
from meshpar.mesh import compiler, torus
from meshpar.runs.config import with_settings


@pytest.mark.slow
@tpu
@pytest.mark.parametrize(
    "layout, topology, rows, least, most",
    [
        ("data=8", "v5e:2x4", 32, 2.0, 2.0),
        ("fsdp=8,zero=1", "v5e:2x4", 32, 2.0, 2.0),
        ("fsdp=8,zero=2", "v5e:2x4", 32, 2.0, 2.0),
        ("fsdp=8,prefetch=attention/q,remat=full", "v5e:2x4", 32, 2.7, 3.0),
        ("fsdp=8,remat=dots", "v5p:2x2x2", 8, 2.7, 3.0),
        ("fsdp=8,remat=full", "v5p:2x2x2", 8, 2.7, 3.0),
        ("data=2,fsdp=4,remat=full", "2*v5e:2x2", 32, 2.5, 3.2),
        ("fsdp=4,tensor=2,remat=full", "v5e:2x4", 32, 0, 99),
    ],
)
def test_tpu_programs_keep_the_contract(layout, topology, rows, least, most):
    """Bytes on the wire, in payloads of all parameters times (n-1)/n, bfloat16."""
    program = small(batch_size=rows).make_program(
        meshpar.layouts.parse(layout), mesh.topology(topology)
    )
    assert program.violations() == []
    payload = 2 * sum(p.size for p in program.model.params.values()) * 7 / 8
    moved = sum(c.wire_bytes for c in program.collectives) / payload
    assert least - 0.01 <= moved <= most + 0.01
    if "fsdp=8,remat" in layout or "prefetch" in layout:
        hidden = [c for c in program.collectives if c.overlapped]
        assert sum(c.wire_bytes for c in hidden) > 2 * payload
        # Only chips that gather beside compute do so in one collective.
        gathered = [c for c in hidden if c.kind == "all_gather"]
        assert bool(gathered) == ("v5e" in topology)
        # Splash attention: forward, forward again unless it is kept, and backward.
        text = program.compiled.as_text()
        kernels = text.count('"tpu_custom_call"')
        assert kernels == (2 if "remat=dots" in layout else 3)
        # No stack of master weights is turned, as those of heads would be on v5p.
        assert not re.findall(r"= f32\[3,[\d,]*\]\S* copy\(%param\.", text)


@tpu
def test_small_weights_are_gathered_and_not_reduced():
    """The compiler gathers whole lanes of flat arrays; others it all-reduces."""
    sizes = dict(vocab=64, length=32, depth=2, embed=36, kv_heads=2, heads=2, mlp=88)
    config = with_settings(small(), [f"model.{k}={x}" for k, x in sizes.items()])
    layout = meshpar.layouts.parse("fsdp=4,min_shard_size=1")
    program = config.make_program(layout, mesh.topology("v5e:2x2"))
    assert program.violations() == []
    kinds = {c.kind for c in program.collectives if c.wire_bytes > 1000}
    assert "all_gather" in kinds and "all_reduce" not in kinds


@pytest.mark.slow
@tpu
@pytest.mark.parametrize("topology", ["v5e:2x4", slow("v5p:2x2x2")])
def test_tpu_programs_hide_what_tensor_moves(topology):
    program = small().make_program(
        meshpar.layouts.parse("fsdp=2,tensor=4,remat=full"),
        mesh.topology(topology),
    )
    assert program.violations() == []
    over_tensor = [c for c in program.collectives if c.axes == ("tensor",)]
    steps = [c for c in over_tensor if c.kind == "permute"]
    assert all(c.asynchronous for c in steps)
    depth = program.model.layered.depth  # 4 rings forward, and 7 backward.
    # On v5p wholes come around the rings of a torus of 2 x 2 chips.
    wholes = 0 if "v5e" in topology else 2 * 2
    words = "of the embedding", "of the head"
    outside = sum(
        term.count
        for term in program.contract.terms
        if term.kind == "permute" and any(word in term.why for word in words)
    )
    assert sum(c.executions for c in steps) == depth * (11 * 3 + wholes) + outside
    exposed = sum(c.wire_bytes for c in over_tensor if not c.overlapped)
    assert exposed < 0.4 * sum(c.wire_bytes for c in over_tensor)


@pytest.mark.slow
@tpu
@pytest.mark.parametrize("routing", ["capacity", "dropless"])
def test_tpu_mixtures_keep_the_contract(routing):
    """Dense weights are sharded over both axes; the bytes of tokens are declared."""
    settings = ["model.num_experts=4", f"model.routing={routing}", "model.mlp=512"]
    layout = "fsdp=4,expert=2,params.embed=fsdp+expert,remat=full"
    program = with_settings(small(), settings).make_program(
        meshpar.layouts.parse(layout),
        mesh.topology("v5p:2x2x2"),
    )
    assert program.violations() == []
    specs = program.plan.specs
    (dense,) = (spec for path, spec in specs.items() if path.endswith("attention/q"))
    assert dense[1] == ("fsdp", "expert")
    over_expert = [c for c in program.collectives if c.axes == ("expert",)]
    kinds = {"all_to_all"} if routing == "capacity" else {"permute"}
    assert kinds <= {c.kind for c in over_expert}


@pytest.mark.slow
@tpu
def test_gradients_of_one_shape_and_two_splits_stay_where_they_are():
    """The compiler sent their scale, one number, from one split to the other."""
    config = with_settings(small(), ["model.mlp=512"])  # As wide as the activations.
    layout = meshpar.layouts.parse("data=2,tensor=4,microbatches=4,remat=full")
    program = config.make_program(layout, mesh.topology("v5p:2x2x2"))
    assert program.violations() == []


@pytest.mark.slow
@tpu
def test_tpu_programs_sum_over_rows_of_tensor_in_each_microbatch():
    program = with_settings(small(), ["model.depth=32"]).make_program(
        meshpar.layouts.parse("data=2,tensor=4,microbatches=4,remat=full,layers=fsdp"),
        mesh.topology("v5p:2x2x2"),
    )
    assert program.violations() == []


@pytest.mark.slow
@tpu
def test_tpu_pipelines_run_no_operation_of_a_single_tick_twice():
    settings = ["model.num_experts=8", "model.routing=dropless", "model.depth=4"]
    layout = "pipe=2,expert=4,microbatches=2,schedule=zb_h1,remat=experts"
    program = with_settings(small(), settings).make_program(
        meshpar.layouts.parse(layout), mesh.topology("v6e:2x4")
    )
    assert program.violations() == []


@tpu
def test_rings_follow_the_chips_and_send_asynchronously():
    """On 32 chips of v5e a permute that jumps back along a line would run alone."""
    chips = mesh.make_mesh(layouts.parse("fsdp=32"), mesh.topology("v5e:4x8"))
    shape = torus.ring_shape(chips, "fsdp")
    assert shape == (8, 4)

    def body(w_DF, x_BD, y_DF):
        w_DF = collectives.torus_all_gather(w_DF, "fsdp", shape)
        y_DF = collectives.torus_reduce_scatter(y_DF, "fsdp", shape)
        return w_DF, x_BD @ x_BD, y_DF

    spec = PartitionSpec("fsdp")
    x = jax.ShapeDtypeStruct(
        (32 * 1024, 1024), jnp.bfloat16, sharding=NamedSharding(chips, spec)
    )
    mapped = jax.shard_map(body, mesh=chips, in_specs=spec, out_specs=spec)
    text = jax.jit(mapped).lower(x, x, x).compile().as_text()
    sent = hlo.parse_hlo(text, dict(chips.shape))
    assert {c.kind for c in sent} == {"permute"}
    assert len(sent) == 2 * (7 + 3)
    assert all(c.asynchronous for c in sent)


@tpu
def test_a_cast_of_each_layer_stays_in_the_loop():
    """Without `rounded` the compiler casts the whole stack before the loop."""
    chips = mesh.make_mesh(layouts.parse("fsdp=4"), mesh.topology("v5p:2x2x1"))

    def run(w_layers_DD, x_BD):
        def layer(x_BD, i):
            w_DD = rounded(
                jax.lax.dynamic_index_in_dim(w_layers_DD, i, 0, False), jnp.bfloat16
            )
            w_DD = jax.lax.all_gather(w_DD.astype(jnp.bfloat16), "fsdp", tiled=True)
            return jnp.tanh(x_BD @ w_DD), None

        return jax.lax.scan(layer, x_BD, jnp.arange(8))[0]

    shards = PartitionSpec(None, "fsdp")
    specs = shards, PartitionSpec("fsdp")
    shapes = ((8, 2048, 2048), jnp.float32), ((1024, 2048), jnp.bfloat16)
    args = [
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(chips, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(run, mesh=chips, in_specs=specs, out_specs=specs[1])
    text = jax.jit(mapped).lower(*args).compile().as_text()
    assert "f32[8,512,2048]" in text and "bf16[8,512,2048]" not in text


@tpu
def test_permutes_of_many_chips_are_not_written_out_pair_by_pair():
    def body(x_BD):
        return collectives.torus_reduce_scatter(x_BD, "fsdp", shape, loop=True)

    chips = mesh.make_mesh(layouts.parse("fsdp=256"), mesh.topology("v5e:16x16"))
    shape, spec = torus.ring_shape(chips, "fsdp"), PartitionSpec("fsdp")
    x = jax.ShapeDtypeStruct(
        (256 * 256, 128), jnp.bfloat16, sharding=NamedSharding(chips, spec)
    )
    mapped = jax.shard_map(body, mesh=chips, in_specs=spec, out_specs=spec)
    options = compiler.compiler_options(chips)
    code = [
        jax.jit(mapped, compiler_options=chosen).lower(x).compile().memory_analysis()
        for chosen in (None, options)
    ]
    written_out, looked_up = (stats.generated_code_size_in_bytes for stats in code)
    assert looked_up < 0.7 * written_out
    few = mesh.make_mesh(layouts.parse("fsdp=8"), mesh.topology("v5e:2x4"))
    assert compiler.compiler_options(few) is None


@pytest.mark.slow
@tpu
@pytest.mark.parametrize("schedule", [slow("1f1b"), "interleaved,virtual_stages=2"])
def test_tpu_pipelines_hide_their_sends_in_constant_memory(schedule):
    """Eight microbatches and 32: the same temporary bytes, within 1%."""
    sizes = []
    for num in (8, 32):
        config = with_settings(small(), [f"batch_size={2 * num}", "model.depth=8"])
        layout = f"pipe=4,data=2,microbatches={num},remat=full,schedule={schedule}"
        program = config.make_program(
            meshpar.layouts.parse(layout), mesh.topology("v5e:2x4")
        )
        sizes.append(program.compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert program.violations() == []
    sends = [c for c in program.collectives if c.kind == "permute"]
    assert {c.axes for c in sends} == {("pipe",)}
    steady = [c for c in sends if c.executions > 16]
    assert len(steady) == 2 and all(c.overlapped for c in steady)


@pytest.mark.slow
@tpu
def test_tpu_synchronizations_hide_behind_the_layers():
    """Between two slices; both ways start before the layers and end after them."""
    mode = meshpar.LocalSGD(
        32, staleness=4, outer=optax.sgd(0.4, 0.9, nesterov=True), wire="int8"
    )
    config = small()
    program = meshpar.lower(
        config.make_model(),
        optax.adamw(1e-3),
        "replica=2,fsdp=4",
        {k: jnp.zeros((32, 256), jnp.int32) for k in ("tokens", "targets")},
        devices=mesh.topology("2*v5e:2x2"),
        compute_dtype=jnp.bfloat16,
        mode=mode,
    )
    kinds = program.steps.exchange.transfer_kinds
    middle = next(t for t in kinds if None not in (t.scatter, t.gather))
    text = program.step_program(middle).as_text()
    sent = hlo.parse_hlo(text, dict(program.mesh.shape))
    parts = program.programs, program.contract, middle
    assert contract.contract_beside(*parts).violations(sent) == []
    across = [c for c in sent if "replica" in c.axes]
    assert {c.kind for c in across} == {"all_to_all", "all_gather"}
    assert all(c.overlapped for c in across)
    entry = text[text.index("ENTRY") :].splitlines()

    def places(pattern):
        return [n for n, line in enumerate(entry) if re.search(pattern, line)]

    forward = places(r" while\(.*jvp\(\)/while")[0]
    backward = places(r" while\(.*transpose\(jvp\(\)\)/while")[0]
    sends, ends = places(r" send\("), places(r" recv-done\(")
    assert len(sends) == len(ends) == 2
    assert max(sends) < min(forward, backward)
    assert min(ends) > max(forward, backward)


@pytest.mark.slow
@tpu
@pytest.mark.parametrize(
    "recipe, topology, layout, batch",
    [
        ("gpt2-124m", "v5e:2x4", "fsdp=8,remat=full", 16),
        ("llama-1b", "v5e:2x4", "fsdp=8,remat=full", 8),
        ("llama2-7b", "v5e:4x4", "fsdp=16,remat=full", 16),
    ],
)
def test_predicted_memory_is_near_the_tpu_compilers(recipe, topology, layout, batch):
    config = dataclasses.replace(recipes.get(recipe), batch_size=batch)
    program = config.make_program(
        meshpar.layouts.parse(layout), mesh.topology(topology)
    )
    predicted = program.lowering.memory(program.abstract_batch)
    peak = program.compiled.memory_analysis().peak_memory_in_bytes
    assert predicted.total == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    "text, words",
    [
        ("v5e", "write one such as v4:4x4"),
        ("v9:4x4", "write one such as"),
        ("h100:0", "write one such as.*h100:8"),
        ("v5e:4xx4", "topology='v5e:4xx4'"),
    ],
)
def test_unknown_topologies_are_an_error(text, words):
    with pytest.raises(MeshparError, match=words):
        mesh.topology(text)


@tpu
def test_shapes_that_do_not_exist_are_an_error():
    with pytest.raises(MeshparError, match="shape must be one that exists"):
        mesh.topology("v5e:3x5")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason='the GPU compiler comes with pip install -e ".[aot-gpu]"',
)
def test_gpu_programs_keep_the_contract():
    program = meshpar.lower(
        small().make_model(),
        optax.adamw(1e-3),
        "fsdp=4,tensor=2",
        {k: jnp.zeros((32, 256), jnp.int32) for k in ("tokens", "targets")},
        devices=mesh.topology("h100:8"),
        compute_dtype=jnp.bfloat16,
    )
    assert program.violations() == []
    assert all(c.axes for c in program.collectives)
    text = program.compiled.as_text()
    assert ("cudnn$fmha" in text) == compat.has_cudnn()
    # No stack of all three layers is turned for the gathers of one.
    assert not re.search(r"= f32\[\d+,3,.* transpose\(", text)
