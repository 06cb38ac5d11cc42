"""Running state: carried along, exact over the global batch, and never trained."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import partitioning
from flax.traverse_util import unflatten_dict
from support import resnets
from support.tiny_models import host

import meshpar
from meshpar import checkpoint
from meshpar.errors import LayoutError
from meshpar.explain.report import explain
from meshpar.explain.verify import verify
from meshpar.lowering.given_params import flat_params

WIDTH, ROWS, STEPS = 8, 16, 5
NAMES = "allow=scale|bias"


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x + 1, "y": np.sin(x)}


def lower(model, layout, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "devices": devices} | options
    return meshpar.lower(model, layout=layout, batch=rows(), **options)


def train(program, steps=STEPS, data=rows):
    state, losses = program.init(0), []
    for number in range(steps):
        state, metrics = program.step(state, data(number))
        losses.append(float(metrics["loss"]))
    return state, losses


# A network with BatchNorm, against the usual loops of Flax.


def usual_loop(framework, params):
    """(losses, {path: array} after the last step) of a loop without meshpar."""
    nested = unflatten_dict(params, sep="/")
    if framework == "linen":
        stats = {"batch_stats": nested.pop("batch_stats")}
        losses, variables = resnets.linen_steps({"params": nested, **stats}, STEPS)
    else:
        nested["blocks"] = {int(key): x for key, x in nested["blocks"].items()}
        losses, variables = resnets.nnx_steps(nested, STEPS)
    return losses, host(flat_params(variables))


@pytest.mark.parametrize("layout", ["data=8", f"fsdp=8,{NAMES}"])
def test_a_residual_network_trains_as_in_the_usual_loop(framework, layout):
    program = resnets.lower(framework, layout)
    begin = host(program.init(0).params)
    want_losses, want = usual_loop(framework, begin)
    state, losses = train(program, data=resnets.batch)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert program.violations() == []
    found, params = host(state.params), program.model.params
    for path, param in params.items():
        moved = np.linalg.norm(want[path] - begin[path])
        error = np.linalg.norm(found[path] - want[path])
        assert moved > 0 and error < (1e-5 if param.is_state else 3e-4) * moved, path
    assert len([p for p in params.values() if p.is_state]) == 4
    # Evaluation uses the running statistics and changes nothing.
    evaluated = program.evaluate(state, resnets.batch())["loss"]
    assert abs(float(evaluated) - losses[0]) > 1e-2
    np.testing.assert_equal(host(state.params), found)


def test_state_has_no_gradient_no_optimizer_state_and_a_kind_of_its_own(framework):
    program = resnets.lower(framework, f"fsdp=8,{NAMES}")
    params = program.model.params
    stats = {path for path, param in params.items() if param.is_state}
    assert set(program.plan.gradients) == set(params) - stats
    of_optimizer = " ".join(leaf.path for leaf in program.plan.optimizer)
    assert not any(path in of_optimizer for path in stats)
    for path in stats:
        leaf = program.plan.parameters[path]
        assert (leaf.kind, leaf.reason) == ("state", "state without dim names")
        assert f"state     {path}" in str(program.plan)


def test_state_continues_from_a_checkpoint_of_another_layout(tmp_path):
    layouts = ("data=8", f"fsdp=4,data=2,{NAMES}")
    first, second = (resnets.lower("linen", layout) for layout in layouts)
    state, _ = train(first, 2, resnets.batch)
    saved = checkpoint.Checkpoints(tmp_path, first.portable_state)
    saved.save(2, first.in_model_order(state), {})
    saved.close()
    opened = checkpoint.Checkpoints(tmp_path, second.portable_state)
    restored = second.as_stored(opened.restore().state)
    np.testing.assert_equal(host(restored.params), host(state.params))
    state, want = first.step(state, resnets.batch(2))
    restored, found = second.step(restored, resnets.batch(2))
    assert float(found["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    for path, param in first.model.params.items():
        if param.is_state:
            np.testing.assert_allclose(
                restored.params[path], state.params[path], rtol=1e-5, atol=1e-6
            )


def test_verify_compares_state():
    programs = (resnets.lower("nnx", layout) for layout in ("data=2", "data=1"))
    report = verify(*programs, [resnets.batch(0), resnets.batch(1)])
    assert report.ok, report.problem
    compared = [c.tensor for c in report.comparisons if c.kind == "state"]
    assert compared.count("blocks/0/norm/mean") == 2 and len(compared) == 8


def test_verify_finds_state_that_differs():
    def skewed(params, batch, key):
        result = model.loss(params, batch, key)
        path = "blocks/1/norm/var"
        return result.with_state(result.state | {path: result.state[path] * 1.001})

    model, reference = resnets.model("nnx"), resnets.lower("nnx", "data=1")
    planted = dataclasses.replace(model, loss=skewed)
    tested = resnets.lower("nnx", "data=2", planted)
    report = verify(tested, reference, [resnets.batch()])
    first = report.first_difference
    assert (first.kind, first.tensor) == ("state", "blocks/1/norm/var")


# Every kind of state, and what microbatches and replicas make of it.


class Counting(nnx.Module):
    """A counter, a mean over rows, and constants of every form."""

    def __init__(self, rngs):
        dims = {"out_sharding": ("embed", None)}
        self.linear = nnx.Linear(
            WIDTH, WIDTH, use_bias=False, kernel_metadata=dims, rngs=rngs
        )
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mean = nnx.Variable(jnp.zeros(WIDTH))
        self.shift = jnp.arange(float(WIDTH)) / WIDTH
        self.host_shift = np.arange(WIDTH, dtype=np.float32)
        self.listed = nnx.data([jnp.ones(WIDTH)])

    def __call__(self, x_BD):
        self.count.set_value(self.count.get_value() + 1)
        mean_D = x_BD.mean(axis=0)
        self.mean.set_value(0.75 * self.mean.get_value() + 0.25 * mean_D)
        x_BD = x_BD + (self.shift * self.host_shift * self.listed[0])[None]
        return self.linear(x_BD)


class Spectral(nn.Module):
    """Linen's SpectralNorm keeps a vector that follows the weights, not the batch."""

    @nn.compact
    def __call__(self, x_BD, train=True):
        dense = nn.Dense(WIDTH, use_bias=False)
        return nn.SpectralNorm(dense)(x_BD, update_stats=train)


