"""explain: reports match the compiled program; lowering="auto" takes the better."""

import html.parser
import json
import os

import jax
import pytest
from support import commands
from support.marks import slow
from support.tiny_models import lower, model

from meshpar.commands.reports import page, pictures
from meshpar.contracts import collective, compiler_log
from meshpar.contracts.step_time import StepTime
from meshpar.explain.report import explain
from meshpar.lowering import auto
from meshpar.mesh import chips

TINY = model()


def test_says_what_was_declared_and_found():
    program = lower("fsdp=8", TINY, clip_norm=1.0)
    said = explain(program)
    assert said.violations == () and said.lowering == "shard_map"
    assert said.replicated == {}
    rows = {(row.kind, row.axes): row for row in said.traffic}
    gather = rows["all_gather", ("fsdp",)]
    assert gather.declared_bytes == gather.found_bytes > 0
    layers = "zero=3: weights: layer by layer"
    assert {layers, f"{layers}, backward"} < set(gather.why)
    assert said.shares.exactly == "99.9%" and said.shares.undeclared == 0
    found = sum(one.wire_bytes for one in program.collectives)
    assert sum(row.found_bytes for row in said.traffic) == pytest.approx(found)
    assert said.state_bytes == sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in (*program.init(0).params.values(), *_optimizer(program))
    )
    json.dumps(said.as_dict())


def test_says_what_a_pipeline_does(tmp_path):
    program = lower("pipe=2,fsdp=2,microbatches=4", model(depth=4))
    report = explain(program)
    said = report.pipeline
    assert (said.schedule, said.layers, said.ticks) == ("1f1b", (2, 2), 6)
    assert "schedule=auto took 1f1b" in report.why_auto
    assert said.bubble == pytest.approx(said.formula[0]) == pytest.approx(0.2)
    assert said.formula[1] == "(P-1)/(M+P-1)" and said.in_flight == (3, 1)
    assert said.sends == sum(
        c.executions
        for c in program.collectives
        if c.axes == ("pipe",)
        if c.kind == "permute"
    )
    x = 16 // 2 // 4 * 16 * 32 * 4  # Rows of a microbatch, length, embed, float32.
    assert 4 * x <= said.saved_bytes <= 10 * x
    json.dumps(report.as_dict())
    figure = pictures.schedule_figure(said)
    boxes = figure.axes[0].patches
    assert len(boxes) == len(said.ops) == 2 * 2 * 4
    figure.savefig(tmp_path / "schedule.png")
    page.write(tmp_path / "page.html", "tiny", [report], "plan --x=1")
    written = (tmp_path / "page.html").read_text()
    assert "Stage inputs in flight: 3, 1" in written and "plan --x=1" in written
    assert explain(lower("fsdp=2", TINY)).pipeline is None


def _optimizer(program):
    return jax.tree.leaves(program.init(0).optimizer_state)


def test_says_what_is_replicated_and_warns():
    program = lower("fsdp=2,min_shard_size=100", TINY)
    said = explain(program)
    assert "32 < min_shard_size=100" in said.replicated["norm/scale"]
    one = collective.Collective(
        "all_reduce", ("fsdp",), 2, 64, 1000, False, False, "main", "a.py:7"
    )
    stack = model().params["blocks/mlp/up"].size * 4
    whole = collective.Collective(
        "all_gather", ("fsdp",), 2, stack, 1, False, False, "main", "a.py:9"
    )
    compilation = program.inspection._compilation._replace(collectives=[one, whole])
    program.inspection.__dict__["_compilation"] = compilation
    said = explain(program)
    small, gather = sorted(said.warnings, reverse=True)
    assert (
        small.startswith("uncombined: 1000 x all_reduce over fsdp")
        and "a.py:7" in small
    )
    assert (
        gather.startswith("gather of a whole stack of weights") and "a.py:9" in gather
    )
    assert any("all_reduce over fsdp" in line for line in said.violations)


