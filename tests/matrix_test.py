"""Every layout equals one device, keeps its contract and places state as planned.

One program per row is compiled. Its initial parameters, the metrics of three steps, the
gradients (Adam's first moment after one step) and the state after three steps equal one
device's; its collectives, shardings and bytes per device are as declared.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support.equality import start
from support.tiny_models import (
    batch,
    host,
    lower_standard,
    model,
    plain_model,
    relative_error,
    standard_model,
)

import meshpar
from meshpar.layouts.axes import TENSOR
from meshpar.lowering.jit import JitLowering
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.pipeline.runner import PipelineRunner

MODELS = {
    "deep": standard_model(),
    "linen": model("linen", depth=8),
    "plain": plain_model(depth=8),
    "tied": model(depth=8, tied=True, position="learned", norm="layernorm"),
}
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
      layout: its layout string.
      of: the model, by its name in MODELS.
      wire: least and most bytes on the wire, in payloads of all parameters times
        (n-1)/n, if theory knows them.
      lowering: the lowering that is asked for; empty for the default.
      slow: whether only `-m slow` runs it.
      moves: whether the compiler moves more by itself, within the contract's bound.
    """

    layout: str
    of: str = "deep"
    wire: tuple[float, float] | None = None
    lowering: str = ""
    slow: bool = False
    moves: bool = False


