"""The names of `meshpar` itself: those that stay, and those that have moved."""

import subprocess
import sys

import jax
import optax
import pytest
from support import tiny_models

import meshpar


def test_all_names_are_there():
    assert len(set(meshpar.__all__)) == len(meshpar.__all__) <= 31
    assert all(getattr(meshpar, name) is not None for name in meshpar.__all__)
    assert dir(meshpar) == sorted(meshpar.__all__)


@pytest.mark.parametrize("name", [*meshpar._MOVED, *meshpar._RENAMED])
def test_a_former_name_says_where_it_is(name):
    with pytest.warns(DeprecationWarning, match=f"meshpar.{name} is now ") as found:
        value = getattr(meshpar, name)
    new = str(found[0].message).partition(" is now ")[2].partition(",")[0]
    room, _, last = new.rpartition(".")
    __import__(room)
    assert getattr(sys.modules[room], last) is value


def test_a_name_that_never_was_is_no_name():
    with pytest.raises(AttributeError, match="no attribute 'lowered'"):
        meshpar.lowered  # noqa: B018


def test_checkpoints_are_imported_where_they_are_used():
    code = (
        "import sys, meshpar; assert 'orbax' not in sys.modules; "
        "meshpar.checkpoint.Checkpoints; assert 'orbax.checkpoint' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_notebook_shows_a_model_a_program_and_plans_in_some_lines():
    model, batch = tiny_models.model(), tiny_models.batch()
    program = tiny_models.lower("data=2,fsdp=2", model)
    options = dict(forbid="context", top=2)
    plans = meshpar.plan(model, optax.sgd(0.1), batch, jax.devices()[:4], **options)
    assert repr(model).startswith("Model(2 layers, ")
    assert repr(program) == "TrainProgram(data=2,fsdp=2,zero=3, lowering=shard_map)"
    title, *lines = repr(plans).splitlines()
    assert title.endswith("the fastest:")
    assert [line.split()[-1] for line in lines] == [str(c.layout) for c in plans.best]