def squared(module, batch):
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def squared_in_evaluation(apply, batch):
    return jnp.square(apply(batch["x"], train=False) - batch["y"]).mean()


COUNTING = meshpar.from_nnx(Counting, squared)
SPECTRAL = meshpar.from_linen(
    Spectral(), squared, jnp.ones((1, WIDTH)), squared_in_evaluation
)
CONSTANTS = {"shift", "host_shift", "listed/0"}


@pytest.mark.parametrize("layout", ["data=8", "fsdp=8", "data=2,microbatches=4"])
@pytest.mark.parametrize("model", [COUNTING, SPECTRAL], ids=["counting", "spectral"])
def test_state_of_every_kind_equals_one_device(model, layout):
    results = []
    if model is SPECTRAL and "fsdp" in layout:  # It takes no boxed parameters.
        layout += ",paths.^Dense_0/kernel=embed/none"
    for text in ("data=1", layout):
        program = lower(model, text)
        begin = host(program.init(0).params)
        state, losses = train(program, 3)
        results.append((losses, host(state.params)))
    (want_losses, want), (losses, found) = results
    assert losses == pytest.approx(want_losses, rel=1e-5)
    paths = [path for path, param in model.params.items() if param.is_state]
    assert len(paths) == (5 if model is COUNTING else 2)
    for path in paths:
        assert (found[path] != begin[path]).any() == (path not in CONSTANTS), path
        np.testing.assert_allclose(found[path], want[path], 1e-5, 1e-6, err_msg=path)
    if model is COUNTING:
        assert found["count"] == 3 and found["count"].dtype == np.int32


def test_state_that_microbatches_do_not_see_is_that_of_one_of_them():
    """Exactly: a third plus a third plus a third is not always the whole."""
    data = {name: x[:15] for name, x in rows().items()}
    states = []
    for layout in ("data=1", "data=1,microbatches=3"):
        program = meshpar.lower(
            *(SPECTRAL, optax.sgd(0.1), layout, data), devices=jax.devices()[:1]
        )
        states.append(host(program.step(program.init(0), data)[0].params))
    for path, param in SPECTRAL.params.items():
        if param.is_state:
            np.testing.assert_array_equal(*(state[path] for state in states))


