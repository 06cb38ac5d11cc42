"""Published mistakes of other frameworks, planted in ours: sums and stages.

Each test plants one, after it has checked that the program is clean without it, and
says what catches it. `docs/proof.md` lists them.
"""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from support import mistakes, tiny_stack
from support.mistakes import UNCHECKED, kinds, kinds_at, planted, tensors

from meshpar.collectives.transport import Transport
from meshpar.layouts.axes import DATA
from meshpar.layouts.plan import LeafPlan, Plan
from meshpar.lowering import base, scan, shard_map, totals
from meshpar.lowering.frame import Frame
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.lowering.train_program import TrainProgram
from meshpar.pipeline import tick
from meshpar.pipeline.executor import Executor
from meshpar.pipeline.stage import PipelineStage
from meshpar.pipeline.tick import Tick

STACK, WORDS = mistakes.stack(), mistakes.words()
PARTS, SHARDS = "data=2,microbatches=2", "fsdp=2"
STAGES = "pipe=2,microbatches=2"
PAGE = pathlib.Path(__file__).parents[2] / "docs/proof.md"


# Sums over microbatches and shards.


def test_a_wrong_count_of_microbatches():
    def twice(mean):
        return lambda self, sums, totals: mean(
            self, {path: x / 2 for path, x in sums.items()}, totals
        )

    report = planted(STACK, PARTS, (ShardMapLowering, "mean_gradients", twice))
    assert kinds(report) >= {"gradient", "grad_norm"}
    assert report.first_difference.error == pytest.approx(0.5, rel=1e-3)


def test_a_mean_of_means():
    """Each of four parts counts the same, whatever the weights of its rows."""

    def alike(of_part):
        return lambda value, weight: of_part(value, jnp.full_like(weight, 34.0))

    report = planted(STACK, PARTS, (totals, "_of_part", alike))
    assert kinds(report) >= {"loss", "gradient", "grad_norm", "optimizer"}


@pytest.mark.slow
def test_padding_that_counts():
    def all_rows(head_loss):
        def loss(net, x, batch):
            ones = {**batch, "weight": jnp.ones_like(batch["weight"])}
            return head_loss(net, x, ones)[0], {"weight": tiny_stack.weight(batch)}

        return loss

    report = planted(STACK, PARTS, (tiny_stack, "head_loss", all_rows))
    assert kinds(report) >= {"evaluation", "loss", "gradient"}


@pytest.mark.slow
def test_the_first_microbatch_for_all():
    def first(split):
        def same(batch, num):
            parts = split(batch, num)
            return jax.tree.map(lambda x: jnp.stack([x[0]] * num), parts)

        return same

    report = planted(STACK, PARTS, (scan, "split_microbatches", first))
    assert kinds(report) >= {"loss", "gradient", "metric"}


@pytest.mark.slow
def test_a_loss_halved_by_two_axes():
    """Both axes divide the loss, and its weight is a sum over both."""

    def halved(over_devices):
        def over(self, found):
            found = over_devices(self, found)
            loss = found.metrics["loss"]
            loss = loss._replace(total=loss.total / 2)
            return found._replace(metrics={**found.metrics, "loss": loss})

        return over

    report = planted(STACK, "data=2,fsdp=2", (Frame, "over_devices", halved))
    assert kinds(report) == {"loss"}
    assert report.first_difference.error == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("bits", [(8, 7), (5, 10)], ids=["bfloat16", "float16"])
def test_a_reduction_in_16_bits(bits):
    def narrow(reduce):
        def reduced(grads, shardings):
            grads = {p: lax.reduce_precision(x, *bits) for p, x in grads.items()}
            return reduce(grads, shardings)

        return reduced

    report = planted(STACK, PARTS, (shard_map, "all_reduce_grads", narrow))
    assert "gradient" in kinds_at(report, 1) and "loss" not in kinds_at(report, 1)


