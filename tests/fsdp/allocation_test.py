"""When a TPU program gives memory to gradients that are reduced once a step."""

import re

import optax
from support import tiny_stack
from support.tpu_programs import tpu

import meshpar
from meshpar import layouts, mesh


@tpu
def test_shards_of_gradients_get_memory_after_the_passes():
    program = meshpar.lower(
        tiny_stack.model(128),
        optax.sgd(1e-2),
        layouts.parse("fsdp=4,zero=2,microbatches=2"),
        tiny_stack.batch(dim=128),
        devices=mesh.topology("v5e:2x2"),
    )
    entry = program.compiled.as_text().partition("\nENTRY ")[2]
    passes, _, later = entry.partition(" while(")
    unwritten = re.findall(r"= (\w+\[[\d,]*\])\S* custom-call\(\)", passes)
    assert "f32[4,32,128]" not in unwritten  # Shards of four layers.
    assert " conditional(" in later