def changing(value):
    """A model whose state becomes value(old, rows)."""

    class Changing(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, x_BD):
            self.seen.set_value(value(self.seen.get_value(), x_BD))
            return x_BD * self.w[...][None]

    return meshpar.from_nnx(Changing, squared)


@pytest.mark.parametrize(
    "value, words",
    [
        (lambda old, x: old + x.max(), "reduce_max"),
        (lambda old, x: old + x.sum(), "is a sum over rows"),
        (lambda old, x: old + x.shape[0], "is a sum over rows"),
        (lambda old, x: old + x.var(), "square|integer_pow|enters single rows"),
    ],
)
def test_other_state_is_refused_by_name_under_microbatches(value, words):
    model = changing(value)
    with pytest.raises(LayoutError, match=f"new value of seen .*({words}).*LayerNorm"):
        lower(model, "data=1,microbatches=2")
    program = lower(model, "data=8")  # The whole batch is seen at once.
    state = train(program, 1)[0]
    want = value(0.0, jnp.asarray(rows()["x"]))
    np.testing.assert_allclose(state.params["seen"], want, rtol=1e-5)


def test_batch_statistics_are_refused_under_microbatches(framework):
    with pytest.raises(LayoutError, match="as in batch normalization.*microbatches=2"):
        resnets.lower(framework, "data=1,microbatches=2")


