"""The plan command: tables, JSON, a picture, and bad flags before any work."""

import dataclasses
import html
import json
import re
import statistics

import jax
import optax
import pytest
from support import commands, tiny_stack
from support.explanations import explanation

import meshpar
from experiments import recipes
from meshpar.commands.reports import plan_page
from meshpar.errors import ConfigError
from meshpar.mesh.machine import machine_of
from meshpar.runs import metrics, planned_layout
from meshpar.runs.config import with_settings


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *words: commands.run("plan", words, monkeypatch, capsys)


OWN = f"--recipe={commands.ROOT}/tests/support/own_run.py:net", "--devices=2"
PLAN = "--recipe=tiny", "--devices=4", "--set=model.vocab=64", "--forbid=pipe"


def test_plans_are_listed_drawn_and_written_as_page_and_json(tmp_path, command):
    picture, page = tmp_path / "plan.png", tmp_path / "plan.html"
    words = *PLAN, "--top=2", "--require=zero=3,remat=full"
    done = command(*words, f"--png={picture}", f"--html={page}")
    assert done.code == 0, done.err
    assert "predicted to be fastest" in done.out and "refused" in done.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<h1>tiny, " in text and "<svg" in text
    assert "mathdefault" not in text and "currentColor" in text
    assert ", require=zero=3,remat=full, forbid=pipe</title>" in text
    plans = json.loads(command(*words, "--json").out)
    assert len(plans["best"]) == 2 and plans["devices"] == 4 and plans["refused"]
    for candidate in plans["best"]:
        assert f"<td>{candidate['layout']}</td>" in text
        assert "remat=full" in candidate["layout"]
        assert sum(candidate["seconds"].values()) == pytest.approx(
            2 * candidate["seconds"]["total"]
        )
    for reason, count in plans["refused"].items():
        assert f'<td class="number">{count}</td><td>{html.escape(reason)}</td>' in text


@pytest.mark.slow
def test_a_page_says_what_is_wrong_with_compiled_layouts(tmp_path):
    plans = meshpar.plan(
        tiny_stack.model(), optax.adam(1e-3), tiny_stack.batch(), jax.devices()[:2]
    )
    good = explanation("fsdp=2", 5e6)
    path, budget = tmp_path / "page.html", plans.machine.memory_bytes

    def verdicts(*compiled):
        plan_page.write(path, "a stack", plans, compiled, 3)
        return re.findall(r'<p class="(good|bad)">(.*?)</p>', path.read_text())

    ((kind, _),) = verdicts(good)
    assert kind == "good"
    large = dataclasses.replace(good, compiled_bytes={"peak": 2 * budget})
    ((kind, line),) = verdicts(good, large)
    assert kind == "bad" and line.startswith("fsdp=2: needs ")
    broken = dataclasses.replace(good, violations=("one all_gather too many",))
    assert verdicts(broken) == [("bad", "fsdp=2: one all_gather too many")]


BAD = {
    "memory=a lot": "--memory=a lot: write a size such as 60GB",
    "memory=0GB": "write a size such as 60GB",
    "layout=fsdp=4": "a plan looks for the layout",
    "topology=v9:4x4": "write one such as",
    "set=layout=fsdp=4": "a plan looks for the layout; ask for parts of it",
    "lowering=jit": "the planner predicts shard_map programs",
    "set=lowering=jit": "the planner predicts shard_map programs",
    "optimizer_mode=local_sgd": "the planner predicts synchronous training",
    "set=optimizer_mode=local_sgd": "the planner predicts synchronous training",
    "seed=3": "--seed is not read by this command; leave it out",
    "topology=v5e:2x2": "--devices is not read by this command with these flags",
    "forbid=pip": "forbid=pip: layouts have",
    "memory=1MB": "the smallest, ",
}


@pytest.mark.parametrize("flag", BAD)
def test_bad_flags_are_refused_with_the_remedy(flag, command):
    small = ["--set=model.embed=512", "--set=model.mlp=2048"] if "1MB" in flag else []
    base = [word for word in PLAN if "v9" not in flag or "--devices" not in word]
    done = command(*base, *small, f"--{flag}")
    assert done.code == 2 and BAD[flag] in done.err


