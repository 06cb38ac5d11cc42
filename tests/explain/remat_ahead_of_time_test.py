"""Policies of rematerialization by layer in programs that the TPU compiler made."""

import re

import pytest
from support.tpu_programs import small, tpu

from meshpar import layouts, mesh
from meshpar.runs.config import with_settings


@tpu
@pytest.mark.slow
def test_a_mix_takes_memory_between_that_of_its_policies():
    config = with_settings(small(), ["model.depth=4"])
    temporary, peak = [], []
    for remat in ("full", "2*full+2*none", "none"):
        layout = layouts.parse(f"fsdp=8,remat={remat}")
        program = config.make_program(layout, mesh.topology("v5e:2x4"))
        assert program.violations() == []
        analysis = program.compiled.memory_analysis()
        temporary.append(analysis.temp_size_in_bytes)
        peak.append(program.inspection.peak_bytes)
    for least, between, most in (temporary, peak):
        assert 1.3 * least < between < most / 1.3


@tpu
@pytest.mark.parametrize(
    "layout, heads, groups",
    [
        pytest.param("fsdp=8", 4, 1, marks=pytest.mark.slow),
        pytest.param("fsdp=4,tensor=2", 8, 1, marks=pytest.mark.slow),
        pytest.param(
            "fsdp=4,context=2,context_mode=allgather", 4, 4, marks=pytest.mark.slow
        ),
    ],
)
def test_dots_keeps_what_the_forward_kernel_of_attention_gives(layout, heads, groups):
    """All layers are one loop, so a kernel that is there once runs once a layer.

    Keys are gathered a group of heads after the other, each with kernels of its own.
    """
    settings = [f"model.heads={heads}", f"model.kv_heads={heads}"]
    config = with_settings(small(batch_size=8), settings)
    layout = layouts.parse(f"{layout},remat=dots")
    program = config.make_program(layout, mesh.topology("v5e:2x4"))
    kernels = re.findall(
        r"^ *%splash_mha_(fwd|dkv)\S* = .*tpu_custom_call",
        program.compiled.as_text(),
        re.MULTILINE,
    )
    assert sorted(kernels) == ["dkv"] * groups + ["fwd"] * groups
    assert program.violations() == []
