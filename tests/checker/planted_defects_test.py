"""Defects planted in small steps are named, at their lines; clean steps are quiet."""

import pytest
from support import planted_steps

import meshpar


def report_of(style, defect=""):
    step, arguments = getattr(planted_steps, f"{style}_step")(defect)
    return meshpar.check(step, *arguments)


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


WITHOUT_LINES = [
    ("jit", "moments whole", "replicated", "state['optimizer'][0].mu['head']"),
    ("jit", "gradient per microbatch", "reduced_in_every_round", "4 rounds"),
    ("jit", "narrow result", "donation", "state['params']['head']"),
    ("jit", "narrow result", "recompilation", "float32 comes back as bfloat16"),
    ("jit", "not donated", "donation", "and 5 more of state: returned anew"),
    ("jit", "other sharding", "recompilation", "state['params']['in']"),
    ("jit", "idle axis", "idle_axis", "axis 'cols'"),
    ("jit", "idle axis", "same_matmul", "2 devices along cols"),
    ("flax", "no mesh", "reshard", "the compiler gathers the activation"),
    ("flax", "weak count", "recompilation", "weak int32 comes back as int32"),
]


@pytest.mark.parametrize(("style", "defect", "rule", "words"), WITHOUT_LINES)
def test_a_defect_of_the_whole_step_is_named(style, defect, rule, words):
    report = report_of(style, defect)
    assert any(x.rule == rule and words in x.what for x in report.findings), report
