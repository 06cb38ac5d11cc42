"""`meshpar.check`: forms of steps, reports, comparisons and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import planted_steps
from support.marks import slow

import meshpar
from meshpar import testing
from meshpar.errors import MeshparError
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.topologies import has_compiler

MESH = planted_steps.mesh_of(rows=8)


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def hold(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("rows")))


def loss(params, x, hold=lambda x: x):
    hidden = hold(jnp.tanh(hold(x @ params["in"])))
    return jnp.mean(jnp.square(hold(hidden @ params["out"])))


def update(params, x, hold=lambda x: x):
    grads = jax.grad(loss)(params, x, hold)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def held(params, x):
    return update(params, x, hold)


@pytest.fixture(scope="module")
def arguments():
    draw = np.random.default_rng(0).normal
    params = {
        "in": placed(draw(size=(64, 96)).astype(np.float32), "rows"),
        "out": placed(draw(size=(96, 64)).astype(np.float32), "rows"),
    }
    return params, placed(draw(size=(128, 64)).astype(np.float32), "rows")


@pytest.fixture(scope="module")
def lowered(arguments):
    return jax.jit(held).lower(*arguments)


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


@pytest.fixture(scope="module")
def report(arguments):
    return meshpar.check(jax.jit(held), *arguments)


def moves(report):
    return [(m.kind, m.axes, m.wire_bytes, m.line) for m in report.collectives]


def test_all_forms_of_a_step_tell_the_same(report, lowered, compiled):
    programs = meshpar.check(lowered), meshpar.check(compiled)
    texts = (
        meshpar.check(compiled.as_text(), mesh=MESH),
        meshpar.check(compiled.as_text(), mesh={"rows": 8}),
    )
    leaves = [(x.name, x.shape, x.dims, x.bytes) for x in report.facts.leaves]
    assert leaves[0] == ("params['in']", (64, 96), (("rows",), ()), 64 * 96 // 2)
    for form in (*programs, *texts):
        assert moves(form) == moves(report) != []
        assert [x.bytes for x in form.facts.leaves] == [x[-1] for x in leaves]
    for form in programs:
        found = [(x.name, x.shape, x.dims, x.bytes) for x in form.facts.leaves]
        assert found == leaves
    for form in texts:  # Some versions of jax do not write shardings into it.
        for leaf, wanted in zip(form.facts.leaves, leaves, strict=True):
            if leaf.dims is not None:
                assert (leaf.name, leaf.shape, leaf.dims) == wanted[:3]


def test_the_wire_bytes_are_those_of_the_formula(report):
    weights, (last,) = report.collectives[:-1], report.collectives[-1:]
    assert [m.kind for m in weights] == ["all_gather"] * len(weights)
    assert {m.wire_bytes for m in weights} == {64 * 96 * 4 * 7 / 8}
    assert last.kind == "all_reduce" and last.phase == "backward"
    assert last.wire_bytes == 2 * 2 * 64 * 96 * 4 * 7 / 8


def test_pmap_and_explicit_axes_are_read():
    mapped = jax.pmap(lambda x: jax.lax.psum(x, "copies"), axis_name="copies")
    (move,) = meshpar.check(mapped, jnp.ones((8, 1000))).collectives
    assert (move.kind, move.axes) == ("all_reduce", ("copies",))
    mesh = jax.make_mesh((8,), ("seats",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P(None, "seats")))
    w = jax.device_put(jnp.ones((32, 16)), NamedSharding(mesh, P("seats", None)))
    product = jax.jit(lambda x, w: jnp.dot(x, w, out_sharding=P(None, None)))
    with jax.set_mesh(mesh):
        (move,) = meshpar.check(product, x, w).collectives
    assert (move.kind, move.axes) == ("all_reduce", ("seats",))


def test_a_report_says_findings_first(report):
    text = str(report)
    assert text.startswith("1 finding on 8 cpu devices (rows=8): a device sends ")
    assert "[donation] params['in'] float32[64, 96] and 1 more of params" in text
    assert (
        text.index("[donation]") < text.index("collectives (") < text.index("memory at")
    )
    assert f"{__file__}:" in text
    sizes = [tensor.bytes for tensor in report.memory.tensors]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == report.memory.bytes


@pytest.mark.parametrize(
    "wanted",
    ["donation", "any", "all_gather", "all_gather over rows>1kB", "donation>1"],
)
def test_assert_no_names_what_it_finds(report, wanted):
    with pytest.raises(AssertionError, match=f"{__file__}"):
        report.assert_no("reshard", wanted)


def test_assert_no_passes_without_it(report):
    report.assert_no(
        "reshard", "donation>1GB", "all_to_all", "all_gather over rows>1MB"
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("rehsard", "did you mean 'reshard'"),
        ("all_gather over row", "did you mean 'rows'"),
        ("no gathers", "write 'reshard'"),
    ],
)
def test_assert_no_refuses_what_is_no_rule(report, wanted, message):
    with pytest.raises(MeshparError, match=message):
        report.assert_no(wanted)


def test_a_threshold_hides_small_findings(arguments):
    step = jax.jit(held)
    assert meshpar.check(step, *arguments, threshold=1e6).findings == ()
    (found,) = meshpar.check(step, *arguments, threshold=10).findings
    assert found.rule == "donation"


def test_a_difference_names_what_changed(report, arguments):
    after = meshpar.check(jax.jit(held, donate_argnums=0), *arguments)
    lines = after.diff(report).splitlines()
    assert lines[0].startswith("memory: ") and lines[1].startswith("- [donation]")
    assert report.diff(report) == "no difference"


def test_a_page_has_the_findings(report, tmp_path):
    report.html(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert "params[&#x27;in&#x27;]" in page and "all_gather" in page


def test_a_step_is_equal_to_itself_on_one_device(arguments):
    report = meshpar.check(jax.jit(held), *arguments, against="one device", steps=2)
    assert str(report.equality) == (
        "EQUAL to the same step on one device: 2 steps, 4 tensors"
    )


def test_a_step_is_equal_to_itself_on_another_mesh(arguments):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("rows",))
    report = meshpar.check(jax.jit(held), *arguments, against=mesh)
    assert str(report.equality) == (
        "EQUAL to the same step on {'rows': 2}: 1 steps, 2 tensors"
    )
    other = jax.sharding.Mesh(jax.devices()[:2], ("columns",))
    with pytest.raises(MeshparError, match="give a mesh with the same axes"):
        meshpar.check(jax.jit(held), *arguments, against=other)


def test_a_step_of_nnx_is_read():
    with jax.set_mesh(MESH):
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))

        @nnx.jit
        def step(model, x):
            return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

        report = meshpar.check(step, model, placed(jnp.ones((64, 64)), "rows"))
    (move,) = report.collectives
    assert (move.kind, move.axes, move.phase) == ("all_reduce", ("rows",), "backward")


def test_a_key_has_no_number_as_its_next_value():
    def step(key, x):
        kept = jnp.where(jax.random.uniform(key, x.shape) < 0.5, x, 0)
        return kept, jnp.sum(x > 0, dtype=jnp.int32)

    report = meshpar.check(jax.jit(step), jax.random.key(0), placed(jnp.ones((64, 8))))
    assert "recompilation" not in {x.rule for x in report.all_findings}, report


def test_a_transpose_is_no_backward_pass():
    def step(x):
        return jnp.sin(x.transpose(2, 0, 1)), jnp.sum(x)

    report = meshpar.check(jax.jit(step), placed(jnp.ones((64, 16, 8)), "rows"))
    scopes = report.facts.module.computations.values()
    lines = [x.line for scope in scopes for x in scope.values()]
    assert any(" transpose(" in line for line in lines), lines
    assert {move.phase for move in report.collectives} == {"forward"}


def mapped_step(scale):
    def body(params, x):
        grads = jax.lax.pmean(jax.grad(loss)(params, x), "rows")
        return jax.tree.map(lambda w, g: w - 0.1 * g * scale, params, grads)

    specs = dict(in_specs=(P(), P("rows")), out_specs=P())
    return jax.jit(jax.shard_map(body, mesh=MESH, check_vma=False, **specs))


def test_a_shard_map_is_compared_with_a_function_of_whole_arrays(arguments):
    params, x = arguments
    with pytest.raises(MeshparError, match="give against= a function of whole arrays"):
        meshpar.check(mapped_step(1), params, x, against="one device")
    testing.assert_step(mapped_step(1), params, x, no=(), against=update)
    with pytest.raises(AssertionError, match=r"DIFFERENT .* result\['in'\] at step 1"):
        testing.assert_step(mapped_step(2), params, x, no=(), against=update)


def test_assert_step_limits_the_bytes(arguments):
    with pytest.raises(AssertionError, match="100 bytes are allowed"):
        testing.assert_step(jax.jit(held), *arguments, no=(), most_bytes=100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda a, c: (update, *a), "update is not jitted: give jax.jit"),
        (lambda a, c: (c.as_text(),), "nothing names their axes: give mesh="),
        (lambda a, c: ("module @jit_step {}",), "no compiled program"),
    ],
)
def test_bad_input_is_an_error_with_a_remedy(build, message, arguments, compiled):
    with pytest.raises(MeshparError, match=message):
        meshpar.check(*build(arguments, compiled))


def test_a_mesh_of_another_size_is_an_error(compiled):
    with pytest.raises(MeshparError, match="has 4 devices, and the program runs on 8"):
        meshpar.check(compiled, mesh={"rows": 4})


def test_a_compiled_program_has_its_devices(compiled):
    with pytest.raises(MeshparError, match="topology= needs the step as a function"):
        meshpar.check(compiled, topology="v5e:2x4")


@pytest.mark.skipif(not has_compiler(CHIPS["v5e"]), reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("style", "defect", "rule"),
    [
        slow("jit", "", None),
        ("shard_map", "gather in a loop", "constant_in_loop"),
        slow("shard_map", "wide gather", "float32_wire"),
    ],
)
def test_a_step_is_compiled_for_chips_that_are_not_there(style, defect, rule):
    step, arguments = getattr(planted_steps, f"{style}_step")(defect)
    report = meshpar.check(step, *arguments, topology="v5e:2x4")
    assert report.facts.platform.name == "tpu"
    found = {(x.rule, x.line) for x in report.findings}
    assert (rule, planted_steps.line_of(defect)) in found if rule else found == set()


def test_a_topology_of_another_size_is_an_error(arguments):
    with pytest.raises(MeshparError, match="topology"):
        meshpar.check(jax.jit(held), *arguments, topology="v5e:4x4")