def test_replicas_keep_their_own_state_and_average_it():
    model = COUNTING
    mode = meshpar.LocalSGD(period=2)
    program = lower(model, "replica=2,data=2", mode=mode, optimizer=optax.sgd(0.1))
    state, _ = program.step(program.init(0), rows())
    means = host(state.params["mean"])
    halves = rows()["x"].reshape(2, ROWS // 2, WIDTH)
    np.testing.assert_allclose(means, 0.25 * halves.mean(axis=1), rtol=1e-5)
    average = host(program.weights(state))
    np.testing.assert_allclose(average["mean"], means.mean(axis=0), rtol=1e-6)
    assert average["count"] == 1
    alone = lower(model, "data=1")
    want = alone.evaluate_params(jax.tree.map(jnp.asarray, average), rows())["loss"]
    found = program.evaluate(state, rows())["loss"]
    assert float(found) == pytest.approx(float(want), rel=1e-5)


def test_state_keeps_its_dtype_inside_the_loss():
    kinds = set()

    def loss(module, batch):
        arrays = module.linear.kernel, module.mean, module.shift
        kinds.add(tuple(x.dtype.name for x in arrays))
        return squared(module, batch)

    model = meshpar.from_nnx(Counting, loss)
    program = lower(model, "data=2", compute_dtype=jnp.bfloat16)
    state, _ = program.step(program.init(0), rows())
    assert ("bfloat16", "float32", "float32") in kinds
    want = 0.25 * rows()["x"].mean(axis=0)
    np.testing.assert_allclose(state.params["mean"], want, rtol=1e-5)


def test_batch_statistics_of_replicas_need_a_loss_that_counts_each_by_itself():
    mode, options = meshpar.LocalSGD(period=2), {"optimizer": optax.sgd(0.1)}
    with pytest.raises(LayoutError, match=r"aux\['weight'\].*replica=2"):
        resnets.lower("nnx", "replica=2", mode=mode, **options)

    def weighted(net, batch):
        return resnets.cross_entropy(net(batch["image"]), batch), {"weight": 1.0}

    model = meshpar.from_nnx(resnets.NnxResNet, weighted)
    program = resnets.lower("nnx", "replica=2", model, mode=mode, **options)
    state, _ = program.step(program.init(0), resnets.batch())
    halves = {name: x[: resnets.ROWS // 2] for name, x in resnets.batch().items()}
    alone = meshpar.lower(
        model, layout="data=1", batch=halves, devices=jax.devices()[:1], **options
    )
    want = alone.step(alone.init(0), halves)[0].params
    for path, param in model.params.items():
        if param.is_state:
            first, second = np.asarray(state.params[path])
            np.testing.assert_allclose(first, want[path], rtol=1e-5, atol=1e-6)
            assert (first != second).any()


class NamedAxis(nn.Module):
    """A model as they are written for `jax.pmap`."""

    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x_BD, train=True):
        x_BD = nn.Dense(WIDTH)(x_BD)
        norm = nn.BatchNorm(not train, momentum=0.9, axis_name=self.axis_name)
        return norm(x_BD)


def test_a_named_axis_averages_over_the_whole_batch():
    example, states = jnp.ones((1, WIDTH)), []
    for module, name in ((NamedAxis(None), ""), (NamedAxis(), "batch")):
        losses = squared, example, squared_in_evaluation
        model = meshpar.from_linen(module, *losses, axis_name=name)
        program = lower(model, "data=8")
        state, _ = train(program, 2)
        evaluated = program.evaluate(state, rows())["loss"]
        states.append({**host(state.params), "evaluated": np.asarray(evaluated)})
    want, found = states
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, 1e-5, 1e-6, err_msg=path)
    model = meshpar.from_linen(NamedAxis(), *losses)
    with pytest.raises(ValueError, match="give axis_name='batch' to from_linen"):
        lower(model, "data=8")


# Refusals and warnings.


def test_a_loss_that_changes_a_parameter_is_refused():
    def writing(module, batch):
        module.linear.kernel.set_value(module.linear.kernel.get_value() * 0.5)
        return squared(module, batch)

    with pytest.raises(ValueError, match="changes the parameter 'linear/kernel'"):
        lower(meshpar.from_nnx(Counting, writing), "data=2")

    def applied(apply, batch):
        return jnp.square(apply(batch["x"], mutable=["params"])[0]).mean()

    class Writing(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (WIDTH,))
            if not self.is_initializing():
                self.put_variable("params", "w", w * 2)
            return x * w[None]

    model = meshpar.from_linen(Writing(), applied, jnp.ones((1, WIDTH)))
    with pytest.raises(ValueError, match="changes the parameter 'w'"):
        lower(model, "data=2")


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_parameters_handed_through_a_transform_are_not_changed(transform):
    """Flax puts new values into all variables of a module that runs in a transform."""
    plain, model = COUNTING, meshpar.from_nnx(Counting, transform(squared))
    states = [host(train(lower(m, "data=2"), 2)[0].params) for m in (plain, model)]
    for path, want in states[0].items():
        np.testing.assert_allclose(states[1][path], want, 1e-5, 1e-6, err_msg=path)


@pytest.mark.parametrize(
    "value, words",
    [
        (lambda x: x.mean(axis=1), r"float32\[\] to float32\[16\]"),
        (lambda x: jnp.int32(3), r"float32\[\] to int32\[\]"),
    ],
)
def test_state_keeps_its_form(value, words):
    model = changing(lambda old, x: value(x))
    with pytest.raises(ValueError, match=f"variable 'seen' from {words}.*sown"):
        lower(model, "data=2")


def test_large_state_that_is_whole_on_every_device_is_a_warning():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
            self.mask = jnp.ones((1024, 512), bool)

        def __call__(self, x_BD):
            return x_BD * self.w[...][None] * self.mask[0, 0]

    class Table(Masked):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.mask = jnp.ones((1024, 512))

    small, large = (meshpar.from_nnx(kind, squared) for kind in (Masked, Table))
    assert not [w for w in explain(lower(small, "fsdp=2")).warnings if "mask" in w]
    explanation = explain(lower(large, "fsdp=2"))
    (warning,) = [w for w in explanation.warnings if "mask" in w]
    assert "whole on every device, 2097152 bytes" in warning
    assert explanation.replicated["mask"] == "state: state without dim names"
    split = explain(lower(large, "fsdp=2,paths.mask=embed/none"))
    assert not split.warnings
    assert split.state_bytes < explanation.state_bytes - 2**20 + 1


# What one step sows is no state, and layers that run one by one keep none.


@pytest.mark.parametrize("how", ["linen", "nnx.capture", "nnx.pop"])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")
def test_sown_results_reach_the_loss_and_are_not_carried_along(how):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            w = self.param("w", nn.initializers.ones, (WIDTH,))
            y_BD = x_BD * w[None]
            self.sow(
                "losses", "penalty", jnp.square(w).sum(), lambda a, b: a + b, float
            )
            self.sow("intermediates", "y", y_BD)
            return y_BD

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH))

        def __call__(self, x_BD):
            y_BD = x_BD * self.w[...][None]
            self.sow(nnx.Intermediate, "penalty", jnp.square(self.w[...]).sum())
            self.sow(nnx.Intermediate, "y", y_BD)
            return y_BD

    def total(y_BD, penalty, sown_BD):
        return jnp.square(y_BD).mean() + 0.1 * penalty + sown_BD.mean()

    def linen_loss(apply, batch):
        y_BD, sown = apply(batch["x"], mutable=["losses", "intermediates"])
        return total(y_BD, sown["losses"]["penalty"], *sown["intermediates"]["y"])

    def nnx_loss(module, batch):
        if how == "nnx.capture":
            y_BD, sown = nnx.capture(module, nnx.Intermediate)(batch["x"])
        else:
            y_BD = module(batch["x"])
            sown = nnx.pop(module, nnx.Intermediate)
        return total(y_BD, *(sown[name][0] for name in ("penalty", "y")))

    if how == "linen":
        model = meshpar.from_linen(Linen(), linen_loss, jnp.ones((1, WIDTH)))
    else:
        model = meshpar.from_nnx(Nnx, nnx_loss)
    assert set(model.params) == {"w"}
    program, x = lower(model, "data=8"), jnp.asarray(rows()["x"])

    def plain(w):
        return total(x * w[None], jnp.square(w).sum(), x * w[None])

    want, gradient = jax.value_and_grad(plain)(jnp.ones(WIDTH))
    state = program.init(0)
    metrics, gradients = program.gradients(state, rows())
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(gradients["w"], gradient, rtol=1e-5)


