"""Islands in threads: equal to one program under BSP, and every algorithm trains."""

import contextlib
import dataclasses
import functools
import sys
import threading
from concurrent import futures

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_stack
from support.marks import first

import meshpar
from meshpar.checkpoint import Checkpoints
from meshpar.errors import LayoutError, MeshparError
from meshpar.islands import ASP, BSP, SSP, Islands
from meshpar.islands.program import IslandsProgram, unpacked

BASE = Islands(
    2, consistency=BSP(), server_optimizer="sgd", learning_rate=0.05, momentum=0.0
)


@functools.cache
def shared():
    """Two islands of two devices; tests share what is compiled."""
    return lower(BASE)


def lower(mode, layout="fsdp=2", **options):
    return meshpar.lower(
        tiny_stack.model(),
        optax.sgd(0.05),
        layout,
        tiny_stack.batch(),
        devices=jax.devices()[: options.pop("num_devices", 4)],
        mode=mode,
        **options,
    )


def program(**settings) -> IslandsProgram:
    whole = shared()
    fields = {
        field.name: getattr(whole, field.name)
        for field in dataclasses.fields(whole)
        if field.init and not field.name.startswith("_")
    }
    return IslandsProgram(**fields | {"mode": dataclasses.replace(BASE, **settings)})


def trained(made, steps, state=None, first=0):
    state = made.init(3) if state is None else state
    losses = []
    for step in range(first, first + steps):
        state, metrics = made.step(state, tiny_stack.batch(step % 2))
        losses.append(metrics["loss"])
    return state, losses


def weights(made, state):
    return jax.device_get(made.in_model_order(state).params)


def test_bsp_equals_one_program_over_the_whole_batch():
    made, plain = program(), tiny_stack.lower("fsdp=2", optimizer=optax.sgd(0.05))
    state, _ = trained(made, 3)
    expected, _ = trained(plain, 3)
    got, want = weights(made, state), jax.device_get(expected.params)
    made.close()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=2e-5, atol=1e-6)


SETTINGS = {
    "downpour": dict(consistency=SSP(2), fetch=2, push=2, server_optimizer="adagrad"),
    "easgd": dict(algorithm="easgd", consistency=ASP(), push=2, alpha=0.4),
    "grace": dict(algorithm="diloco", consistency=BSP(), push=2, quorum=1, grace=0.01),
    "int8": dict(wire="int8", servers=2, replicas=2, momentum=0.5),
    # With -m slow:
    "damped": dict(algorithm="damped", consistency=ASP()),
    "compensated": dict(algorithm="compensated", consistency=SSP(1)),
    "diloco": dict(
        algorithm="diloco", consistency=ASP(), push=2, quorum=1, learning_rate=0.5
    ),
    "adam": dict(consistency=ASP(), server_optimizer="adam", warm_start=2),
    "topk": dict(wire="topk:0.25", consistency=ASP()),
}


@pytest.mark.parametrize("settings", first(4, SETTINGS.values()), ids=SETTINGS)
def test_every_algorithm_trains_and_goes_on_from_a_checkpoint(settings):
    made = program(**settings)
    start = made.evaluate(made.init(3), tiny_stack.batch())["loss"]
    state, _ = trained(made, 12)
    portable, extra = made.in_model_order(state), made.extra_state(state)
    middle = made.evaluate(state, tiny_stack.batch())["loss"]
    before = made.host.with_store(lambda store: store.clocks("weights/0"))
    made.close()
    assert middle < start
    again = program(**settings)
    state = again.as_stored(portable, extra)
    state, _ = trained(again, 1, state, first=12)
    after = again.host.with_store(lambda store: store.clocks("weights/0"))
    state, _ = trained(again, 8, state, first=13)
    again.host.drain()
    end = again.evaluate(state, tiny_stack.batch())["loss"]
    again.close()
    assert end < start
    assert sum(before.values()) >= 12 // made.mode.push
    assert all(after[name] >= clock for name, clock in before.items())


def test_a_run_that_resumes_equals_one_that_does_not():
    whole, first, second = program(), program(), program()
    expected, _ = trained(whole, 4)
    state, _ = trained(first, 2)
    portable, extra = first.in_model_order(state), first.extra_state(state)
    first.close()
    state, _ = trained(second, 2, second.as_stored(portable, extra), first=2)
    got, want = weights(second, state), weights(whole, expected)
    second.close()
    whole.close()
    for path in want:
        np.testing.assert_array_equal(got[path], want[path])