@pytest.fixture
def auto(tmp_path, monkeypatch, capsys):
    """A run of --layout=auto in tmp_path/run."""
    words = *OWN, f"--workdir={tmp_path / 'run'}", "--layout=auto"
    return lambda *more: commands.run("run", [*words, *more], monkeypatch, capsys)


def test_a_plan_is_of_a_model_a_file_and_the_planners_code(tmp_path, monkeypatch):
    path = tmp_path / "my_run.py"
    path.write_text((commands.ROOT / "tests/support/own_run.py").read_text())
    machine = machine_of(jax.devices()[:2])

    def facts(*settings):
        config = with_settings(recipes.get(f"{path}:net"), settings)
        return planned_layout.facts_of(*config.prepared(), machine)

    first = facts()
    assert facts("steps=9", "seed=3") == first
    path.write_text(path.read_text().replace("8, width", "8, 2 * width"))
    assert {name for name, x in facts().items() if x != first[name]} == {
        "code",
        "shapes",
    }
    monkeypatch.setattr(planned_layout, "code_hash", lambda *_: "new")
    assert facts()["code"].startswith("new ")


def test_a_run_takes_the_planners_layout_and_goes_on_with_it(auto, tmp_path, command):
    first = auto("--steps=12")
    assert first.code == 0, first.err
    took = re.search(r"layout=auto took (\S+): predicted", first.out)[1]
    planned = planned_layout.read(tmp_path / "run")
    again = auto("--steps=13")
    assert f"layout=auto goes on with {took}: predicted" in again.out, again.err
    assert float(re.search(r"its steps took (\S+) times as long", again.out)[1]) > 0
    # Other facts: another plan, and what has changed is said.
    other = auto("--steps=14", "--batch_size=4")
    assert other.code == 0, other.err
    assert "layout=auto plans again: batch_size was " in other.out
    # The planner takes the measured steps as they are.
    words = "--top=1", "--json", f"--measured={tmp_path / 'run'}"
    slower = json.loads(command(*OWN, *words).out)
    rows = metrics.read(tmp_path / "run" / metrics.METRICS)
    ratios = [x["step_over_predicted"] for x in rows if "step_over_predicted" in x]
    assert slower["slowdown"] == pytest.approx(statistics.median(ratios))
    (best,) = slower["best"]
    assert best["layout"] == planned.layout == took
    seconds = slower["slowdown"] * planned.seconds
    assert best["seconds"]["total"] == pytest.approx(seconds)


def _run_folder(folder, ratios, devices="2 of cpu"):
    folder.mkdir()
    planned_layout.PlannedLayout("data=2", 0.5, 1, 1, {"devices": devices}).write(
        folder
    )
    rows = [{"step": i, "step_over_predicted": r} for i, r in enumerate(ratios)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / metrics.METRICS).write_text(text)
    return str(folder)


def test_measured_steps_are_medians_of_runs_on_such_devices(tmp_path):
    slow = _run_folder(tmp_path / "slow", [4.0] * 10 + [100.0])
    fast = _run_folder(tmp_path / "fast", [1.0] * 10)
    assert planned_layout.measured([slow, fast], "cpu") == pytest.approx(2.0)
    few = _run_folder(tmp_path / "few", [1.0] * 9)
    with pytest.raises(ConfigError, match="10 steps .*; metrics.jsonl has none"):
        planned_layout.measured([few], "cpu")
    with pytest.raises(ConfigError, match="plan.json has none"):
        planned_layout.measured([str(tmp_path / "none")], "cpu")
    with pytest.raises(ConfigError, match="was on cpu, and the plan is for TPU v5p"):
        planned_layout.measured([slow], "TPU v5p")


def test_a_broken_plan_is_made_again(tmp_path):
    folder = tmp_path / "run"
    _run_folder(folder, [])
    assert planned_layout.read(folder).layout == "data=2"
    for text in ("{", "[]", '{"layout": "data=2"}'):
        (folder / planned_layout.FILE).write_text(text)
        assert planned_layout.read(folder) is None
    unknown = planned_layout.PlannedLayout("rows=2", 0.5, 1, 1, {})
    unknown.write(folder)
    assert planned_layout.read(folder) is None
