"""The command that compares loss curves in float8 with those in bfloat16."""

import re

import numpy as np
import pytest
from support import commands

from experiments.benchmarks.float8_curves import PARTS, is_within_noise

CURVES = 2.0 + 0.1 * np.random.default_rng(0).normal(size=(5, PARTS + 1))


@pytest.mark.parametrize("added, within", [(0.01, True), (-0.01, True), (0.3, False)])
def test_what_float8_adds_is_held_to_the_noise_of_seeds(added, within):
    assert is_within_noise(CURVES, CURVES + added) is within


def test_one_bad_point_is_beyond_the_noise():
    worse = CURVES.copy()
    worse[:, 3] += 0.3
    assert not is_within_noise(CURVES, worse)


@pytest.mark.slow
def test_both_formats_train_from_the_same_weights(monkeypatch, capsys):
    words = ["--recipe=tiny", "--steps=10", "--layout=data=1", "--devices=1"]
    words += ["--runs=2"]
    done = commands.run("benchmarks.float8_curves", words, monkeypatch, capsys)
    assert done.code == 0, done.err
    first = re.search(r"\b10% .*", done.out).group()
    bfloat16, float8, added, _ = map(float, re.findall(r"[-+]?\d+\.\d+", first))
    # The first step has the loss of the same weights.
    assert abs(added) < 0.01
    assert bfloat16 != float8


def test_a_curve_needs_steps(monkeypatch, capsys):
    words = ["--recipe=tiny", "--steps=9"]
    done = commands.run("benchmarks.float8_curves", words, monkeypatch, capsys)
    assert done.code == 2
    assert "--steps=9: a curve needs 10 steps" in done.err