class CountingLayer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
        self.count = nnx.Variable(jnp.zeros(()))


class Layers(nnx.Module):
    def __init__(self, rngs):
        metadata = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(CountingLayer, transform_metadata=metadata)
        self.layers = make(rngs.split(2))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")
def test_layers_that_run_one_by_one_neither_change_state_nor_sow():
    def count(layer, x_BD):
        layer.count.set_value(layer.count.get_value() + 1)
        return x_BD * layer.w[...][None]

    def sow(layer, x_BD):
        layer.sow(nnx.Intermediate, "x", x_BD)
        return x_BD * layer.w[...][None]

    for layer, words in (
        (count, "changes its variable 'layers/count'"),
        (sow, "sows 'layers/x'"),
    ):
        stack = meshpar.LayerStack(
            stack="layers",
            embed=lambda net, batch: batch["x"],
            layer=layer,
            head_loss=lambda net, x_BD, batch: jnp.square(x_BD - batch["y"]).mean(),
        )
        with pytest.raises(ValueError, match=words):
            lower(meshpar.from_nnx(Layers, stack), "data=2")


@pytest.mark.parametrize("mutable", [True, nn.DenyList("params"), "batch_stats"])
def test_flax_filters_say_which_collections_are_returned(mutable):
    def loss(apply, batch):
        logits, new = apply(batch["image"], mutable=mutable)
        assert "batch_stats" in new
        return resnets.cross_entropy(logits, batch)

    example = jnp.zeros((1, resnets.SIDE, resnets.SIDE, 8))
    model = meshpar.from_linen(
        resnets.LinenResNet(), loss, example, resnets.linen_evaluation
    )
    found = jax.eval_shape(
        lambda: model.loss(
            model.init(jax.random.key(0)), resnets.batch(), jax.random.key(1)
        )
    )
    assert len(found.state) == 4


def test_axes_kept_beside_the_variables_name_their_dims():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            w = partitioning.param_with_axes(
                "w", nn.initializers.ones, (WIDTH, WIDTH), axes=("embed", "mlp")
            )
            table = partitioning.variable_with_axes(
                "tables", "table", jnp.ones, (WIDTH, WIDTH), axes=(None, "embed")
            )
            return x_BD @ (w * table.value)

    model = meshpar.from_linen(Named(), squared, jnp.ones((1, WIDTH)))
    assert {path: param.names for path, param in model.params.items()} == {
        "w": ("embed", "mlp"),
        "tables/table": (None, "embed"),
    }
    plan = lower(model, "fsdp=2,tensor=2").plan
    assert plan.parameters["w"].spec == (("fsdp",), ("tensor",))
    assert plan.parameters["tables/table"].spec == ((), ("fsdp",))
