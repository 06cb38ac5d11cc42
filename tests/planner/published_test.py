"""Published runs: their layouts fit, at about the efficiency that was published."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from experiments.gallery.megatron import layout_of
from experiments.gallery.published_decoders import (
    MEGATRON_2021,
    VOCABULARY,
    decoder,
    language_model_of,
)
from meshpar import mesh
from meshpar.layouts import parse
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts

MACHINES = {529.6: "35*v5p:4x4x4", 1008.0: "v5p:8x16x24"}
"""{billion parameters: a machine with devices for 8 x 35 x 8, and 8 x 64 x 6}."""


def step_flops(published, sequences, length):
    """FLOPs of a step with recomputation, by equation 3 of the paper."""
    depth, embed = published.depth, published.embed
    rest = 1 + length / (6 * embed) + VOCABULARY / (16 * depth * embed)
    return 96 * sequences * length * depth * embed**2 * rest


@pytest.mark.slow
@pytest.mark.parametrize("billions", list(MACHINES))
def test_megatrons_largest_models_fit_at_about_the_published_efficiency(billions):
    published = next(p for p in MEGATRON_2021 if p.billions == billions)
    config, devices = decoder(published), mesh.topology(MACHINES[billions])
    data = len(devices) // (published.pipe * published.tensor)
    microbatches = published.batch // published.data
    sequences = data * microbatches
    tokens = jax.ShapeDtypeStruct((sequences, config.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    model = language_model_of(config)
    facts = Facts(model, optax.adam(1e-4), batch, jnp.bfloat16, devices)
    # Chips of TPUs stand in for the A100s, with their figures.
    chip = CHIPS["a100"]
    machine = dataclasses.replace(
        machine_of(devices, chip.memory_bytes), chip=chip, efficiency=0.7
    )
    text = layout_of(dataclasses.replace(published, gpus=len(devices)))
    options = f"microbatches={microbatches},save=residuals,remat=full"
    candidate = Candidates(facts, machine).candidate(parse(f"{text},{options}"))
    assert candidate.memory.total < machine.memory_bytes
    done = step_flops(published, sequences, config.length) / len(devices)
    reached = done / candidate.seconds.total / chip.peak_flops
    assert reached == pytest.approx(published.percent / 100, rel=0.15)
