"""Bad input to all commands: an error with the value and a remedy, before any work.

No traceback, the documented exit code, nothing compiled and nothing written. Values of
settings are made from the table of ranges, so a new field is covered at once.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support import bad_input, commands

from experiments import recipes
from experiments.recipes.allowed import RANGES, fields_of
from experiments.recipes.ranges import Choice, Number, Path, Switch, Text, Wire

MAX_SECONDS = 10
"""Most CPU time of one case; a case that reads and traces takes about one second."""

REMEDY = re.compile(
    r"\b(use|write|give|choose|add|leave|mend|convert|delete|install|change|known:|"
    r"set one of|did you mean|help lists|lists them|belongs to other|only .* supported)"
)

COMMON = ["--recipe=tiny", "--data={root}/text.txt"]
BASE = {
    "run": [*COMMON, "--workdir={cwd}/run"],
    "verify": COMMON,
    "explain": COMMON,
    "checkpoint": ["{cwd}/new", "--import={root}/../hugging_face_llama", *COMMON],
    "support": [],
    "local_sgd_sweep": [*COMMON, "--workdir={cwd}/sweep"],
    "benchmarks.step_overhead": COMMON,
    "benchmarks.ahead_of_time": COMMON,
    "benchmarks.pipeline_schedules": COMMON,
}
"""Words of every command that are fine; those of a case follow them."""


def bad_numbers(allowed):
    """(text, word of the message) outside of a range of numbers."""
    step = 1 if allowed.whole else max(abs(allowed.high), 1.0)
    yield str(allowed.low if allowed.above else allowed.low - step)
    yield str(allowed.high if allowed.below else allowed.high + step)
    yield from ("nan", "", "1.5" if allowed.whole else "1,5", "9" * 5000)
    yield from ("inf", "-inf", "1e999", "abc", "0x10", "None", "True", "--1")


BAD = {
    Number: bad_numbers,
    Choice: lambda allowed: ("nonsense", "x" * 5000, allowed.words[-1] + "x"),
    Switch: lambda _: ("", "yes", "2"),
    Text: lambda allowed: ("x" * (allowed.longest + 1), "a\x07b"),
    Path: lambda _: ("a" * 256, "/a" * 2500, "a\0b"),
    Wire: lambda _: ("", "int3", "topk:2", "topk:nan", "topk:", "x" * 5000),
}
"""{kind of range: its texts outside of the range}."""


NUM_QUICK = 6
"""Bad values of a field that are tried by default; the others are slow together."""


def settings(quick):
    """(command, words, pattern of the message) for every field of the configuration."""
    chosen = slice(NUM_QUICK) if quick else slice(NUM_QUICK, None)
    for key, allowed in RANGES.items():
        for text in list(BAD[type(allowed)](allowed))[chosen]:
            shown = text[:10].split("\0")[0].split("\x07")[0]
            yield "run", [f"--set={key}={text}"], f"{key}=.*{re.escape(shown)}"


SHARED = [
    (["--set=model.depth=0"], "model.depth=0: use"),
    (["--set=model.depth"], "write KEY=VALUE"),
    (["--set="], "write KEY=VALUE"),
    (["--set==4"], "no key ''.*known"),
    (["--set=model.=4"], "no key ''"),
    (["--set=model=4"], "set one of model.vocab"),
    (["--set=model.depth.x=4"], "has no parts"),
    (["--set=" + "x" * 5000 + "=4"], "5,000 characters"),
    (["--set=model.heads=3"], "heads=3.*heads must divide embed"),
    (["--set=model.loss_block=5"], "loss_block=5: use a divisor"),
    (["--steps=0"], "steps=0: use"),
    (["--steps=10000000000"], "steps=10000000000: use"),
    (["--steps=abc"], "--steps=abc.*--help"),
    (["--steps=1.5"], "--steps=1.5"),
    (["--batch_size=0"], "batch_size=0: use"),
    (["--batch_size=-4"], "batch_size=-4: use"),
    (["--seed=-1"], "seed=-1: use"),
    (["--seed=4294967296"], "seed=4294967296: use"),
    (["--recipe=tinny"], "did you mean 'tiny'"),
    (["--recipe="], "known"),
    (["--layout=dta=2"], "did you mean 'data'"),
    (["--layout=data=99999999999"], "data=99999999999: use at most"),
    (["--layout=data=0"], "data=0"),
    (["--layout=data=two"], "data='two'"),
    (["--layout=data=２"], "whole number"),
    (["--layout=" + "data=1," * 2000], "layout=.*at most 10,000"),
    (['--layout=data=2,allow="\\q"'], "JSON quotes"),
    (["--layout=data=2,allow=*"], r"'\*' is not a regex"),
    (["--layout=data=2,data=2"], "data is given twice"),
    (["--layout=pipe=2,partition=" + "9" * 5000], "partition="),
    (["--optimizer_mode=local"], "did you mean 'local_sgd'"),
    (["--lowering=shardmap"], "did you mean 'shard_map'"),
    (["--devices=-1"], "--devices=-1.*use"),
    (["--devices=99999999"], "--devices=99999999.*use"),
    (["--platform=qpu"], "--platform=qpu.*cpu"),
    (["--start_timeout=nan"], "--start_timeout=nan.*use"),
    (["--start_timeout=-1"], "--start_timeout=-1.*use"),
    (["--num_processes=-2"], "--num_processes=-2.*use"),
    (["--process_id=-7"], "--process_id=-7.*use"),
    (["--stpes=3"], "stpes.*Did you mean: steps"),
    (["--flagfile=/nowhere/flags"], "/nowhere/flags"),
]
"""(words, pattern) of flags that all commands share; support reads no recipe."""

DATA = [
    ("/nowhere/at/all.txt", "does not exist"),
    ("{root}/fifo", "fifo is a folder, a pipe or a device"),
    ("{root}/fifo.bin", "fifo.bin is a folder, a pipe or a device"),
    ("/dev/zero", "a device"),
    ("{root}/folder", "holds no file"),
    ("{root}/folder.npy", "folder.npy is a folder"),
    ("{root}/hidden", "holds no file"),
    ("{root}/empty.txt", "all are empty"),
    ("{root}/zero.txt", "looks binary"),
    ("{root}/short.txt", "windows of 32 tokens, fewer than one batch"),
    ("{root}/*.nothing", "no file matches"),
    ("{root}/part_*.bin", "names 2 files"),
    ("{root}/floats.npy", "give integer token ids"),
    ("{root}/two_dims.npy", "in one dim"),
    ("{root}/negative.npy", "token id -2"),
    ("{root}/large.npy", "token id 4611686018427387904"),
    ("{root}/none.npy", "holds no tokens"),
    ("{root}/objects.npy", "cannot be read as an array"),
    ("{root}/torn.npy", "cannot be read as an array"),
    ("{root}/odd.bin", "uint16 token ids"),
    ("{root}/empty.bin", "uint16 token ids"),
    ("x" * 300, "each name"),
    ("/x" * 2500, "at most 4,095 bytes"),
]
"""(--data, pattern)."""

IMPORTS = {
    "list": "use the table",
    "nested": "nested too deeply",
    "latin": "utf-8",
    "number": "config.json is 7",
    "torn": "cannot be read",
    "digits": "cannot be read",
    "type_list": "model_type=",
    "no_heads": "num_attention_heads=0: use",
    "negative": "num_hidden_layers=-1: use",
    "text": "hidden_size='16': use",
    "half": "num_hidden_layers=1.5: use",
    "true": "vocab_size=True: use",
    "deep": "model.depth=1000000000: use",
    "wide": "model.embed=1099511627776: use",
    "nan": "model.norm_eps=nan: use",
    "huge": r"model.norm_eps=1e\+300: use",
    "rope": r"rope_parameters=\[1\]: use",
    "theta": "rope_theta='many': use",
    "kv_heads": "kv_heads=3.*must divide",
    "tied": "model.tied='no': use",
    "mlp": r"intermediate_size=\[16\]: use",
    "other": "characters.*known: gpt2",
    "f8": "model.norm.weight is F8_E4M3; convert",
    "i8": "model.norm.weight is I8; convert",
    "torn_weights": "cannot be read",
    "no_weights": "cannot be read",
    "index_up": r"'\.\./hf_f8/model.safetensors'",
    "index_absolute": "hf_f8/model.safetensors'",
    "index_folder": "'sub/model.safetensors'",
    "index_none": "names the file None",
    "index_list": "is no index of weights",
    "index_empty": "is no index of weights",
    "index_number": "is no index of weights",
    "index_missing": "model-9.safetensors",
    "nowhere": "config.json",
}
"""{folder of transformers: pattern}."""

RUNS = {
    "no_config": "holds no configuration",
    "list_config": r"not a table of fields but \[1, 2\]",
    "empty_config": "missing.*'recipe'",
    "text_config": "steps='many': use",
    "deep_model": "model.depth=1000000000: use",
    "number_for_model": "not a table of fields but 3",
    "clashing_model": "heads=3",
    "list_metadata": "no checkpoint in .* is complete",
    "nested_metadata": "no checkpoint in .* is complete",
    "empty_run": "holds no checkpoint",
    "nowhere": "holds no checkpoint",
    "text.txt": "holds no checkpoint",
}
"""{folder of a run: pattern}, for commands that need a checkpoint."""

OWN = [
    ("run", ["--workdir=" + "a" * 300], "workdir=.*each name"),
    ("run", ["--workdir=" + "/a" * 2500], "workdir=.*at most 4,095 bytes"),
    ("run", ["--workdir=gs://bucket"], "workdir=gs://bucket: give a folder"),
    ("run", ["--workdir={root}/text.txt"], "cannot write to"),
    ("run", ["--workdir=/proc/nothing"], "cannot write to /proc/nothing"),
    ("run", ["--checkpoint_local_dir=" + "a" * 300], "checkpoint_local_dir="),
    ("run", ["--set=checkpoint_local_every=3"], "name a --checkpoint_local_dir"),
    ("run", ["--profile=perhaps"], "--profile=perhaps"),
    ("run", ["--tokenizer={root}/list.json"], "list.json cannot be read"),
    ("run", ["--tokenizer={root}/fifo"], "fifo is a folder, a pipe"),
    ("run", ["--tokenizer=/nowhere"], "--tokenizer=/nowhere cannot be read"),
    ("run", ["--layout=data=3", "--devices=3"], "batch=16 does not divide"),
    ("run", ["--layout=data=16384"], r"simulate\(16384\)"),
    ("run", ["--devices=100000"], r"simulate\(100000\)"),
    ("run", ["--layout=pipe=2,microbatches=1000000"], "forward passes"),
    ("run", ["--layout=data=8", "--devices=4"], "needs 8 devices"),
    ("run", ["--num_processes=2"], "give all three or none"),
    ("run", ["--set=local_sgd.period=4"], "add --optimizer_mode=local_sgd"),
    ("run", ["--set=model.vocab=100"], "model.vocab=100, but the data holds"),
    ("run", ["--set=framework=linen"], "framework=nnx"),
    (
        "run",
        ["--layout=replica=2", "--optimizer_mode=local_sgd"]
        + ["--set=local_sgd.staleness=40"],
        "staleness=40 with period=32",
    ),
    ("verify", ["--verify_steps=0"], "--verify_steps=0.*use"),
    ("verify", ["--verify_steps=-3"], "--verify_steps=-3.*use"),
    ("verify", ["--tolerance=nan"], "--tolerance=nan.*use"),
    ("verify", ["--tolerance=-1"], "--tolerance=-1.*use"),
    ("verify", ["--tolerance=inf"], "--tolerance=inf.*use"),
    ("verify", ["--random=-1"], "--random=-1.*use"),
    ("verify", ["--random=1000000000"], "--random=1000000000.*use"),
    ("verify", ["--random=2", "--json"], "leave out --layout and --json"),
    ("verify", ["--optimizer_mode=local_sgd"], "leave out --optimizer_mode"),
    ("verify", ["--padded=3"], "--padded=3"),
    ("explain", ["--html=/nowhere/page.html"], "--html=/nowhere/page.html cannot"),
    ("explain", ["--html={root}/folder"], "--html=.*folder cannot be written"),
    ("explain", ["--html={root}/text.txt/page"], "--html=.*cannot be written"),
    ("explain", ["--html=/proc/page.html"], "--html=/proc/page.html cannot"),
    ("explain", ["--html=" + "a" * 5000], "--html=a.*cannot be written"),
    ("explain", ["--png=a.png"], "has no pipe=N"),
    (
        "explain",
        ["--layout=pipe=2,microbatches=2", "--png=a.exe"],
        "no pictures are written as .exe",
    ),
    (
        "explain",
        ["--layout=pipe=2,microbatches=2", "--png=/nowhere/a.png"],
        "--png=/nowhere/a.png cannot be written",
    ),
    ("explain", ["--diff=fdsp=8"], "did you mean 'fsdp'"),
    ("explain", ["--diff=fsdp=4"], "would leave 4 idle"),
    ("explain", ["--diff=tensor=8"], "heads.*does not divide over tensor=8"),
    ("explain", ["--topology=v5e"], "topology='v5e'"),
    ("explain", ["--topology=v5e:0x4"], "topology='v5e:0x4'"),
    ("explain", ["--topology=v5e:99999x99999"], "topology='v5e:99999x99999'"),
    ("explain", ["--topology=h100:99999999"], "topology='h100:99999999'"),
    ("explain", ["--topology=" + "x" * 5000], "topology='x.*5,000 characters"),
    ("explain", ["--parameters=some"], "--parameters=some"),
    ("checkpoint", ["{root}/run"], "give one folder"),
    ("checkpoint", ["--export=torch"], "--export=torch.*safetensors"),
    ("checkpoint", ["--export=safetensors"], "give one of"),
    ("checkpoint", ["--to=x"], "--to=x goes with"),
    ("local_sgd_sweep", ["--periods=abc"], "--periods=abc: 'abc'"),
    ("local_sgd_sweep", ["--periods=0"], "period=0: use"),
    ("local_sgd_sweep", ["--periods=-4"], "--periods=-4: '-4'"),
    ("local_sgd_sweep", ["--periods=4,,8"], "--periods=4,,8: ''"),
    ("local_sgd_sweep", ["--periods=99999999"], "period=99999999: use"),
    ("local_sgd_sweep", ["--periods=" + "9" * 5000], "--periods=9.*characters"),
    ("local_sgd_sweep", ["--staleness=x"], "--staleness=x: 'x'"),
    ("local_sgd_sweep", ["--staleness=1.5"], "--staleness=1.5: '1.5'"),
    ("local_sgd_sweep", ["--wires=int3"], r"--wires=\['int3'\].*use"),
    ("local_sgd_sweep", ["--wires="], "--wires=.*give"),
    ("local_sgd_sweep", ["--periods="], "--periods=: ''"),
    ("local_sgd_sweep", ["--seeds=0"], "--seeds=0.*use"),
    ("local_sgd_sweep", ["--seeds=-1"], "--seeds=-1.*use"),
    ("local_sgd_sweep", ["--replicas=1"], "--replicas=1.*use"),
    ("local_sgd_sweep", ["--replicas=100000"], "--replicas=100000.*use"),
    ("local_sgd_sweep", ["--replicas=3", "--devices=3"], "batch=16 does not divide"),
    ("local_sgd_sweep", ["--workdir={root}/text.txt"], "--workdir=.*cannot be"),
    ("local_sgd_sweep", ["--workdir=/proc/x"], "--workdir=/proc/x cannot be"),
    ("local_sgd_sweep", ["--workdir=" + "a" * 300], "--workdir=a.*each name"),
    ("local_sgd_sweep", ["--workdir={root}/sweep"], "results.jsonl is not what"),
    ("benchmarks.step_overhead", ["--rounds=0"], "--rounds=0.*use"),
    ("benchmarks.step_overhead", ["--rounds=ten"], "--rounds=ten"),
    ("benchmarks.step_overhead", ["--layout=data=8"], "supports only fsdp=N"),
    ("benchmarks.pipeline_schedules", ["--rounds=-1"], "--rounds=-1.*use"),
    ("benchmarks.pipeline_schedules", ["--stages=0"], "--stages=0.*use"),
    ("benchmarks.pipeline_schedules", ["--stages=1"], "--stages=1.*use"),
    (
        "benchmarks.pipeline_schedules",
        ["--stages=3", "--devices=3"],
        "batch=16 does not divide",
    ),
    ("benchmarks.pipeline_schedules", ["--microbatches=0"], "--microbatches=0.*use"),
    ("benchmarks.ahead_of_time", ["--topology=tpu"], "topology='tpu'"),
    ("benchmarks.ahead_of_time", ["--topology="], "topology=''"),
    ("benchmarks.ahead_of_time", ["--topology=v5e:3x5x7"], "topology='v5e:3x5x7'"),
]


def cases():
    """(command, words, pattern of the message) of all cases, but for slow ones."""
    yield from settings(quick=True)
    for name in BASE:
        yield name, ["stray"], "stray|give one folder"
        if name != "support":
            yield from ((name, words, pattern) for words, pattern in SHARED)
    yield "support", ["--stpes=3"], "Did you mean: steps"
    yield from (("run", [f"--data={path}"], pattern) for path, pattern in DATA)
    for name in ("verify", "explain", "local_sgd_sweep", "checkpoint"):
        yield name, ["--data={root}/fifo"], "fifo is a folder, a pipe or a device"
    for name, pattern in IMPORTS.items():
        yield "checkpoint", [f"--import={{root}}/hf_{name}"], pattern
    for name, pattern in RUNS.items():
        yield "checkpoint!", [f"{{root}}/{name}", "--can_resume=data=2"], pattern
        yield "checkpoint!", [f"{{root}}/{name}", "--export=safetensors"], pattern
    run = "{root}/run"
    yield "checkpoint!", [run, "--can_resume=dta=2"], "did you mean 'data'"
    yield "checkpoint!", [run, "--can_resume="], "write a layout"
    yield "checkpoint!", [run, "--can_resume=data=99999"], r"simulate\(99999\)"
    yield "checkpoint!", ["a" * 300, "--can_resume=data=1"], "choose a path"
    yield "checkpoint!", [], "give one folder"
    to = [run, "--export=safetensors", "--to=/proc/x"]
    yield "checkpoint!", to, "--to=/proc/x cannot be written"
    yield from OWN


def label(value):
    return value[:40] if isinstance(value, str) else " ".join(value)[:60]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of bad inputs, beside a link to transformers' Llama."""
    root = tmp_path_factory.mktemp("bad") / "inputs"
    root.mkdir()
    bad_input.make_inputs(root)
    target = bad_input.THEIRS / "hugging_face_llama"
    (root.parent / "hugging_face_llama").symlink_to(target)
    return root


