"""Settings: ranges and helps hang on the fields, and everything reads them there."""

import dataclasses
from typing import Annotated

import numpy as np
import pytest

import meshpar
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import SETTINGS, Config
from meshpar.errors import MeshparError
from meshpar.islands import Islands
from meshpar.runs.modes import IslandsConfig, LocalSGDConfig
from meshpar.settings import Choice, Number, check, helps, ranges, real


@dataclasses.dataclass(frozen=True)
class Ship:
    """A ship.

    Attributes:
      masts: number of masts,
        all of them upright.
      rig: "gaff" or "lug".
      name: any text.

    Raises:
      Storm: always.
    """

    masts: Annotated[int, Number(1, 7, "masts")] = 2
    rig: Annotated[str, Choice(("gaff", "lug"))] = "gaff"
    name: str = "Ann"


def test_ranges_and_helps_are_read_from_the_field():
    assert ranges(Ship) == {
        "masts": Number(1, 7, "masts"),
        "rig": Choice(("gaff", "lug")),
    }
    assert helps(Ship) == {
        "masts": "number of masts, all of them upright.",
        "rig": '"gaff" or "lug".',
        "name": "any text.",
    }


def test_a_check_names_the_field_the_value_and_the_remedy():
    check(Ship(masts=np.int64(7)))
    with pytest.raises(MeshparError) as error:
        check(Ship(masts=8), "ship: ")
    remedy = "use a whole number of masts, at least 1 and at most 7"
    assert str(error.value) == f"ship: masts=8: {remedy}"
    with pytest.raises(MeshparError, match="rig='lugg': use gaff or lug; did you mean"):
        check(Ship(rig="lugg"))
    check(Ship(rig="lugg"), but=["rig"])


@pytest.mark.parametrize("value", [float("nan"), True, "1", None, 1 + 0j])
def test_no_range_of_numbers_allows_what_is_no_number(value):
    assert not real(0, 2).allows(value)


@pytest.mark.parametrize("kind", [Islands, meshpar.LocalSGD, DecoderConfig])
def test_every_field_has_a_range_and_a_help_and_no_help_is_left_over(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    assert list(ranges(kind)) == names
    assert helps(kind).keys() == set(names)
    check(kind())


@pytest.mark.parametrize(
    "mode, settings, texts",
    [
        (Islands, IslandsConfig, {"consistency", "filters"}),
        (meshpar.LocalSGD, LocalSGDConfig, {"outer", "merge", "gossip"}),
    ],
)
def test_settings_of_a_mode_are_those_of_the_library(mode, settings, texts):
    """Name, default and range of all but the texts that stand for objects."""
    for field in dataclasses.fields(mode):
        assert field.name in ranges(settings)
        if field.name not in texts:
            assert getattr(settings, field.name) == field.default
            assert ranges(settings)[field.name] == ranges(mode)[field.name]
            assert helps(settings)[field.name] == helps(mode)[field.name]


def test_keys_say_the_defaults_of_a_run_without_a_recipe():
    assert SETTINGS["model.vocab"].default == 0 == Config("none").model.vocab
    assert SETTINGS["recipe"].default is None
    assert SETTINGS["islands.push"].help == helps(Islands)["push"]


def test_identities_of_modes_are_those_of_older_checkpoints():
    """A run that was saved by an older version resumes, so the texts may not change."""
    assert Islands(quorum=2).identity() == (
        "islands {'workers': 2, 'algorithm': 'downpour', 'consistency': "
        "SSP(staleness=1), 'fetch': 1, 'push': 1, 'server_optimizer': 'adagrad', "
        "'learning_rate': 0.02, 'momentum': 0.9, 'local_learning_rate': 0.01, "
        "'alpha': 0.1, 'compensation': 0.04, 'warm_start': 0, 'quorum': 2, "
        "'wire': 'f32', 'error_feedback': True, 'ranges': 4}"
    )
    assert meshpar.LocalSGD(8, 2).identity() == (
        "period=8, {'staleness': 2, 'fragments': 1, 'merge': Shift(), 'wire': 'f32', "
        "'error_feedback': True, 'gossip': None, 'damping': 0.0}, outer=average"
    )
