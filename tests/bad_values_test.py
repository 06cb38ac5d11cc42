"""Bad values of the library's API: errors with the value and a remedy, untraced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_models

import meshpar
from meshpar.errors import LayoutError, MeshparError, StalenessError, shown
from meshpar.layouts.layout import Layout
from meshpar.mesh.mesh import MAX_SIMULATED
from meshpar.schedules.published import make_schedule

REMEDY = "use|give|write|known|did you mean|come first|leave"


def says(error, *words):
    message = str(error.value)
    for word in words:
        assert word in message, message
    assert any(remedy in message for remedy in REMEDY.split("|")), message
    assert len(message) < 1000, message


@pytest.mark.parametrize(
    "text, words",
    [
        ("data=1," * 2000, ["14,000 characters", "at most 10,000"]),
        ("x" * 9000 + "=2", ["9,000 characters"]),
        ("data=" + "9" * 5000, ["5,000 characters", "whole number"]),
        ("data=1000000000000", ["data=1000000000000", "at most 1,048,576"]),
        ("microbatches=1000000000000", ["microbatches=1000000000000"]),
        ("pipe=2,virtual_stages=99999999", ["virtual_stages=99999999"]),
        ("data=0", ["data=0"]),
        ("data=-1", ["data='-1'"]),
        ("data=２", ["data='２'", "whole number"]),
        ("data=2.5", ["data='2.5'"]),
        ("dätä=2", ["'dätä'", "known: "]),
        ("数据=2", ["'数据'", "known"]),
        ("data=2,data=2", ["data is given twice"]),
        ("params.mlp=none,params.mlp=none", ["params.mlp is given twice"]),
        ('data=2,allow="\\q"', ["JSON quotes", "backslash"]),
        ('params."\\x"=none', ["JSON quotes"]),
        ('data=2,allow="a{99999999999}"', ["is not a regex"]),
        ('data=2,allow="' + "(" * 5000 + '"', ["is not a regex"]),
        ("remat=" + "x" * 5000, ["5,000 characters"]),
        ("schedule=" + "x" * 5000, ["schedule=", "5,000 characters"]),
        ("pipe=2,partition=" + "9" * 50, ["partition=", "3/3/2"]),
        ("params.mlp=" + "+".join(["x" * 3000] * 2), ["3,000 characters"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_layout_strings(text, words):
    with pytest.raises(LayoutError) as error:
        meshpar.layouts.parse(text)
    says(error, *words)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(data=True), ["data=True"]),
        (dict(data=2.0), ["data=2.0"]),
        (dict(fsdp="2"), ["fsdp='2'"]),
        (dict(tensor=10**12), ["tensor=1000000000000", "at most 1,048,576"]),
        (dict(min_shard_size=-1), ["min_shard_size=-1", "at least 0"]),
        (dict(min_shard_size=float("nan")), ["min_shard_size=nan"]),
        (dict(remat=None), ["remat=None", "'none'"]),
        (dict(schedule=3), ["schedule=3", "'auto'"]),
        (dict(partition=[3, 3]), ["partition=[3, 3]"]),
        (dict(allow=(3,)), ["3 is not a regex"]),
        (dict(params={"mlp": 3}), ["'mlp'", "3"]),
    ],
)
def test_fields_of_a_layout(fields, words):
    with pytest.raises(LayoutError) as error:
        Layout(**fields)
    says(error, *words)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(layout=None), ["layout=None", "Layout"]),
        (dict(layout=8), ["layout=8"]),
        (dict(layout="pipe=2,microbatches=1000000"), ["2,000,000 forward passes"]),
        (dict(model="llama"), ["model='llama'", "from_nnx"]),
        (dict(optimizer=None), ["optimizer=None", "optax"]),
        (dict(optimizer=1e-3), ["optimizer=0.001"]),
        (dict(clip_norm=float("nan")), ["clip_norm=nan"]),
        (dict(clip_norm=0), ["clip_norm=0"]),
        (dict(clip_norm=-1.0), ["clip_norm=-1.0"]),
        (dict(clip_norm="1"), ["clip_norm='1'"]),
        (dict(clip_norm=True), ["clip_norm=True"]),
        (dict(compute_dtype="float99"), ["compute_dtype='float99'"]),
        (dict(compute_dtype=jnp.int32), ["compute_dtype="]),
        (dict(lowering="shardmap"), ["did you mean 'shard_map'"]),
        (dict(mode="local_sgd"), ["mode='local_sgd'", "LocalSGD"]),
        (dict(devices=[]), ["devices=[]"]),
        (dict(devices=jax.devices()[:1] * 2, layout="data=2"), ["each of them once"]),
        (dict(batch={}), ["the batch is empty"]),
        (dict(batch={"tokens": [[1, 2]]}), ["batch['tokens'][0][0] is a int"]),
        (
            dict(batch={"tokens": np.int32(3)}),
            ["the batch is empty", "at least one array"],
        ),
        (dict(batch={"tokens": np.zeros((0, 16), np.int32)}), ["batch=0"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_arguments_of_lower(changes, words):
    arguments = dict(
        model=tiny_models.standard_model(),
        optimizer=optax.sgd(1e-2),
        layout="data=1",
        batch=tiny_models.batch(),
        devices=jax.devices()[:1],
    )
    with pytest.raises(ValueError) as error:
        meshpar.lower(**(arguments | changes))
    says(error, *words)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: meshpar.LocalSGD(period=0), ["period=0"]),
        (lambda: meshpar.LocalSGD(period=-4), ["period=-4"]),
        (lambda: meshpar.LocalSGD(period=2.5), ["period=2.5"]),
        (lambda: meshpar.LocalSGD(period=lambda step: 0), ["period=0"]),
        (lambda: meshpar.LocalSGD(staleness=-1), ["staleness=-1"]),
        (lambda: meshpar.LocalSGD(staleness=32), ["staleness=32 with period=32"]),
        (lambda: meshpar.LocalSGD(fragments=0), ["fragments=0"]),
        (lambda: meshpar.LocalSGD(fragments=10**12), ["fragments=1000000000000"]),
        (lambda: meshpar.LocalSGD(damping=float("nan")), ["damping=nan"]),
        (lambda: meshpar.LocalSGD(damping=float("inf")), ["damping=inf"]),
        (lambda: meshpar.LocalSGD(damping="1"), ["damping='1'"]),
        (lambda: meshpar.LocalSGD(wire="int3"), ["wire='int3'", "int8"]),
        (lambda: meshpar.LocalSGD(wire=8), ["wire=8"]),
        (lambda: meshpar.LocalSGD(wire="topk:nan"), ["wire='topk:nan'"]),
        (lambda: meshpar.LocalSGD(merge="shift"), ["merge='shift'", "Shift()"]),
        (lambda: meshpar.LocalSGD(outer="sgd"), ["outer='sgd'", "optax"]),
        (lambda: meshpar.LocalSGD(gossip="ring"), ["gossip='ring'", "Gossip"]),
        (lambda: meshpar.local_sgd.warm_up(-5, 32), ["warm_up(steps=-5)"]),
        (lambda: meshpar.local_sgd.warm_up(1.5, 32), ["warm_up(steps=1.5)"]),
        (lambda: meshpar.local_sgd.Lerp(float("nan")), ["Lerp(nan)"]),
        (lambda: meshpar.local_sgd.Lerp("half"), ["Lerp('half')"]),
        (lambda: meshpar.local_sgd.Elastic(float("inf")), ["Elastic(inf)"]),
        (lambda: meshpar.local_sgd.Elastic(-1), ["Elastic(-1)"]),
    ],
)
def test_settings_of_local_sgd(make, words):
    with pytest.raises(MeshparError) as error:
        make()
    says(error, *words)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: meshpar.local_sgd.Gossip("star"), ["'star'", "use ring"]),
        (lambda: meshpar.local_sgd.Gossip([]), ["at least one matrix"]),
        (lambda: meshpar.local_sgd.Gossip([["a", "b"]]), ["give one matrix"]),
        (lambda: meshpar.local_sgd.Gossip([[[1, 2], [3]]]), ["give one matrix"]),
        (lambda: meshpar.local_sgd.Gossip(5), ["gossip graph 5", "give one matrix"]),
        (lambda: meshpar.simulate(0), ["simulate(0)"]),
        (lambda: meshpar.simulate(-1), ["simulate(-1)"]),
        (lambda: meshpar.simulate(10**12), [f"1 to {MAX_SIMULATED:,}"]),
        (lambda: meshpar.simulate(2.0), ["simulate(2.0)"]),
        (lambda: meshpar.with_ema(optax.sgd(1.0), float("nan")), ["decay=nan"]),
        (lambda: meshpar.with_ema(optax.sgd(1.0), 1), ["decay=1"]),
        (lambda: make_schedule("gpipe", 2, 10**9), ["2,000,000,000 forward passes"]),
        (lambda: make_schedule("x" * 5000, 2, 4), ["5,000 characters"]),
        (lambda: meshpar.schedules.register("1f1b"), ["schedule=1f1b"]),
        (lambda: meshpar.schedules.register("a,b"), ["schedule='a,b'"]),
        (lambda: meshpar.mesh.topology("v5e:4"), ["topology='v5e:4'"]),
        (lambda: meshpar.mesh.topology(""), ["topology=''"]),
        (lambda: meshpar.mesh.topology("v5e:0x4"), ["topology='v5e:0x4'"]),
    ],
)
def test_other_values(make, words):
    with pytest.raises(MeshparError) as error:
        make()
    says(error, *words)


def test_a_gossip_matrix_with_nan_does_not_preserve_the_average():
    graph = meshpar.local_sgd.Gossip([[[float("nan"), 0.5], [0.5, 0.5]]])
    with pytest.raises(MeshparError, match="rows and columns have to sum to 1"):
        graph.rounds(2)


def test_the_largest_values_are_allowed():
    assert Layout(data=2**20).num_devices == 2**20
    assert meshpar.layouts.parse("data=2" + " " * 9000).data == 2
    assert meshpar.local_sgd.Elastic(1).alpha == 1 and meshpar.LocalSGD(damping=100)
    with pytest.raises(StalenessError):
        meshpar.LocalSGD(damping=100.1)


def test_long_texts_are_cut_and_short_ones_are_not():
    assert shown("x" * 160) == "x" * 160
    assert shown("x" * 161) == "x" * 160 + "... (161 characters)"