BY_US = [
    Row("data=8", wire=(2.0, 2.0), slow=True),
    Row("fsdp=8,zero=1", wire=(2.0, 2.0), slow=True),
    Row("fsdp=8,zero=2", wire=(2.0, 2.0), slow=True),
    Row("fsdp=8,zero=3", wire=(2.7, 3.0), slow=True),
    Row("fsdp=8,zero=1,microbatches=2", wire=(2.0, 2.0), slow=True),
    Row("fsdp=8,zero=2,microbatches=2", wire=(2.0, 2.0), slow=True),
    Row("data=2,fsdp=4,zero=3,remat=full", wire=(2.5, 3.0)),
    Row("tensor=4", slow=True),
    Row("data=2,fsdp=2,tensor=2", slow=True),
    Row("data=2,fsdp=2,tensor=2,microbatches=2", slow=True),
    Row("fsdp=4,tensor=2,microbatches=2", slow=True),
    Row("fsdp=2,remat=dots", slow=True),
    Row("fsdp=2,remat=names:attention+mlp_hidden,offload=activations", slow=True),
    Row(
        "fsdp=2,remat=full,microbatches=2,prefetch=attention/[qkv]$,prefetch=mlp",
        slow=True,
    ),
    Row("fsdp=4,prefetch=attention/[qkv]$,prefetch=mlp", slow=True),
    Row("data=2,fsdp=2,tensor=2,remat=full,microbatches=2", "linen", slow=True),
    Row("data=2,fsdp=2,tensor=2,remat=3*full+3*none+2*dots", slow=True),
    Row("fsdp=4,zero=1,remat=1*full+6*dots+1*none", slow=True),
    Row("fsdp=4,zero=2,remat=4*none+4*full", slow=True),
    Row("fsdp=2,remat=5*full+3*none,offload=activations", slow=True),
    Row(
        "fsdp=2,remat=5*full+3*none,microbatches=2,prefetch=attention/[qkv]$,prefetch=mlp",
        slow=True,
    ),
    Row("fsdp=2,tensor=2,remat=1*none+7*full,microbatches=2", "linen", slow=True),
    Row("fsdp=2,zero=2,remat=4*attention+4*dots,scan_unroll=2", slow=True),
    Row("fsdp=2,zero=2,remat=4*attention+4*dots,scan_unroll=4", slow=True),
    Row("fsdp=2,remat=full,scan_unroll=3,microbatches=2", slow=True),
    Row("data=2,tensor=2,remat=full,scan_unroll=8", "linen", slow=True),
    Row("fsdp=2,tensor=4,layers=fsdp", slow=True),
    Row("data=2,tensor=2,layers=fsdp,remat=full", "tied", slow=True, moves=True),
    Row(
        "data=2,fsdp=2,tensor=2,microbatches=2,"
        "layers=3*fsdp+4*tensor+1*fsdp,remat=5*full+3*none",
        slow=True,
    ),
    Row(
        "fsdp=2,tensor=2,layers=2*tensor+6*fsdp,prefetch=up",
        "linen",
        slow=True,
        moves=True,
    ),
]
BY_THE_COMPILER = [
    Row("data=2,fsdp=2,tensor=2", lowering="jit", slow=True),
    Row("fsdp=8,zero=2", lowering="jit", slow=True),
    Row("data=2,fsdp=2,tensor=2,remat=3*full+5*none", lowering="jit"),
    Row("fsdp=8,zero=3", "plain", slow=True),
    Row("data=2,fsdp=2,tensor=2", "plain", slow=True),
    Row("data=8", "plain", slow=True),
    Row("fsdp=8,zero=1", "plain", slow=True),
    Row("fsdp=8,zero=2", "plain", slow=True),
    Row("tensor=4", "plain", slow=True),
    Row("fsdp=4,tensor=2,microbatches=2", "plain", slow=True),
]
PIPELINES = [
    Row("pipe=2,microbatches=4,schedule=gpipe", slow=True),
    Row("pipe=8,microbatches=8", slow=True),
    Row("pipe=4,data=2,microbatches=8,save=residuals", slow=True),
    Row("pipe=2,fsdp=4,zero=1,microbatches=4", slow=True),
    Row("pipe=4,fsdp=2,zero=3,microbatches=4,schedule=gpipe,save=residuals", slow=True),
    Row("pipe=2,fsdp=2,tensor=2,microbatches=4,remat=full", slow=True),
    Row("pipe=4,tensor=2,microbatches=4,virtual_stages=2", slow=True),
    Row(
        "pipe=2,data=2,fsdp=2,zero=3,microbatches=4,virtual_stages=2,save=residuals",
        slow=True,
    ),
    Row("pipe=2,data=4,microbatches=2,virtual_stages=4,remat=dots", slow=True),
    Row("pipe=3,fsdp=2,microbatches=2", slow=True),
    Row("pipe=2,data=2,microbatches=4,partition=3/5,save=residuals", slow=True),
    Row("pipe=4,fsdp=2,microbatches=8,schedule=zb_h1", slow=True),
    Row("pipe=2,data=2,microbatches=4,vocab=pipe,schedule=gpipe", slow=True),
    Row("pipe=2,fsdp=2,tensor=2,microbatches=4,virtual_stages=2,vocab=pipe", slow=True),
    Row(
        "pipe=4,fsdp=2,zero=3,microbatches=4,vocab=pipe,save=residuals,"
        "tick_loop=uniform"
    ),
    Row("pipe=2,data=2,microbatches=4,schedule=zb_h1,save=residuals", slow=True),
    Row("pipe=2,fsdp=2,tensor=2,microbatches=4,virtual_stages=2", "linen", slow=True),
    Row("pipe=2,data=2,microbatches=4,schedule=zb_h1", "linen", slow=True),
    Row(
        "pipe=2,fsdp=2,zero=3,microbatches=4,virtual_stages=2,tick_loop=uniform",
        slow=True,
    ),
    Row("pipe=2,data=2,microbatches=4", "tied", slow=True),
    Row("pipe=4,fsdp=2,zero=3,microbatches=4,vocab=pipe", "tied", slow=True),
]
ROWS = [*BY_US, *BY_THE_COMPILER, *PIPELINES]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A program after STEPS steps; trees are on the host, layers in the model's order.

    Attributes:
      program: the program.
      initial: {path: parameter} before the first step.
      metrics: {name: number} of every step.
      gradients: {path: gradient} of the first step, clipped and times 1 - b1.
      params: {path: parameter} after the last step.
      moments: Adam's state after the last step.
      state: the last state on the devices, in the program's order of layers.
    """

    program: meshpar.TrainProgram
    initial: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    moments: optax.ScaleByAdamState
    state: meshpar.lowering.state.TrainState


def train(layout, of, lowering=""):
    program = lower_standard(layout, MODELS[of], lowering=lowering)
    state, metrics = start(program), []
    initial, gradients = host(program.in_model_order(state).params), None
    for step in range(STEPS):
        state, values = program.step(state, batch(step))
        metrics.append({name: float(value) for name, value in values.items()})
        portable = host(program.in_model_order(state))
        moments = portable.optimizer_state[0]
        gradients = gradients or moments.mu
    return Trained(
        program, initial, metrics, gradients, portable.params, moments, state
    )


@functools.cache
def one_device(of):
    return train("data=1", of)


def identity(row):
    return "-".join(filter(None, (row.of, row.lowering, row.layout)))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] * row.slow, id=identity(row))
        for row in ROWS
    ],
)
def test_a_layout_equals_one_device_and_keeps_its_contract(row):
    run = train(row.layout, row.of, row.lowering)
    check_lowering(row, run.program)
    check_equality(run, one_device(row.of))
    check_contract(row, run.program)
    check_state(run)


def check_lowering(row, program):
    expected = JitLowering if row in BY_THE_COMPILER else ShardMapLowering
    assert type(program.lowering) is expected
    if row in PIPELINES:
        assert isinstance(program.lowering.runner, PipelineRunner)


def check_equality(run, alone):
    chex.assert_trees_all_equal(run.initial, alone.initial)
    assert relative_error(run.gradients, alone.gradients) < 1e-5
    for values, expected in zip(run.metrics, alone.metrics, strict=True):
        assert values == pytest.approx(expected, rel=1e-5)
    assert all((run.params[path] != x).any() for path, x in run.initial.items())
    assert relative_error(run.params, alone.params) < 1e-5
    assert relative_error(run.moments.mu, alone.moments.mu) < 1e-5
    assert relative_error(run.moments.nu, alone.moments.nu) < 2e-5  # Squares.


def check_contract(row, program):
    assert program.violations() == []
    check_written(program, row.moves)
    payload = 4 * sum(param.size for param in program.model.params.values()) * 7 / 8
    if row.wire is not None:
        least, most = row.wire
        wire_bytes = sum(c.wire_bytes for c in program.collectives) / payload
        assert least - 0.01 <= wire_bytes <= most + 0.01
    if row in BY_US and program.layout.microbatches == 1:
        # Over tensor the compiler communicates, too, and the contract only bounds it.
        found = [c.wire_bytes for c in program.collectives if TENSOR not in c.axes]
        exact = (term for term in program.contract.terms if not term.bound)
        declared = sum(term.wire_bytes for term in exact if TENSOR not in term.axes)
        assert sum(found) / payload == pytest.approx(declared / payload, abs=0.02)


def check_written(program, moves):
    """Collectives are compiled as written, but for gathers that compilers drop."""
    norm = 8 * len(program.plan.gradients)
    written, compiled, bounded = {}, {}, {}
    for term in program.contract.terms:
        if moves and term.bound:
            bounded[term.axes] = bounded.get(term.axes, 0) + term.payload_bytes
    for term in program.inspection.written_terms:
        assert not term.bound, term
        key = term.kind, term.axes
        written[key] = written.get(key, 0) + term.payload_bytes
    for found in program.collectives:
        key = found.kind, found.axes
        size = found.payload_bytes * found.executions
        compiled[key] = compiled.get(key, 0) + size
    for (kind, axes), size in written.items():
        found, most = compiled.get((kind, axes), 0), size + bounded.get(axes, 0)
        if kind == "all_gather":
            assert 0.75 * size <= found <= most
        elif kind == "all_reduce":  # Compilers add the gradients' norm; over tensor,
            # the gradients of weights that it does not split.
            assert size <= found <= most + (norm if TENSOR not in axes else 2**14)
        else:
            assert size <= found <= most


def check_state(run):
    """Shardings and bytes per device are the plan's; a portable state comes back."""
    plan, program = run.program.plan, run.program
    leaves = [(leaf, run.state.params[path]) for path, leaf in plan.parameters.items()]
    optimizer = jax.tree.leaves(run.state.optimizer_state)
    leaves += zip(plan.optimizer, optimizer, strict=True)
    for leaf, value in leaves:
        planned = NamedSharding(program.mesh, leaf.partition_spec)
        assert value.sharding.is_equivalent_to(planned, value.ndim), leaf.path
        shard = value.addressable_shards[0].data
        assert shard.nbytes == leaf.bytes_per_device, leaf.path
    back = program.as_stored(program.in_model_order(run.state))
    chex.assert_trees_all_equal(host(back), host(run.state))
    chex.assert_trees_all_equal_comparator(
        lambda x, y: x.sharding == y.sharding,
        lambda x, y: f"{x.sharding} is not {y.sharding}",
        back,
        run.state,
    )
