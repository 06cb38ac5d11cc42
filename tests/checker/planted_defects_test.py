"""Defects planted in small steps are named, at their lines; clean steps are quiet."""

import pytest
from support import planted_steps

import meshpar
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.topologies import has_compiler


def report_of(style, defect="", **more):
    step, arguments = getattr(planted_steps, f"{style}_step")(defect)
    return meshpar.check(step, *arguments, **more)


@pytest.mark.parametrize("style", ["jit", "shard_map", "flax"])
def test_a_clean_step_has_no_findings(style):
    report = report_of(style)
    assert report.findings == (), report
    assert len(report.collectives) > 2


DEFECTS = [
    ("jit", "head whole", "replicated"),
    ("jit", "whole activation", "fighting_constraints"),
    ("jit", "fighting", "fighting_constraints"),
    ("jit", "host print", "host_transfer"),
    ("shard_map", "wide gather", "float32_wire"),
    ("shard_map", "wide sum", "float32_wire"),
    ("shard_map", "gathered twice", "gathered_twice"),
    ("shard_map", "gathered and sliced", "reshard"),
    ("shard_map", "summed twice", "needless_all_reduce"),
    ("shard_map", "many small sends", "small_collectives"),
    ("shard_map", "sum per microbatch", "reduced_in_every_round"),
    ("shard_map", "sum sliced", "sliced_all_reduce"),
    ("flax", "unknown name", "fighting_constraints"),
    ("flax", "rule dropped", "replicated"),
    ("flax", "lookup of a split table", "reshard"),
]


@pytest.mark.parametrize(("style", "defect", "rule"), DEFECTS)
def test_a_defect_is_named_at_its_line(style, defect, rule):
    report = report_of(style, defect)
    line = planted_steps.line_of(defect)
    found = [x for x in report.findings if (x.rule, x.line) == (rule, line)]
    assert found, f"{line}\n{report}"


OF_THE_STEP = [
    ("jit", "moments whole", "replicated", "state['optimizer'][0].mu['head']"),
    ("jit", "gradient per microbatch", "reduced_in_every_round", "4 rounds"),
    ("jit", "narrow result", "donation", "state['params']['head']"),
    ("jit", "narrow result", "recompilation", "float32 comes back as bfloat16"),
    ("jit", "not donated", "donation", "and 5 more of state: returned anew"),
    ("jit", "other sharding", "recompilation", "state['params']['in']"),
    ("jit", "idle axis", "idle_axis", "axis 'cols'"),
    ("flax", "no mesh", "reshard", "an axis of the batch"),
    ("flax", "weak count", "recompilation", "weak int32 comes back as int32"),
]


@pytest.mark.parametrize(("style", "defect", "rule", "words"), OF_THE_STEP)
def test_a_defect_of_the_whole_step_is_named(style, defect, rule, words):
    report = report_of(style, defect)
    line = planted_steps.line_of(defect)
    found = [x for x in report.findings if (x.rule, x.line) == (rule, line)]
    assert any(words in x.what for x in found), f"{line}\n{report}"


def test_a_matmul_that_devices_share_is_named_at_its_line():
    report = report_of("jit", "idle axis")
    line = planted_steps.line_of("same matmul")
    found = [x for x in report.findings if (x.rule, x.line) == ("same_matmul", line)]
    assert any("2 devices along cols" in x.what for x in found), report


# Compilers for TPUs merge equal gathers, and move a sum that a loop adds up behind it.
ON_CPUS_ALONE = ("gathered twice", "sum per microbatch")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(CHIPS["v5e"]), reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("style", "defect", "rule"), [case[:3] for case in (*DEFECTS, *OF_THE_STEP)]
)
def test_a_defect_is_named_at_its_line_on_chips(style, defect, rule):
    report = report_of(style, defect, topology="v5e:2x4")
    line = planted_steps.line_of(defect)
    found = (rule, line) in {(x.rule, x.line) for x in report.findings}
    assert found != (defect in ON_CPUS_ALONE), f"{line}\n{report}"


@pytest.mark.skipif(not has_compiler(CHIPS["v5e"]), reason="libtpu is not installed")
@pytest.mark.parametrize("defect", ["gradient per microbatch", "summed twice"])
def test_sums_inside_fusions_of_chips_are_followed(defect):
    style = "jit" if defect.startswith("gradient") else "shard_map"
    report = report_of(style, defect, topology="v5e:2x4")
    rules = {x.rule for x in report.findings if x.line == planted_steps.line_of(defect)}
    wanted = "reduced_in_every_round" if style == "jit" else "needless_all_reduce"
    assert wanted in rules, report
    if style == "jit":  # The reduction that is found is part of a fusion.
        kinds = {x.collective.computation for x in report.collectives}
        assert any(x.startswith("all-reduce-scatter") for x in kinds), kinds
