"""Cases of bad input to all commands: (command, words, pattern of the message).

{root} is the folder of `bad_input.make_inputs`, {cwd} the folder of the command.
"""

from support import commands
from support.bad_settings import DATA, SHARED, settings

from meshpar.commands import command_line

COMMON = ["--recipe=tiny", "--data={root}/text.txt"]
BASE = {
    "run": [*COMMON, "--workdir={cwd}/run"],
    "verify": COMMON,
    "explain": COMMON,
    "checkpoint": ["{cwd}/new", "--import={root}/../hugging_face_llama", *COMMON],
    "support": [],
    "chaos": ["--workdir={cwd}/chaos"],
    "local_sgd_sweep": [*COMMON, "--workdir={cwd}/sweep"],
    "sparse": ["--data={root}/text.txt"],
    "batch": ["--data={root}/text.txt"],
    "benchmarks.step_overhead": ["--recipe=tiny"],
    "benchmarks.ahead_of_time": ["--recipe=tiny"],
    "benchmarks.pipeline_schedules": ["--recipe=tiny"],
}
"""Words of every command that are fine; those of a case follow them."""

SHARED_FLAGS = {flag.name for flag in command_line.OF_RUNS}
UNSHARED = ("support", "chaos", "sparse", "batch")
"""Commands that do not read most of the shared flags."""


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
    "other": "characters.*known: gemma3_text, gpt2",
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
    ("run", ["--fallback_layouts=data=1"], "start the run in several"),
    ("run", ["--set=local_sgd.period=4"], "add --optimizer_mode=local_sgd"),
    ("run", ["--set=model.vocab=100"], "model.vocab=100, but the data holds"),
    ("run", ["--set=framework=linen"], "framework=nnx"),
    (
        "run",
        ["--layout=replica=2", "--optimizer_mode=local_sgd"]
        + ["--set=local_sgd.staleness=40"],
        "staleness=40 with period=32",
    ),
    ("chaos", ["--minutes=0"], "--minutes=0.*use"),
    ("chaos", ["--minutes=-1"], "--minutes=-1.*use"),
    ("chaos", ["--minutes=nan"], "--minutes=nan.*use"),
    ("chaos", ["--minutes=inf"], "--minutes=inf.*use"),
    ("chaos", ["--minutes=ten"], "--minutes=ten"),
    ("chaos", ["--faults=-1"], "--faults=-1.*use"),
    ("chaos", ["--faults=99999999"], "--faults=99999999.*use"),
    ("chaos", ["--faults=1.5"], "--faults=1.5"),
    ("chaos", ["--seed=-1"], "seed=-1: use"),
    ("chaos", ["--seed=99999999999"], "seed=99999999999: use"),
    ("chaos", ["--scenario="], "--scenario=.*give at least one"),
    ("chaos", ["--scenario=pipe"], "--scenario=.*did you mean 'pipeline'"),
    ("chaos", ["--scenario=pipeline,,two_tiers"], "--scenario=.*use"),
    ("chaos", ["--scenario=pipeline,pipeline"], "names 'pipeline' twice"),
    ("chaos", ["--scenario=" + "x" * 5000], "--scenario=.*5,... characters"),
    ("chaos", ["--workdir={root}"], "holds files.*choose another"),
    ("chaos", ["--workdir={root}/text.txt"], "--workdir=.*cannot be written"),
    ("chaos", ["--workdir=/proc/x"], "--workdir=/proc/x cannot be"),
    ("chaos", ["--workdir=" + "a" * 300], "--workdir=a.*each name"),
    ("chaos", ["--layout=fsdp=2"], "--layout is not read.*: its scenarios set it"),
    ("chaos", ["--set=model.depth=0"], "--set is not read.*: its scenarios set it"),
    ("chaos", ["--json=3"], "--json=3"),
    ("chaos", ["--fault=3"], "Did you mean: faults"),
    ("sparse", ["--algorithm=dbgp"], "--algorithm=dbgp.*did you mean 'dbpg'"),
    ("sparse", ["--workers=0"], "--workers=0.*use"),
    ("sparse", ["--servers=-1"], "--servers=-1.*use"),
    ("sparse", ["--passes=0"], "--passes=0.*use"),
    ("sparse", ["--rows=-1"], "--rows=-1.*use"),
    ("sparse", ["--hash_bits=60"], "--hash_bits=60.*use"),
    ("sparse", ["--l1=0"], "--l1=0.*use"),
    ("sparse", ["--l1=nan"], "--l1=nan.*use"),
    ("sparse", ["--blocks=0"], "--blocks=0.*use"),
    ("sparse", ["--delay=64"], "delay=64 with blocks=64: use"),
    ("sparse", ["--blocks=64", "--hash_bits=5"], "--blocks=64 for 32 features: use"),
    ("sparse", ["--kkt_ratio=-1"], "--kkt_ratio=-1.*use"),
    ("sparse", ["--random_skip=1"], "--random_skip=1.*use"),
    ("sparse", ["--significant=-2"], "--significant=-2.*use"),
    ("sparse", ["--compression=zip"], "--compression=zip.*use"),
    ("sparse", ["--learning_rate=0.1"], "--learning_rate belongs to another"),
    ("sparse", ["--algorithm=hogwild", "--kkt_filter"], "--kkt_filter belongs to"),
    ("sparse", ["--algorithm=hogwild", "--l2=inf"], "--l2=inf.*use"),
    ("sparse", ["--layout=data=2"], "--layout is not read by this command"),
    ("sparse", ["--seed=-1"], "seed=-1: use"),
    ("sparse", [], "come from one file or folder"),
    ("sparse", ["--data=/nowhere/at/all"], "does not exist"),
    ("sparse", ["--data={root}/hidden"], "holds no file"),
    ("sparse", ["--workres=3"], "Did you mean: workers"),
    ("batch", ["--algorithm=bfgs"], "did you mean 'lbfgs'"),
    ("batch", ["--workers=1"], "--workers=1.*use"),
    ("batch", ["--iterations=0"], "--iterations=0.*use"),
    ("batch", ["--slowdown=0.5"], "--slowdown=0.5.*use"),
    ("batch", ["--portions=0"], "--portions=0.*use"),
    ("batch", ["--memory=0"], "--memory=0.*use"),
    ("batch", ["--l2=-1"], "--l2=-1.*use"),
    ("batch", ["--tolerate=1"], "--tolerate belongs to another algorithm"),
    (
        "batch",
        ["--algorithm=gradient_descent", "--tolerate=4"],
        "--tolerate=4 of --workers=4: use",
    ),
    ("batch", ["--algorithm=gradient_descent", "--backup"], "--backup belongs to"),
    ("batch", ["--set=model.depth=2"], "--set is not read by this command"),
    ("verify", ["--verify_steps=0"], "--verify_steps=0.*use"),
    ("verify", ["--verify_steps=-3"], "--verify_steps=-3.*use"),
    ("verify", ["--tolerance=nan"], "--tolerance=nan.*use"),
    ("verify", ["--tolerance=-1"], "--tolerance=-1.*use"),
    ("verify", ["--tolerance=inf"], "--tolerance=inf.*use"),
    ("verify", ["--random=-1"], "--random=-1.*use"),
    ("verify", ["--random=1000000000"], "--random=1000000000.*use"),
    ("verify", ["--random=2", "--json"], "leave out --layout and --json"),
    ("verify", ["--optimizer_mode=local_sgd"], "--optimizer_mode.*leave it out"),
    ("verify", ["--set=optimizer_mode=local_sgd"], "leave out the mode"),
    ("explain", ["--topology=v5e:2x2", "--devices=2"], "--devices is not read by"),
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
    ("explain", ["--topology=h100:99999999"], "99,999,999 chips; use at most"),
    ("explain", ["--topology=" + "x" * 5000], "topology='x.*5,000 characters"),
    ("explain", ["--parameters=some"], "--parameters=some"),
    ("explain", ["--roofline=8"], "--roofline=8: give two batch sizes or more"),
    ("explain", ["--roofline=8,-16"], "--roofline=8,-16: give two"),
    ("explain", ["--roofline=0,8"], "batch_size=0"),
    ("explain", ["--roofline=8,16"], "rates of cpu are not known; add a machine"),
    ("explain", ["--roofline=8,16", "--generate"], "leave out --generate"),
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


def shared_cases(name):
    """(command, words, pattern) of flags that a command shares, or does not take."""
    taken = commands.taken(name)
    for words, pattern in SHARED:
        flag = words[0][2:].partition("=")[0]
        known = flag in SHARED_FLAGS
        if known and flag not in taken:
            pattern = f"--{flag} is not read by this command.*; leave it out"
        elif flag == "stpes" and "steps" not in taken:
            pattern = "Unknown command line flag 'stpes'"
        yield name, words, pattern


def cases():
    """(command, words, pattern of the message) of all cases, but for slow ones."""
    yield from settings(quick=True)
    for name in BASE:
        yield name, ["stray"], "stray|give one folder"
        if name not in UNSHARED:
            yield from shared_cases(name)
    yield "support", ["--stpes=3"], "Unknown command line flag 'stpes'.*--help lists"
    yield "support", ["--steps=3"], "--steps is not read by this command"
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
