"""Starting many processes, and finding the odd one."""

import pytest

from meshpar import multihost
from meshpar.multihost import MultihostError, odd_ones


def test_launched_from_flags_or_environment(monkeypatch):
    assert multihost.launched() is None
    assert multihost.launched("host:1", 4, 2) == ("host:1", 4, 2)
    monkeypatch.setenv("MESHPAR_COORDINATOR", "here:2")
    with pytest.raises(MultihostError, match="MESHPAR_NUM_PROCESSES"):
        multihost.launched()
    monkeypatch.setenv("MESHPAR_NUM_PROCESSES", "2")
    monkeypatch.setenv("MESHPAR_PROCESS_ID", "1")
    assert multihost.launched() == ("here:2", 2, 1)
    assert multihost.launched("flag:3", 8, 7) == ("flag:3", 8, 7)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("host:1", 0, -1), "give all three or none"),
        (("", 2, 0), "give all three or none"),
        (("host:1", 2, 2), "process_id=2 is not one of num_processes=2"),
    ],
)
def test_half_a_launch_is_an_error(arguments, words):
    with pytest.raises(MultihostError, match=words):
        multihost.launched(*arguments)


def test_single_process_needs_no_others():
    multihost.initialize(("nowhere:1", 1, 0))
    multihost.check_fingerprint({"a": 1})


def test_odd_process_and_field_are_named():
    same = {"seed": "0", "jax": "1"}
    assert odd_ones({p: same for p in range(4)}) == []
    odd = {0: same, 1: same, 2: {**same, "seed": "7"}, 3: same}
    assert odd_ones(odd) == ["seed: process 2 has '7', the others '0'"]
    split = {0: same, 1: {**same, "jax": "2"}}
    assert odd_ones(split) == ["jax: process 0 has '1', process 1 has '2'"]
    lacking = {0: same, 1: same, 2: {"jax": "1"}}
    assert odd_ones(lacking) == ["seed: process 2 has 'nothing', the others '0'"]
