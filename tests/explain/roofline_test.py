"""Rooflines: the batch at which a matmul or a step crosses the ridge of a chip."""

import math

import pytest

from meshpar.errors import MeshparError
from meshpar.explain import roofline
from meshpar.mesh.chips import CHIPS

V5E = CHIPS["v5e"]


def test_a_matmul_of_the_rows_at_the_ridge_takes_as_long_to_move_as_to_compute():
    for chip in CHIPS.values():
        rows = roofline.matmul_rows(chip, 4096, 1024)
        work = roofline.matmul(rows, 4096, 1024)
        least = roofline.seconds(work, chip)
        assert work.intensity == pytest.approx(roofline.ridge(chip))
        assert work.flops / chip.peak_flops == pytest.approx(least)
        assert work.moved / chip.memory_bandwidth == pytest.approx(least)
        fewer = roofline.matmul(rows / 2, 4096, 1024)
        assert roofline.seconds(fewer, chip) == fewer.moved / chip.memory_bandwidth
        assert roofline.share_of_peak(chip, fewer.intensity) < 1


def test_a_small_weight_never_computes_at_the_peak():
    assert math.isinf(roofline.matmul_rows(V5E, 128, 128))
    assert roofline.matmul(10**9, 128, 128).intensity < 64


def test_a_step_is_the_line_through_two_batches():
    true = roofline.Step(roofline.Work(0, 100), roofline.Work(60, 10))
    found = roofline.fit({n: true.work(n) for n in (2, 8)})
    assert found.work(5) == true.work(5)
    assert found.rows_at(3) == 10 and true.work(10).intensity == 3
    assert found.rows_at(0) == 0 and math.isinf(found.rows_at(6))
    with pytest.raises(MeshparError, match="works of 1 batch sizes: give 2 or more"):
        roofline.fit({2: true.work(2)})