def test_involuntary_rematerialization_is_named(capfd):
    line = (
        "W spmd_partitioner.cc:1 [SPMD] Involuntary full rematerialization. The "
        "compiler cannot go from {a} to {b} for HLO operation: %copy.3 = f32[8]{0} "
        'copy(%x), metadata={op_name="jit(f)/layer/reshape"}'
    )
    with compiler_log.captured_log() as log:
        os.write(2, f"{line}\n{line}\nanother line\n".encode())
    (warning,) = compiler_log.rematerialized(log)
    assert warning == "involuntary full rematerialization of jit(f)/layer/reshape"
    assert capfd.readouterr().err.splitlines() == log == [line, line, "another line"]


def test_auto_takes_the_program_that_takes_less_time_or_exposes_less():
    program = lower("fsdp=8", TINY, lowering="auto")
    assert program.lowering.name == "shard_map"
    assert "jit exposes" in program.why_auto
    assert "took shard_map" in program.why_auto
    assert "compiler_log" in vars(
        program.inspection
    )  # Kept for `explain`, which comes too late.
    other = lower("fsdp=8", TINY, lowering="jit")
    assert program.inspection.exposed_bytes < other.inspection.exposed_bytes
    chosen = auto.pick_lowering([other, program])
    assert chosen.inspection is program.inspection
    # Where the compiler says what instructions take, time decides.
    for one, seconds in ((program, 1.0), (other, 0.9)):
        time = StepTime(0, seconds, 0.05, 0.05)
        one.inspection.__dict__["time"] = time
    chosen = auto.pick_lowering([other, program])
    assert chosen.inspection is other.inspection
    assert "jit needs 950.0 ms" in chosen.why_auto


@pytest.mark.parametrize("remat, kept", [slow("none", 10), ("full", 1)])
def test_predicted_activations_follow_rematerialization(remat, kept):
    program = lower(f"fsdp=2,remat={remat}", TINY)
    predicted = program.lowering.memory(program.abstract_batch)
    x = 8 * 16 * 32 * 4  # Rows of one device, length, embed, float32.
    assert predicted.activations >= 2 * kept * x
    assert (predicted.activations < 3 * x) == (remat == "full")
    sizes = program.plan.bytes_per_device()
    assert predicted.parameters == sizes["parameters"]
    assert predicted.optimizer == sizes["optimizer"]


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and v[:1] != "#"]


def test_the_program_prints_json_and_writes_a_page_of_its_own(
    tmp_path, monkeypatch, capsys
):
    page = tmp_path / "page.html"
    flags = ["--recipe=tiny", "--set=model.vocab=64", f"--html={page}"]
    flags += ["--layout=fsdp=4", "--diff=data=4", "--devices=4", "--json"]
    done = commands.run("explain", flags, monkeypatch, capsys)
    assert done.code == 0, done.err
    one, other = json.loads(done.out)
    assert (one["layout"], other["layout"]) == ("fsdp=4,zero=3", "data=4")
    assert one["state_bytes"] < other["state_bytes"] / 3
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.links == [] and tags.seen.count("svg") == 4
    assert "zero=3: weights: layer by layer, backward" in page.read_text()


def test_steps_of_several_batch_sizes_are_put_under_the_roofline_of_a_chip(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(chips, "chip_of", lambda kind: chips.CHIPS["v5e"])
    html, text = tmp_path / "page.html", ["--recipe=tiny", "--set=model.vocab=64"]
    flags = [*text, "--layout=data=2", "--devices=2", "--parameters=false"]

    def command(*words):
        return commands.run("explain", [*flags, *words], monkeypatch, capsys)

    wrong = command("--roofline=4,7")
    assert wrong.code == 2 and "7" in wrong.err and wrong.compilations == 0
    done = command("--roofline=32,8", f"--html={html}", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["roofline"]
    few, many = (found["rows"][rows] for rows in ("8", "32"))
    # 6 N T, and 12 L S D T of the scores of attention, of half a row of 32 tokens.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    matmuls = 32 / 2 * (6 * (2 * layer + 64 * 32) + 12 * 2 * 32 * 32)
    more = (many["flops"] - few["flops"]) / (32 - 8) / matmuls
    assert 1 < more < 1.2 and few["moved"] < many["moved"] < 4 * few["moved"]
    assert found["chip"] == "v5e" and found["words"] in html.read_text()
