"""Axis records: every list of axes follows them, and a new axis is one record."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

import meshpar
from meshpar import layouts
from meshpar.layouts import axes, layout

PACKAGE = pathlib.Path(meshpar.__file__).parent


def test_names_follow_the_records():
    assert axes.AXES == (
        "replica",
        "pipe",
        "data",
        "fsdp",
        "expert",
        "context",
        "tensor",
    )
    rows = ("data", "fsdp", "expert")
    assert axes.BATCH_DIMS == {"batch": rows, "length": ("context",)}
    assert axes.BATCH_AXES == rows
    assert axes.TOKEN_AXES == (*rows, "context")
    assert axes.SLOW_AXES == ("replica", "pipe", "data")
    assert axes.GATHERED_AXES == ("fsdp",)
    assert axes.HELD_AXES == ("pipe", "expert", "tensor")
    assert axes.MANUAL_AXES == ("replica", "pipe", "data", "fsdp", "expert", "context")
    for record in axes.RECORDS:
        assert record.doc and "\n" not in record.doc


def test_batch_spec_names_the_axes_of_each_dim(monkeypatch):
    some = layouts.parse("data=2,tensor=2")
    assert some.batch_spec(0) == ()
    rows = ("data", "fsdp", "expert")
    assert some.batch_spec(1) == (rows,)
    assert some.batch_spec(3) == (rows, ("context",), ())
    monkeypatch.setitem(axes.BATCH_DIMS, "length", ("tensor",))
    assert some.batch_spec(1) == (rows,)
    assert some.batch_spec(3) == (rows, ("tensor",), ())


@pytest.mark.parametrize("names", [axes.AXES[:-1], (*axes.AXES, "island")])
def test_a_record_without_a_layout_field_is_an_error_at_import(names, monkeypatch):
    monkeypatch.setattr(axes, "AXES", names)
    spec = importlib.util.spec_from_file_location("layout_copy", layout.__file__)
    with pytest.raises(AssertionError, match="one field per record.*in their order"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


NEW_AXIS = """
from jax.sharding import PartitionSpec
import jax.numpy as jnp
import meshpar
from meshpar import layouts

meshpar.simulate(8)
layout = layouts.parse("data=2,island=2,tensor=2")
assert str(layout) == "data=2,island=2,tensor=2"
assert layout.num_devices == 8 and layout.num_token_shards == 4
rows = "data", "fsdp", "expert"
assert layout.batch_spec(3) == (rows, ("context", "island"), ())
mesh = meshpar.mesh.make_mesh(layout)
assert mesh.shape["island"] == 2
with layouts.use(layout, mesh):
    x_BLF = layouts.constrain(jnp.ones((4, 8, 6)), "batch", "length", "mlp")
assert x_BLF.sharding.spec == PartitionSpec("data", "island", "tensor")
"""


def test_a_new_axis_is_one_record_and_one_layout_field(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "meshpar")
    for name, before, new in (
        (
            "axes",
            "    Axis(\n        TENSOR,",
            '    Axis("island", "splits the length", splits_batch=("length",)),\n',
        ),
        ("layout", "    tensor: int = 1\n", "    island: int = 1\n"),
    ):
        path = tmp_path / "meshpar" / "layouts" / f"{name}.py"
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, new + before))
    program = tmp_path / "program.py"
    program.write_text(NEW_AXIS)
    run = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