def test_a_checkpoint_on_disk_holds_the_store_and_every_clock(tmp_path):
    made, again = program(consistency=SSP(1)), program(consistency=SSP(1))
    state, _ = trained(made, 3)

    def opened(of):
        return Checkpoints(
            tmp_path,
            of.portable_state,
            abstract_extra=of.abstract_extra,
            extra_identity=of.extra_identity,
        )

    with contextlib.closing(opened(made)) as checkpoints:
        checkpoints.save(3, made.in_model_order(state), {}, made.extra_state(state))
        checkpoints.wait()
    before = made.host.snapshot()
    made.close()
    with contextlib.closing(opened(again)) as checkpoints:
        restored = checkpoints.restore()
    state = again.as_stored(restored.state, restored.extra)
    after = unpacked(np.asarray(state.blob).reshape(-1))
    assert before.keys() == after.keys() and "store|weights/3|meta" in after
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    trained(again, 1, state, first=3)
    again.close()


def test_an_island_leaves_and_another_one_joins():
    made = program(consistency=SSP(1))
    state, _ = trained(made, 2)
    made.host.leave(1)
    names = made.host.with_store(lambda store: set(store.clocks("weights/0")))
    assert len(names) == 1
    state, _ = trained(made, 2, state)
    made.host.join(1)
    made.host.with_store(lambda store: store.add_server("server 1"))
    made.host.with_store(lambda store: store.remove_server("server 0"))
    state, _ = trained(made, 4, state)
    made.host.drain()
    clocks = made.host.with_store(lambda store: store.clocks("weights/0"))
    assert len(clocks) == 2 and not set(clocks) <= names
    assert {span.kind for spans in made.spans() for span in spans} == {
        "wait",
        "compute",
        "push",
    }
    made.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(algorithm="downpoor"), "use one of downpour"),
        (dict(workers=0), "use a whole number of [a-z]*, at least 1"),
        (dict(quorum=3), "use 0 to 2"),
        (dict(replicas=2), "at least as many servers"),
        (dict(algorithm="diloco", consistency=ASP()), "set a quorum"),
        (dict(algorithm="easgd"), "use asp"),
        (dict(algorithm="compensated"), "single gradients"),
        (dict(algorithm="easgd", consistency=ASP(), push=4, fetch=2), "leave it out"),
        (dict(wire="int3"), "wire='int3'"),
        (dict(consistency="ssp:1"), "use BSP"),
    ],
)
def test_settings_that_contradict_each_other(settings, words):
    with pytest.raises(MeshparError, match=words):
        dataclasses.replace(BASE, **settings)


@pytest.mark.parametrize(
    ("workers", "layout", "words"),
    [
        (2, "fsdp=4", "need 8 devices, and there are 4"),
        (3, "data=1", "16 rows does not divide over 3 islands"),
        (2, "replica=2", "both train apart"),
    ],
)
def test_islands_that_do_not_fit(workers, layout, words):
    with pytest.raises(LayoutError, match=words):
        lower(dataclasses.replace(BASE, workers=workers), layout)


class RematNet(nn.Module):
    """Layers in Linen's `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.remat(nn.Dense)(tiny_stack.DIM, name=f"layer_{i}")(x)
        return x


def traced_anew(batch):
    """The gradient of a model that no other trace has met, as text."""
    model = meshpar.from_linen(
        RematNet(),
        lambda apply, batch: jnp.square(apply(batch["x"])).mean(),
        batch["x"],
        layers="layer_*",
    )
    params = jax.eval_shape(model.init, jax.random.key(0))
    grad = jax.grad(lambda p, b: model.loss(p, b, None)[0])
    return str(jax.make_jaxpr(grad)(params, batch))


def test_threads_trace_layers_in_remat_at_once():
    together, batch = threading.Barrier(4), tiny_stack.batch()

    def trace(_):
        together.wait()
        return [traced_anew(batch) for _ in range(2)]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with futures.ThreadPoolExecutor(4) as pool:
            texts = {text for found in pool.map(trace, range(4)) for text in found}
    finally:
        sys.setswitchinterval(switch)
    assert len(texts) == 1 and "remat" in texts.pop()


def test_an_older_state_is_refused():
    made = program()
    old = made.init(3)
    trained(made, 1, old)
    with pytest.raises(MeshparError, match="go on from the newest state"):
        made.step(old, tiny_stack.batch())
    made.close()