@pytest.mark.slow
def test_an_all_reduce_too_few():
    def none(reduce):
        return lambda grads, shardings: grads

    places = UNCHECKED, (shard_map, "all_reduce_grads", none)
    report = planted(STACK, PARTS, *places)
    assert "gradient" in kinds(report)
    assert any("all_reduce over data" in line for line in report.violations)


def test_an_all_reduce_too_many():
    """The numbers are right: only the contract sees it."""

    def again(reduce):
        def reduced(grads, shardings):
            grads = reduce(grads, shardings)
            vary = {p: lax.pcast(x, DATA, to="varying") for p, x in grads.items()}
            return {path: lax.pmean(x, DATA) for path, x in vary.items()}

        return reduced

    report = planted(STACK, PARTS, (shard_map, "all_reduce_grads", again))
    assert kinds(report) == set()
    assert any("all_reduce over data" in line for line in report.violations)


@pytest.mark.slow
def test_gradients_averaged_where_they_are_added():
    def mean(scatter):
        return lambda self, x, axes, dim=0: scatter(self, x, axes, dim) / 2

    report = planted(STACK, SHARDS, (Transport, "reduce_scatter", mean))
    assert kinds(report) >= {"gradient", "grad_norm"}


@pytest.mark.slow
def test_weights_that_travel_in_bfloat16():
    def narrow(gather):
        def gathered(self, x, axes, dim):
            return gather(self, lax.reduce_precision(x, 8, 7), axes, dim)

        return gathered

    report = planted(STACK, SHARDS, (Transport, "all_gather", narrow))
    assert kinds(report) >= {"loss", "gradient"}


@pytest.mark.slow
def test_a_weight_that_is_replicated():
    def whole(sharding):
        def of(self, mesh):
            if self.path != "head":
                return sharding(self, mesh)
            return NamedSharding(mesh, PartitionSpec())

        return of

    report = planted(STACK, SHARDS, (LeafPlan, "sharding", whole))
    assert any("bytes on a device" in line for line in report.violations)


# Clipping.


@pytest.mark.slow
def test_a_norm_that_counts_copies_twice():
    def twice(slopes):
        def both(self, gradients):
            found = slopes(self, gradients)
            return found | {f"{path} again": x for path, x in found.items()}

        return both

    report = planted(STACK, PARTS, (Plan, "slopes", twice))
    assert kinds(report) >= {"grad_norm", "optimizer"}
    assert "gradient" not in kinds_at(report, 1)


@pytest.mark.slow
def test_a_norm_of_each_tensor():
    def alone(clipped):
        def each(grads, grad_norm, clip_norm):
            return {
                path: clipped({path: g}, optax.tree.norm(g), clip_norm)[path]
                for path, g in grads.items()
            }

        return each

    report = planted(STACK, PARTS, (base, "clipped", alone))
    assert kinds(report) >= {"optimizer"} and "gradient" not in kinds_at(report, 1)


@pytest.mark.slow
def test_a_stale_scale():
    """The scale is that of a step before this one."""

    def stale(clipped):
        return lambda grads, norm, clip: clipped(grads, jnp.ones_like(norm), clip)

    report = planted(STACK, PARTS, (base, "clipped", stale))
    assert kinds(report) >= {"optimizer"} and "gradient" not in kinds_at(report, 1)


# Weights.


@pytest.mark.slow
def test_weights_cast_once():
    """The copies that the loss uses are those of the first step."""
    start = jax.device_get(STACK.lower(PARTS).init(0).params)

    def first(sums):
        return lambda self, params, *rest: sums(
            self, {p: x + 0 * params[p] for p, x in start.items()}, *rest
        )

    report = planted(STACK, PARTS, (ShardMapLowering, "_sums", first))
    assert kinds_at(report, 1) == set()
    assert kinds_at(report, 2) >= {"loss", "gradient"}


