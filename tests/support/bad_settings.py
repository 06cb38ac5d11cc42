"""Bad settings and shared flags: (words, pattern of the message) of each.

Values of settings are made from the ranges of the fields, so a new one is covered.
"""

import re

from experiments.recipes.config import SETTINGS
from meshpar.collectives.compression import Wire
from meshpar.islands.consistency import ConsistencyText
from meshpar.islands.push_filters import FilterTexts
from meshpar.settings import Choice, Number, Path, Switch, Text


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
    ConsistencyText: lambda _: ("", "ssp", "asp:1", "ssp:-1", "ssp:" + "9" * 5000),
    FilterTexts: lambda _: (
        *("zlib+skip:0.1", "skip:1", "significant:-1", "relative:nan"),
        *("kkt", "skip", "zlib:2", "zlib+", "skip:0.1+" * 1000),
    ),
}
"""{kind of range: its texts outside of the range}."""


NUM_QUICK = 6
"""Bad values of a field that are tried by default; the others are slow together."""


def settings(quick):
    """(command, words, pattern of the message) for every field of the configuration."""
    chosen = slice(NUM_QUICK) if quick else slice(NUM_QUICK, None)
    for key, setting in SETTINGS.items():
        bad = BAD[type(setting.range)](setting.range)
        for text in list(bad)[chosen]:
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
    (["--coordinator=nonsense"], "--coordinator=nonsense.*host:port"),
    (["--coordinator=localhost:99999"], "--coordinator=localhost:99999.*below 65"),
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
    ("{root}/short.txt", "has no sample of 32 tokens; give more text"),
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
    ("{root}/empty.bin", "holds no tokens.*token ids"),
    ("x" * 300, "each name"),
    ("/x" * 2500, "at most 4,095 bytes"),
]
"""(--data, pattern)."""
