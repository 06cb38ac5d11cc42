"""The use of `tensor` by layers: grammar, errors and segments."""

import pytest

from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.layouts.layer_uses import FEATURES, ROWS, policies, runs, segments
from meshpar.layouts.layout import Layout


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("fsdp", ",layers=fsdp"),
        ("tensor", ""),
        ("1*tensor+2*fsdp+1*fsdp", ",layers=1*tensor+3*fsdp"),
    ],
)
def test_a_use_is_written_in_one_way(text, canonical):
    layout = layouts.parse(f"fsdp=2,tensor=2,layers={text}")
    assert str(layout) == f"fsdp=2,tensor=2,zero=3{canonical}"
    assert layouts.parse(str(layout)) == layout
    assert layout == Layout(fsdp=2, tensor=2, layers=layout.layers)


@pytest.mark.parametrize(
    "text, words",
    [
        ("tensor=2,layers=fdsp", ["layers='fdsp'", "did you mean 'fsdp'"]),
        ("tensor=2,layers=2*full+2*fsdp", ["'full'", "known: fsdp, tensor"]),
        ("tensor=2,layers=2*fsdp+2*fsdp", ["all 4 layers one use", "layers=fsdp"]),
        ("tensor=2,layers=fsdp+tensor", ["COUNT*USE", "12*tensor+10*fsdp"]),
        ("fsdp=2,layers=fsdp", ["layers=fsdp", "tensor=1", "add tensor=N"]),
        ("fsdp=2,tensor=2,zero=2,layers=fsdp", ["with zero=2", "use zero=3"]),
        ("pipe=2,tensor=2,layers=fsdp", ["with pipe=2", "leave layers out"]),
        ("expert=2,tensor=2,layers=fsdp", ["with expert=2"]),
        ("context=2,tensor=2,layers=1*tensor+1*fsdp", ["with context=2"]),
        ("tensor=2,layers=fsdp,offload=optimizer", ["with offload"]),
    ],
)
def test_what_does_not_go_together_is_an_error(text, words):
    with pytest.raises(LayoutError) as error:
        layouts.parse(text)
    for word in words:
        assert word in str(error.value)


def test_batches_divide_over_the_devices_that_split_rows():
    layout = layouts.parse("fsdp=2,tensor=4,layers=1*tensor+1*fsdp,microbatches=2")
    layout.check_batch_size(32)
    words = r"batch=8 does not divide over fsdp\*tensor\*microbatches=2\*4\*2=16"
    with pytest.raises(LayoutError, match=words):
        layout.check_batch_size(8)
    layouts.parse("fsdp=2,tensor=4,microbatches=2").check_batch_size(8)


def test_segments_are_runs_of_layers_with_one_use_and_one_policy():
    found = segments("3*tensor+2*fsdp", "1*full+4*none", 5)
    assert found == (
        (FEATURES, "full", 1),
        (FEATURES, "none", 2),
        (ROWS, "none", 2),
    )
    assert policies("3*tensor+2*fsdp", "1*full+4*none", 5) == (("full", 1), ("none", 2))
    assert segments(ROWS, "full", 4) == ((ROWS, "full", 4),)
    assert policies(ROWS, "full", 4) == ()


def test_activations_change_where_neighbours_differ_in_their_use():
    def changes(layers, remat="none"):
        return [(run.enters, run.exits) for run in runs(layers, remat, 4)]

    assert changes(FEATURES) == [(False, False)]
    assert changes(ROWS) == [(True, True)]
    assert changes("1*tensor+3*fsdp") == [(False, False), (True, True)]
    # Policies of their own change nothing.
    assert changes(ROWS, "1*full+3*none") == [(True, False), (False, True)]