@pytest.mark.slow
def test_weights_updated_in_bfloat16():
    def narrow(apply):
        def applied(params, updates):
            new = apply(params, updates)
            return jax.tree.map(lambda x: lax.reduce_precision(x, 8, 7), new)

        return applied

    report = planted(STACK, PARTS, (optax, "apply_updates", narrow))
    assert kinds_at(report, 1) == {"weight"}


@pytest.mark.slow
def test_first_weights_that_depend_on_the_mesh():
    def by_mesh(init):
        return lambda self, seed, given: init(self, seed + self.mesh.size, given)

    report = planted(STACK, PARTS, (TrainProgram, "_init_params_from", by_mesh))
    first = report.first_difference
    assert (first.step, first.kind) == (0, "weight")


# Stages.


@pytest.mark.slow
def test_a_stage_that_reads_the_next_microbatch():
    def ahead(loss):
        return lambda self, shared, microbatch, y, on: loss(
            self, shared, (microbatch + 1) % 2, y, on
        )

    report = planted(STACK, STAGES, (PipelineStage, "_loss", ahead))
    assert kinds(report) >= {"evaluation", "loss", "gradient"}


@pytest.mark.slow
def test_gradients_scaled_by_stages():
    def scaled(train):
        def run(self, *args):
            sums = train(self, *args)
            stack = {path: 2 * x for path, x in sums.stack.items()}
            return sums._replace(stack=stack)

        return run

    report = planted(STACK, STAGES, (Executor, "train", scaled))
    assert kinds(report) >= {"gradient", "grad_norm"}
    assert "head" not in {c.tensor for c in report.comparisons if of_step(c, 1)}


def of_step(comparison, step):
    """Whether a gradient of a step differs."""
    wrong = not comparison.ok and comparison.kind == "gradient"
    return wrong and comparison.step == step


@pytest.mark.slow
def test_a_microbatch_without_weight_gradients():
    def lost(backward):
        def run(self, chunk, microbatch, saved, dy, sums, on):
            on = on & (microbatch != 1)
            return backward(self, chunk, microbatch, saved, dy, sums, on)

        return run

    report = planted(STACK, STAGES, (PipelineStage, "backward", lost))
    assert kinds(report) >= {"gradient"} and "loss" not in kinds_at(report, 1)


@pytest.mark.slow
def test_one_buffer_for_all_microbatches():
    def first(take):
        return lambda buffer, slot: take(buffer, jnp.zeros_like(slot))

    report = planted(STACK, STAGES, (tick, "take_slot", first))
    assert kinds(report) >= {"gradient"}


@pytest.mark.slow
def test_a_tied_embedding_added_twice():
    def twice(backward):
        def run(self, *args):
            return jax.tree.map(lambda x: 2 * x, backward(self, *args))

        return run

    report = planted(WORDS, STAGES, (PipelineStage, "embed_backward", twice))
    assert {"embedding", "places"} == tensors(report, "gradient")


@pytest.mark.slow
def test_a_tied_embedding_added_once():
    """The gradient of the head alone."""

    def none(backward):
        return lambda self, carry: carry

    report = planted(WORDS, STAGES, (Tick, "_embed_backward", none))
    assert {"embedding", "places"} == tensors(report, "gradient")


# The page.


def planted_mistakes():
    """{name of a test: text of its function} of both files."""
    folder = pathlib.Path(__file__).parent
    found = {}
    for path in sorted(folder.glob("published_mistakes*_test.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_source_segment(text, node)
    return found


def test_the_page_has_every_mistake():
    tests = planted_mistakes()
    del tests["test_the_page_has_every_mistake"]
    rows = re.findall(r"^\|(.*)\| `(test_\w+)` \|(.*)\|$", PAGE.read_text(), re.M)
    assert len(rows) >= 30 and sorted(tests) == sorted(name for _, name, _ in rows)
    for _, name, caught in rows:
        for kind in re.findall(r"`(\w+)`", caught):
            assert f'"{kind}"' in tests[name], (name, kind)
