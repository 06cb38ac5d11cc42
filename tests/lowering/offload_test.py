"""Offload: host memory changes where state lives, and nothing else."""

import contextlib
import json
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from support import tiny_stack
from support.processes import environment
from support.tiny_models import batch, host, lower, plain_model

from meshpar import layouts
from meshpar.arrays import leaves_by_path
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import LayoutError
from meshpar.explain.verify import verify
from meshpar.layouts.plan import HOST_MEMORY
from meshpar.local_sgd.mode import LocalSGD

ROOT = pathlib.Path(__file__).parents[2]


def memory_kinds(state):
    kinds = leaves_by_path(jax.tree.map(lambda x: x.sharding.memory_kind, state))
    return {path for path, kind in kinds.items() if kind == HOST_MEMORY}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=4,remat=full"])
def test_a_run_with_offload_equals_the_run_without_it_bit_for_bit(layout):
    """In a process whose compiler has no fused multiply-add.

    With it XLA:CPU rounds a sum of products once or twice, by how a loop is vectorized.
    """
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX "
    flags += "--xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/offloaded_runs.py", layout],
        env=environment()
        | {"XLA_FLAGS": flags, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    differing = json.loads(done.stdout.splitlines()[-1])
    assert differing == {
        "optimizer": [],
        "optimizer+parameters+activations": [],
    }


def test_state_lives_where_the_plan_says_and_checkpoints_are_interchangeable(tmp_path):
    resident, offloaded = (
        lower(f"fsdp=2{text}", compute_dtype=jnp.bfloat16)
        for text in ("", ",offload=optimizer")
    )
    state = resident.init(1)
    assert memory_kinds(state) == set()
    moved = memory_kinds(offloaded.init(1))
    assert len(moved) == 9 + 2 * 12  # Layers' weights, and two moments of everything.
    assert {path for path in moved if path.startswith(".params")} == {
        f".params['{path}']" for path in offloaded.plan.paths_on_host
    }
    sizes = offloaded.plan.bytes_per_device()
    assert offloaded.plan.host_bytes()["optimizer"] == sizes["optimizer"] - 4
    want = host(state)
    for number, (before, after) in enumerate(
        ((resident, offloaded), (offloaded, resident))
    ):
        folder = tmp_path / str(number)
        with contextlib.closing(
            Checkpoints(folder, before.portable_state)
        ) as checkpoints:
            checkpoints.save(1, before.init(1), {"position": 0})
        with contextlib.closing(
            Checkpoints(folder, after.portable_state)
        ) as checkpoints:
            restored = checkpoints.restore().state
        chex.assert_trees_all_equal(host(restored), want)
        assert memory_kinds(restored) == (moved if after is offloaded else set())


def test_prediction_and_contract_count_host_memory():
    resident, offloaded = (
        lower(f"fsdp=2,remat=full{text}", compute_dtype=jnp.bfloat16)
        for text in ("", ",offload=optimizer+activations")
    )
    before, after = (p.lowering.memory(p.step_batch) for p in (resident, offloaded))
    moved = offloaded.plan.host_bytes()
    assert after.host == sum(moved.values()) + before.activations
    assert before.host == 0
    assert after.total < before.total
    parameters, optimizer, copies, activations = offloaded.contract.host
    assert optimizer.to_device == optimizer.to_host == moved["optimizer"]
    assert parameters.to_device == parameters.to_host == moved["parameters"]
    assert (copies.to_device, copies.to_host) == (moved["parameters"], 0)
    assert activations.to_host == before.activations
    assert resident.contract.host == ()


def test_gradients_that_the_compiler_gathers_over_tensor_wait_for_no_loop():
    """CPUs mix up collectives that run beside those of the layers' loop."""
    program = tiny_stack.lower("data=2,tensor=4,offload=parameters")
    report = verify(program, None, [tiny_stack.batch()])
    assert report.ok, report


def test_parts_have_one_order():
    layout = layouts.parse("fsdp=2,offload=activations+optimizer")
    assert layout.offload == "optimizer+activations"
    assert layouts.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "layout, message",
    [
        ("fsdp=2,offload=optimiser", "'optimiser' .*optimizer.*join several by"),
        ("fsdp=2,offload=optimizer+optimizer", "twice; give it once"),
        ("fsdp=2,offload=optimizer+none", "'none'"),
        ("pipe=2,microbatches=2,offload=optimizer", "pipe=2.*leave one of"),
        ("replica=2,offload=optimizer", "replica=2.*leave one of the two out"),
        ("fsdp=2,zero=2,offload=parameters", "zero=2: .*holds all of them; use zero=3"),
    ],
)
def test_a_layout_that_cannot_be_offloaded_is_refused(layout, message):
    with pytest.raises(LayoutError, match=message):
        lower(layout, mode=LocalSGD() if "replica" in layout else None)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
            r"depends on other tensors: clip with lower\(clip_norm=",
        ),
        (lambda: optax.lamb(1e-2), "depends on others of the tensor"),
        (lambda: optax.noisy_sgd(1e-2, key=0), "draws random numbers"),
        (lambda: optax.apply_if_finite(optax.sgd(1e-2), 3), "use an elementwise"),
    ],
    ids=["clipped", "lamb", "noisy", "if_finite"],
)
def test_an_optimizer_that_needs_all_layers_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        lower("fsdp=2,offload=optimizer", optimizer=make())


def test_layers_that_the_compiler_runs_are_refused():
    with pytest.raises(LayoutError, match="no layered form"):
        lower("fsdp=2,offload=optimizer", plain_model())
    with pytest.raises(LayoutError, match="offload=activations: this moves"):
        lower("fsdp=2,offload=activations", lowering="jit")


@pytest.mark.slow
def test_an_optimizer_that_accumulates_is_offloaded():
    every = optax.MultiSteps(optax.sgd(1e-2), 2)
    program = lower("data=1,offload=optimizer", optimizer=every)
    state, losses = program.init(0), []
    for _ in range(4):
        state, metrics = program.step(state, batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1] > losses[2] == losses[3]