def files_in(folder):
    return sorted(str(path) for path in pathlib.Path(folder).rglob("*"))


SLOW = [pytest.param(*c, marks=pytest.mark.slow) for c in settings(quick=False)]


@pytest.mark.parametrize("command, words, pattern", [*cases(), *SLOW], ids=label)
def test_bad_input_is_an_error_with_a_remedy(
    command, words, pattern, root, tmp_path, monkeypatch, capsys
):
    base = [] if command.endswith("!") else BASE[command]
    places = {"{root}": str(root), "{cwd}": str(tmp_path)}
    words = [*base, *words]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    monkeypatch.chdir(tmp_path)
    before = files_in(root)
    outcome = commands.run(command.rstrip("!"), words, monkeypatch, capsys)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: "), outcome
    assert "Traceback" not in outcome.err + outcome.out
    message = outcome.err.replace("\n", " ")
    assert re.search(pattern, message), outcome.err
    assert REMEDY.search(message), outcome.err
    assert len(message) < 2000, outcome.err
    assert outcome.compilations == 0
    assert files_in(tmp_path) == [] and files_in(root) == before
    assert outcome.seconds < MAX_SECONDS


def test_there_are_many_cases_and_every_command_has_some():
    counts = dict.fromkeys(BASE, 0)
    for command, _, _ in cases():
        counts[command.rstrip("!")] += 1
    assert sum(counts.values()) > 600
    assert min(count for name, count in counts.items() if name != "support") > 40


def test_every_field_has_a_range_and_every_recipe_is_within():
    for name in recipes.RECIPES:
        fields = dict(fields_of(recipes.get(name)))
        assert fields.keys() == RANGES.keys()
        assert [k for k, v in fields.items() if RANGES[k].problem(v)] == []


@pytest.mark.parametrize("key", [k for k, r in RANGES.items() if isinstance(r, Number)])
def test_bounds_are_inside_or_outside_as_the_range_says(key):
    allowed = RANGES[key]
    assert bool(allowed.problem(allowed.low)) == allowed.above
    assert bool(allowed.problem(allowed.high)) == allowed.below


def test_compilations_are_counted():
    """So the check of the cases above can fail."""
    before = commands.num_compilations()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert commands.num_compilations() > before


def test_an_accelerator_that_is_missing_is_an_error():
    """In a process of its own, as this one has started its devices."""
    words = ["-m", "experiments.verify", "--recipe=tiny", "--platform=gpu"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=commands.ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "error: --platform=gpu finds no device" in done.stderr
    assert "Traceback" not in done.stderr
