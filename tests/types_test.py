"""The package is typed: public names and programs that use them pass a type checker."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
WRONG = """
import optax
from flax import nnx

import meshpar


def loss(model, batch):
    return model(batch["x"]).mean()


model = meshpar.from_nnx(lambda rngs: nnx.Linear(8, 8, rngs=rngs), loss)
meshpar.lower(model, optax.adam(1e-3), "data=8")
meshpar.lower("net", optax.adam(1e-3), "data=8", {})
meshpar.simulate("eight")
"""


def check(*words):
    """(what mypy says, its exit code)."""
    api = pytest.importorskip("mypy.api", reason='needs pip install -e ".[test]"')
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    said, _, code = api.run([*config, "--python-executable", sys.executable, *words])
    return said, code


@pytest.mark.slow
def test_public_names_and_examples_have_right_types(monkeypatch):
    monkeypatch.chdir(ROOT)
    said, code = check()
    assert code == 0, said


@pytest.mark.slow
def test_a_wrong_call_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (file := tmp_path / "wrong.py").write_text(WRONG)
    said, code = check(str(file))
    lines = [line for line in said.splitlines() if "error:" in line]
    assert code == 1 and len(lines) == 3, said
    assert 'Missing positional argument "batch"' in lines[0]
