"""Figures of systems that the library has: accepted, and able to fail."""

import dataclasses

import numpy as np
import pytest
from support.figures import failed, missed

from experiments.gallery import (
    digits,
    elastic,
    experts,
    gossip,
    gpipe,
    local_sgd,
    megatron,
    pipeline_bubbles,
    poseidon,
    published_decoders,
    staleness,
    zero_memory,
)
from meshpar.schedules import make_schedule
from meshpar.schedules.table import Op


def test_a_plan_that_leaves_gradients_whole_is_not_accepted(monkeypatch):
    make = zero_memory.plan

    def whole(config, layout):
        return make(config, layout.replace("zero=2", "zero=1"))

    monkeypatch.setattr(zero_memory, "plan", whole)
    (text,) = missed("zero_memory")
    assert text.startswith("ZeRO-2")


def test_a_pass_that_is_late_is_not_accepted(monkeypatch):
    def late(name, *sizes):
        table = make_schedule(name, *sizes)
        if name != "interleaved":
            return table
        last = Op(sizes[1] - 1, sizes[2] - 1, 0)
        forward = {**table.forward, last: table.num_ticks}
        return dataclasses.replace(table, forward=forward)

    monkeypatch.setattr(pipeline_bubbles, "make_schedule", late)
    assert "bubbles follow the closed forms of the papers" in missed("pipeline_bubbles")


def test_neighbours_with_too_little_weight_are_not_accepted(monkeypatch):
    mix = gossip.mix_with_neighbours

    def half(x, matrix, axis, compression):
        return mix(x, (matrix + np.eye(8)) / 2, axis, compression)

    monkeypatch.setattr(gossip, "mix_with_neighbours", half)
    assert "the compiled program on 8 devices finds the mean" in missed("gossip")


def test_a_picker_with_another_edge_is_not_accepted(monkeypatch):
    pick = poseidon.factors.pick

    def shifted(rows, num_in, num_out):
        return pick(max(1, rows // 2), num_in, num_out)

    monkeypatch.setattr(poseidon.factors, "pick", shifted)
    assert "it flips where P K (M + N) = 2 M N, K=32" in missed("poseidon")


def test_flops_that_grow_with_the_experts_are_not_accepted(monkeypatch):
    monkeypatch.setattr(experts, "measure", lambda count: (1e6, 1000 * count))
    assert missed("experts") == []
    monkeypatch.setattr(experts, "measure", lambda count: (1e6 * count, 1000 * count))
    (text,) = missed("experts")
    assert text.startswith("MFLOPs of a device")


def test_local_sgd_that_loses_or_sends_too_much_is_not_accepted():
    losses = {"synchronous": [0.2], "H=1": [0.2], "H=16": [0.2], "H=16, int8": [0.2]}
    losses["never"] = [0.3]
    sent = {"H=1": 1600.0, "H=16": 100.0, "H=16, int8": 26.0}
    assert failed(local_sgd._claims(losses, sent)) == []
    worse = {**losses, "H=16": [0.22], "H=16, int8": [0.22]}
    assert failed(local_sgd._claims(worse, sent)) == ["H=16 loses nothing"]
    more = {**sent, "H=16": 101.0}
    assert failed(local_sgd._claims(losses, more)) == ["bytes fall by the period, H=16"]


def test_waiting_and_times_that_are_wrong_are_not_accepted():
    waiting, gaps = {0: 0.5, 1: 0.4, 2: 0.3}, {0: 0, 1: 1, 2: 2}
    assert failed(staleness.waiting_claims(waiting, gaps)) == []
    flat = staleness.waiting_claims({**waiting, 2: 0.4}, gaps)
    assert failed(flat) == ["waiting falls with every step of staleness"]
    (text,) = failed(staleness.waiting_claims(waiting, {**gaps, 1: 2}))
    assert text.startswith("the largest gap")
    seconds = {"BSP": 9.0, "SSP(3)": 5.0, "Downpour, Adagrad": 3.0}
    best = elastic.Tuned(0.5, 0.8, True)
    assert failed(staleness.target_claims(seconds, best)) == []
    (text,) = failed(staleness.target_claims({**seconds, "SSP(3)": None}, best))
    assert text.startswith("SSP(3) is at the target")
    assert (
        len(failed(staleness.target_claims(seconds, best._replace(inside=False)))) > 0
    )


def test_a_rate_at_the_edge_of_its_grid_is_not_accepted():
    periods = {
        "Downpour": {16: elastic.Tuned(0.9, 0.01, True)},
        "EASGD": {16: elastic.Tuned(0.5, 0.3, True)},
    }
    assert failed(staleness.period_claims(periods)) == []
    edge = {**periods, "Downpour": {16: elastic.Tuned(0.9, 0.01, False)}}
    (text,) = failed(staleness.period_claims(edge))
    assert text.startswith("the best rate of each")
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert elastic.tuned(lambda x: (x - 3) ** 2, rates) == (0, 3.0, True)
    assert elastic.tuned(lambda x: x, rates) == (1.0, 1.0, False)


def test_published_models_have_their_parameters():
    for published in published_decoders.MEGATRON_2021:
        found = megatron.formula_parameters(published) / 1e9
        assert found == pytest.approx(published.billions, rel=0.03)
        assert published.data * published.tensor * published.pipe == published.gpus


@pytest.mark.slow
def test_memory_of_a_pipeline_grows_with_the_layers_of_a_stage_alone():
    two, four = gpipe.peak_bytes(2, 2), gpipe.peak_bytes(4, 4)
    assert two == four < gpipe.peak_bytes(2, 4)


def test_batches_keep_the_parts_of_the_data_apart():
    seen = [set() for _ in range(8)]
    for batch in digits.batches(20, 32, 0):
        for part, rows in enumerate(np.split(batch["x"], 8)):
            seen[part] |= {row.tobytes() for row in rows}
    for i in range(8):
        assert all(not seen[i] & seen[j] for j in range(i))
