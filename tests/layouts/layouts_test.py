"""Layouts: strings, equality, defaults and rules."""

import dataclasses

import pytest

from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.layouts import grammar
from meshpar.layouts.layout import Layout


@pytest.mark.parametrize(
    "text",
    [
        "data=1",
        "data=2,fsdp=2,tensor=2,zero=3",
        "fsdp=8,zero=1,microbatches=4,remat=full,min_shard_size=1024",
        'fsdp=2,zero=3,prefetch="attention/[qkv]",prefetch=mlp',
        "tensor=2,params.embed=data+tensor,params.mlp=none,activations.length=tensor",
        r'data=1,paths."blocks/\\d+,x=[\"a\"]"=embed/none/heads,allow=bias$,allow=idle_devices',
    ],
)
def test_string_round_trip(text):
    layout = layouts.parse(text)
    assert str(layout) == text
    assert layouts.parse(str(layout)) == layout
    assert hash(layout) == hash(layouts.parse(text))


def test_mapping_and_string_give_equal_layouts():
    layout = Layout(
        fsdp=2,
        params={"mlp": ("fsdp", "tensor"), "embed": None},
        paths={"w.*": ("embed", None)},
        allow="b",
    )
    text = (
        "fsdp=2,params.mlp=fsdp+tensor,params.embed=none,paths.w.*=embed/none,allow=b"
    )
    assert layouts.parse(text) == layout


@pytest.mark.parametrize(
    "layout, text",
    [
        (Layout(fsdp=2), "fsdp=2,zero=3"),
        (Layout(fsdp=2, pipe=2), "pipe=2,fsdp=2,zero=2"),
        (Layout(zero=3), "data=1"),
        (Layout(data=2, schedule="auto", remat="none"), " data=2 , microbatches=1 "),
        (Layout(params={"mlp": "data"}), "params.mlp=data"),
        (Layout(params=(("mlp", ("data",)),)), "params.mlp=data"),
    ],
)
def test_layouts_are_equal_by_meaning(layout, text):
    assert layout == layouts.parse(text) == layouts.parse(str(layout))
    assert hash(layout) == hash(layouts.parse(text))
    assert layout != dataclasses.replace(layout, data=4)
    assert layout != str(layout)


def test_default_zero_level_follows_a_replaced_field():
    replaced = dataclasses.replace(layouts.parse("fsdp=4"), pipe=2)
    assert replaced == layouts.parse("fsdp=4,pipe=2")
    assert replaced.zero is None and replaced.zero_level == 2
    assert Layout(fsdp=4).zero is None and Layout(fsdp=4).zero_level == 3
    assert Layout(fsdp=4, zero=1).zero_level == 1


@pytest.mark.parametrize(
    "former, text",
    [
        ("pipe=2,stash=residuals", "pipe=2,save=residuals"),
        ("pipe=2,control=uniform", "pipe=2,tick_loop=uniform"),
        ("data=2,waive=idle_devices,waive=b", "data=2,allow=idle_devices,allow=b"),
    ],
)
def test_former_option_names_parse_with_one_warning(former, text, caplog):
    grammar._current_name.cache_clear()
    layout = layouts.parse(text)
    assert not caplog.records
    assert layouts.parse(former) == layouts.parse(former) == layout
    assert str(layout) == text
    [record] = caplog.records
    old, new = (t.split(",")[1].split("=")[0] for t in (former, text))
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"layout option {old}= is now called {new}="


def test_former_and_new_name_of_an_option_together_are_an_error():
    with pytest.raises(LayoutError, match="save is given twice"):
        layouts.parse("pipe=2,stash=residuals,save=residuals")


@pytest.mark.parametrize(
    "text, words",
    [
        ("date=2", ["'date'", "did you mean 'data'"]),
        ("data", ["'data'", "name=value"]),
        ("data=two", ["data='two'", "whole number"]),
        ("data=0", ["data=0", "at least 1"]),
        ("data=-2", ["data='-2'"]),
        ("data=2,data=2", ["data is given twice"]),
        ("data=2 fsdp=2", ["whole number"]),
        ("data=2,,fsdp=2", ["name=value"]),
        ("fsdp=2,zero=4", ["zero=4", "1, 2 or 3"]),
        ("fsdp=2,zero=0", ["zero=0", "1, 2 or 3"]),
        ("data=2,zero=1", ["zero=1 with fsdp=1", "This layout fits: fsdp=2,zero=1"]),
        ("remat=ful", ["remat='ful'", "did you mean 'full'"]),
        ("params.embed=tensr", ["'embed' -> 'tensr'", "did you mean 'tensor'"]),
        ("params=3", ["'params'"]),
        ('paths."["=embed', ["not a regex"]),
        ("params.mlp=fsdp+fsdp", ["once"]),
        (
            "data=2,save=residuals",
            ["save=residuals with pipe=1", "of pipelines", "add pipe=N"],
        ),
        ("pipe=2,schedule=1fb1", ["schedule='1fb1'", "did you mean '1f1b'"]),
        ("pipe=2,tick_loop=phase", ["tick_loop='phase'", "phases or uniform"]),
        ("pipe=2,partition=3-3", ["partition='3-3'", "as in 3/3/2"]),
        ("fsdp=2,zero=2,prefetch=mlp", ["prefetch=mlp with fsdp=2,zero=2", "zero=3"]),
        ("min_shard_size=x", ["min_shard_size='x'", "whole number"]),
    ],
)
def test_errors_of_strings_name_the_remedy(text, words):
    with pytest.raises(LayoutError) as error:
        layouts.parse(text)
    for word in words:
        assert word in str(error.value)


def test_batch_has_to_divide():
    layout = layouts.parse("data=2,fsdp=2,microbatches=2")
    layout.check_batch_size(16)
    with pytest.raises(LayoutError, match="multiple of 8 .the nearest is 8"):
        layout.check_batch_size(10)
    replicas = layouts.parse("replica=2,data=2")
    with pytest.raises(
        LayoutError, match=r"replica\*data\*microbatches=2\*2\*1=4; use"
    ):
        replicas.check_batch_size(2)
