"""Host memory in programs that the real TPU compiler made."""

import jax.numpy as jnp
import pytest
from support.tpu_programs import small, tpu

import meshpar
from meshpar import layouts, mesh
from meshpar.explain.generation import explain_generation
from meshpar.runs.config import with_settings


@tpu
@pytest.mark.slow
def test_streamed_weights_take_no_device_memory_and_move_as_declared():
    """At its peak decoding holds its state, and less than three layers."""
    config = with_settings(small(), ["model.depth=8"])
    prefill, decoding = explain_generation(
        meshpar.generator(
            config.make_model(),
            "fsdp=4,tensor=2,offload=parameters",
            max_length=256,
            devices=mesh.topology("v5e:2x4"),
            compute_dtype=jnp.bfloat16,
        )
    )
    for found in (prefill, decoding):
        assert found.violations == ()
        assert found.host_found.to_device == found.host[0].to_device > 0
    layer = decoding.host[0].to_device / 9
    assert decoding.compiled_bytes["peak"] < decoding.state_bytes + 3 * layer


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_offloaded_state_takes_no_device_memory_and_moves_as_declared(offload):
    layout = layouts.parse(f"fsdp=8,remat=full,offload={offload}")
    program = small().make_program(layout, mesh.topology("v5e:2x4"))
    assert program.violations() == []
    moved = sum(program.plan.host_bytes().values())
    assert moved > 0
    analysis = program.compiled.memory_analysis()
    assert analysis.host_argument_size_in_bytes == pytest.approx(moved, rel=0.01)
    state = program.plan.bytes_per_device()
    on_device = state["parameters"] + state["optimizer"] - moved
    assert analysis.argument_size_in_bytes == pytest.approx(on_device, rel=0.05)


@tpu
@pytest.mark.slow
def test_offloaded_activations_move_as_declared():
    layout = layouts.parse("fsdp=8,remat=full,offload=activations")
    program = small().make_program(layout, mesh.topology("v5e:2x4"))
    assert program.violations() == []
    (declared,), found = program.contract.host, program.inspection.host_transfers
    assert found.to_device == found.to_host
    assert found.to_host == pytest.approx(declared.to_host, rel=1e-3)
