"""Bad input to all commands: an error with the value and a remedy, before any work.

No traceback, the documented exit code, nothing compiled and nothing written. The
cases are in `support/bad_cases.py`.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support import bad_input, commands
from support.bad_cases import BASE, UNSHARED, cases
from support.bad_settings import settings

from experiments import recipes
from experiments.recipes.config import SETTINGS
from meshpar.runs.config import values_of
from meshpar.settings import Number

MAX_SECONDS = 10
"""Most CPU time of one case; a case that reads and traces takes about one second."""


def label(value):
    return value[:40] if isinstance(value, str) else " ".join(value)[:60]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of bad inputs, beside a link to transformers' Llama."""
    root = tmp_path_factory.mktemp("bad") / "inputs"
    root.mkdir()
    bad_input.make_inputs(root)
    target = bad_input.THEIRS / "hugging_face_llama"
    (root.parent / "hugging_face_llama").symlink_to(target)
    return root


@pytest.fixture(scope="module")
def inputs(root):
    """Everything in that folder, which no case may change."""
    return files_in(root)


def files_in(folder):
    return sorted(
        os.path.join(place, name)
        for place, folders, files in os.walk(folder)
        for name in folders + files
    )


SLOW = [pytest.param(*c, marks=pytest.mark.slow) for c in settings(quick=False)]


@pytest.mark.parametrize("command, words, pattern", [*cases(), *SLOW], ids=label)
def test_bad_input_is_an_error_with_a_remedy(
    command, words, pattern, root, inputs, tmp_path, monkeypatch, capsys
):
    base = [] if command.endswith("!") else BASE[command]
    places = {"{root}": str(root), "{cwd}": str(tmp_path)}
    words = [*base, *words]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    monkeypatch.chdir(tmp_path)
    outcome = commands.run(command.rstrip("!"), words, monkeypatch, capsys)
    bad_input.check_refused(outcome, pattern, longest=2000)
    assert files_in(tmp_path) == [] and files_in(root) == inputs
    assert outcome.seconds < MAX_SECONDS


def test_there_are_many_cases_and_every_command_has_some():
    counts = dict.fromkeys(BASE, 0)
    for command, _, _ in cases():
        counts[command.rstrip("!")] += 1
    assert sum(counts.values()) > 600
    assert min(count for name, count in counts.items() if name not in UNSHARED) > 40


def test_every_field_has_a_range_and_every_recipe_is_within():
    for name in recipes.RECIPES:
        fields = dict(values_of(recipes.get(name)))
        assert fields.keys() == SETTINGS.keys()
        assert [k for k, v in fields.items() if SETTINGS[k].range.problem(v)] == []


@pytest.mark.parametrize(
    "key", [k for k, s in SETTINGS.items() if isinstance(s.range, Number)]
)
def test_bounds_are_inside_or_outside_as_the_range_says(key):
    allowed = SETTINGS[key].range
    assert bool(allowed.problem(allowed.low)) == allowed.above
    assert bool(allowed.problem(allowed.high)) == allowed.below


def test_compilations_are_counted():
    """So the check of the cases above can fail."""
    before = commands.num_compilations()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert commands.num_compilations() > before


def test_an_accelerator_that_is_missing_is_an_error():
    """In a process of its own, as this one has started its devices."""
    words = ["-m", "experiments.verify", "--recipe=tiny", "--platform=gpu"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=commands.ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "error: --platform=gpu finds no device" in done.stderr
    assert "Traceback" not in done.stderr
