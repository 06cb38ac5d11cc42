"""The command `experiments.scaling`: measured times, times of runs, predicted times."""

import json

import pytest
from support import commands

from experiments.recipes import step_times
from meshpar.errors import MeshparError


@pytest.fixture
def scaling(monkeypatch, capsys):
    return lambda *words: commands.run("scaling", words, monkeypatch, capsys)


def test_measured_times_and_a_picture(scaling, tmp_path):
    path = tmp_path / "speedup.png"
    outcome = scaling("--times=1:2.0,2:1.04,4:0.56,8:0.33", f"--png={path}")
    assert outcome.code == 0, outcome.err
    assert "amdahl: sigma 0.04575" in outcome.out and "N* = 26" in outcome.out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_times_of_runs_are_medians_of_their_steps(scaling, tmp_path):
    for n, seconds in ((2, 0.6), (4, 0.4)):
        (tmp_path / str(n)).mkdir()
        rows = [9.0, seconds, seconds, seconds]
        text = "".join(
            json.dumps({"step": i, "step_seconds": s}) + "\n"
            for i, s in enumerate(rows, 1)
        )
        (tmp_path / str(n) / "metrics.jsonl").write_text(text)
    outcome = scaling(f"--times=2:{tmp_path}/2,4:{tmp_path}/4", "--json")
    found = json.loads(outcome.out)
    assert found["times"] == {"2": 0.6, "4": 0.4}
    assert found["fits"]["amdahl"]["one_device"] == pytest.approx(1.0)
    assert found["fits"]["amdahl"]["sigma"] == pytest.approx(0.2)
    weak = json.loads(scaling("--times=1:1,10:1.0989011", "--weak", "--json").out)
    assert weak["fits"]["gustafson"]["serial"] == pytest.approx(0.1)


def test_predicted_times_grow_the_batch_with_weak(scaling, monkeypatch):
    asked = []

    def seconds(config, axis, topology):
        asked.append((config.batch_size, axis, topology))
        return (4, 1.0) if topology == "v5e:2x2" else (8, 0.6)

    monkeypatch.setattr(step_times, "seconds_per_step", seconds)
    words = "--recipe=tiny", "--set=model.vocab=256", "--topologies=v5e:2x2,v5e:2x4"
    assert scaling(*words, "--axis=fsdp").code == 0
    assert scaling(*words, "--weak", "--batch_size=2").code == 0
    assert asked == [
        *((16, "fsdp", name) for name in ("v5e:2x2", "v5e:2x4")),
        *((2 * n, "data", f"v5e:2x{n // 2}") for n in (4, 8)),
    ]


def test_the_axis_takes_the_devices_that_the_layout_leaves():
    layout = step_times.layout_over("tensor=2,remat=full", "fsdp", 16)
    assert (layout.fsdp, layout.tensor, layout.remat) == (8, 2, "full")
    assert step_times.layout_over("", "data", 4).data == 4
    with pytest.raises(MeshparError, match="fills 3 devices, which do not divide 16"):
        step_times.layout_over("tensor=3", "data", 16)
    with pytest.raises(MeshparError, match="layout='data=2' sets data"):
        step_times.layout_over("data=2", "data", 16)
    with pytest.raises(MeshparError, match="axis='dat'; .*did you mean 'data'"):
        step_times.layout_over("", "dat", 16)


def test_a_recipe_is_predicted_for_chips_that_are_not_present(scaling):
    words = "--recipe=tiny", "--set=model.vocab=256", "--topologies=v5e:2x2,v5e:2x4"
    outcome = scaling(*words, "--json")
    times = json.loads(outcome.out)["times"]
    assert times.keys() == {"4", "8"} and all(0 < t < 1 for t in times.values())


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give --times or --topologies"),
        (("--times=1:2,2:1", "--axis=bogus"), "--axis=bogus goes with --topologies"),
        (("--times=1:2", "--topologies=v5e:2x2"), "give --times or --topologies"),
        (("--times=1:2,1:3",), "each number of devices once"),
        (("--times=0:2",), "--times=0:2: write DEVICES:SECONDS"),
        (("--times=1:nowhere,2:1",), "nowhere is no number of seconds"),
        (("--times=1:2",), "at least 2"),
        (("--times=1:2,2:1", "--recipe=tiny"), "--recipe is not read"),
        (("--times=1:2,2:1", "--png=x.doc"), "no pictures are written as .doc"),
    ],
)
def test_words_that_cannot_be_meant(scaling, words, message):
    outcome = scaling(*words)
    assert outcome.code == 2 and message in outcome.err
