"""Layers with rematerialization policies of their own: grammar and errors."""

import pytest

from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import average, is_mix, segments
from meshpar.layouts.remat import repeated_share


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("12*full+10*none", "12*full+10*none"),
        ("1*dots+2*experts+3*dots", "1*dots+2*experts+3*dots"),
        ("2*full+3*full+1*none", "5*full+1*none"),
        ("02*full+1*none", "2*full+1*none"),
    ],
)
def test_a_mix_is_written_in_one_way(text, canonical):
    layout = layouts.parse(f"fsdp=2,remat={text}")
    assert str(layout) == f"fsdp=2,zero=3,remat={canonical}"
    assert layouts.parse(str(layout)) == layout == Layout(fsdp=2, remat=canonical)


def test_segments_and_averages_read_uniform_policies_and_mixes_alike():
    assert segments("full", 8) == (("full", 8),)
    assert segments("names:A*2+B", 8) == (("names:A*2+B", 8),)
    assert segments("1*dots+2*full+3*dots", 6) == (
        ("dots", 1),
        ("full", 2),
        ("dots", 3),
    )
    bytes_of = {"full": 1, "none": 10}.get
    assert average("none", 7, bytes_of) == 10
    assert average("3*full+1*none", 4, bytes_of) == 13 / 4
    assert repeated_share("3*full+1*none", 4) == 3 / 4
    assert (repeated_share("dots", 4), repeated_share("none", 4)) == (1, 0)
    assert is_mix("3*full+1*none") and not is_mix("names:A*2+B")


@pytest.mark.parametrize(
    "remat, words",
    [
        ("0*full+2*none", ["remat=0*full+2*none", "'0*full'", "from 1 to 999999"]),
        ("-1*full+2*none", ["'-1*full'", "COUNT*POLICY", "12*full+10*none"]),
        ("1.5*full+2*none", ["'1.5*full'"]),
        ("1000000*full+2*none", ["'1000000*full'"]),
        ("full+none", ["'full'", "COUNT*POLICY"]),
        ("2*full+none", ["'none'", "COUNT*POLICY"]),
        ("2*full+", ["''", "COUNT*POLICY"]),
        ("full*2+none*2", ["'full*2'", "COUNT*POLICY"]),
        ("2*ful+2*none", ["'ful'", "did you mean 'full'"]),
        ("2*+2*none", ["''", "known: attention, dots, experts, full, none"]),
        (
            "2*names:A+2*none",
            ["'names:A'", "by name", "none, full, dots, attention, experts"],
        ),
        ("22*full", ["remat=22*full", "all 22 layers", "write remat=full"]),
        ("999999*full+1*full+1*none", ["1000000 layers in a row", "at most 999999"]),
        ("2*full+3*full", ["all 5 layers", "write remat=full"]),
        ("2*full+" * 600 + "2*none*", ["characters"]),
    ],
)
def test_a_mix_that_is_none_is_an_error(remat, words):
    with pytest.raises(LayoutError) as error:
        layouts.parse(f"remat={remat}")
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 1000


def test_stages_of_a_pipeline_have_one_policy():
    words = r"remat=1\*full\+1\*none with pipe=2: .* use one policy for all layers"
    with pytest.raises(LayoutError, match=words):
        layouts.parse("pipe=2,remat=1*full+1*none")
