"""PipeDream equals delayed SGD, computed stage by stage on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.marks import slow
from support.tiny_models import batch, host, lower, model

import meshpar
from meshpar.collectives import microbatch
from meshpar.errors import LayoutError
from meshpar.explain.verify import verify
from meshpar.pipeline.pipedream import PipeDreamRunner

DEEP = model(depth=4)


def bent_embedding():
    """A model with an embedding whose gradient depends on its weights."""
    plain = model(depth=4)

    def embed(shared, batch, key):
        return 2 * jnp.tanh(plain.layered.embed(shared, batch, key))

    layered = dataclasses.replace(plain.layered, embed=embed)
    return dataclasses.replace(plain, layered=layered, loss=layered.loss)


def delayed(optimizer, stages, num, of, seed=0):
    """Delayed SGD: on stage p a minibatch uses weights 2(P-1-p) updates old.

    The recurrence of PipeDream's section 3.3, with the delays of F and B in one tick.
    """
    params = of.init(jax.random.key(seed))
    depth = of.layered.depth // stages

    def part(tree, stage):
        shared, stack = of.layered.split(tree)
        edge = {
            path: x
            for path, x in shared.items()
            if (stage == 0) == path.startswith("embedding")
        }
        own = {
            path: x[stage * depth : (stage + 1) * depth] for path, x in stack.items()
        }
        return {**own, **(edge if stage in (0, stages - 1) else {})}

    def whole(parts):
        joined = {}
        for path in params:
            pieces = [tree[path] for tree in parts if path in tree]
            joined[path] = np.concatenate(pieces) if "blocks/" in path else pieces[0]
        return joined

    versions = [[part(params, stage)] for stage in range(stages)]
    states = [optimizer.init(tree[0]) for tree in versions]
    gradient = jax.jit(jax.grad(lambda p, b: of.loss(p, b, jax.random.key(0))[0]))

    @jax.jit
    def updated(grads, state, weights):
        changes, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, changes), state

    minibatches, norms = microbatch.split_microbatches(batch(), num), []
    for m in range(num):
        ages = [max(0, m - 2 * (stages - 1 - stage)) for stage in range(stages)]
        seen = [tree[age] for tree, age in zip(versions, ages, strict=True)]
        rows = jax.tree.map(lambda x, m=m: x[m], minibatches)
        grads = gradient(whole(seen), rows)
        norms.append(optax.tree.norm(grads))
        for stage in range(stages):
            weights, states[stage] = updated(
                part(grads, stage), states[stage], versions[stage][-1]
            )
            versions[stage].append(weights)
    return host(whole([tree[-1] for tree in versions])), np.mean(norms)


@pytest.mark.parametrize(
    "layout, optimizer, of",
    [
        slow("pipe=2,data=2,microbatches=8", optax.sgd(0.3, momentum=0.9), DEEP),
        slow("pipe=4,microbatches=8", optax.adam(1e-3), bent_embedding()),
        ("pipe=2,tensor=2,microbatches=4,remat=full", optax.sgd(0.3), DEEP),
    ],
)
def test_equals_delayed_sgd(layout, optimizer, of):
    program = lower(f"{layout},schedule=pipedream", of, optimizer)
    assert isinstance(program.lowering.runner, PipeDreamRunner)
    state, metrics = program.step(program.init(0), batch())
    plan = program.layout
    want, norm = delayed(optimizer, plan.pipe, plan.microbatches, of)
    start = host(program.init(0).params)
    for path, x in host(state.params).items():
        moved, wanted = x - start[path], want[path] - start[path]
        error = np.linalg.norm(moved - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, path
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # Synchronous training ends elsewhere.
    flushed = lower("data=1", of, optimizer)
    other, _ = flushed.step(flushed.init(0), batch())
    up = "blocks/mlp/up"
    apart = np.linalg.norm(host(other.params)[up] - host(state.params)[up])
    assert apart > 0.1 * np.linalg.norm(host(state.params)[up] - start[up])
    assert program.violations() == []


@pytest.mark.parametrize(
    "layout, options, words",
    [
        ("pipe=2,fsdp=2", {}, "fsdp=2 with schedule=pipedream: every stage"),
        ("pipe=2,vocab=pipe", {}, "vocab=pipe with schedule=pipedream"),
        ("pipe=2,save=residuals", {}, "save=residuals with schedule=pipedream"),
        ("pipe=2", {"clip_norm": 1.0}, "clip_norm=1.0 with schedule=pipedream"),
        ("pipe=2,virtual_stages=2", {}, "one chunk of layers"),
    ],
)
def test_options_that_need_all_stages_at_once_are_refused(layout, options, words):
    with pytest.raises(LayoutError, match=words):
        lower(f"{layout},schedule=pipedream,microbatches=4", DEEP, **options)


def test_a_staleness_mode_is_not_verified():
    program = lower("pipe=2,schedule=pipedream,microbatches=4", DEEP)
    with pytest.raises(meshpar.MeshparError, match="stale weights on purpose"):
        verify(program, lower("data=1", DEEP), [batch()])


def test_tied_embeddings_are_refused():
    with pytest.raises(meshpar.MeshparError, match="first and the last stage both"):
        lower("pipe=2,schedule=pipedream,microbatches=4", model(tied=True))
