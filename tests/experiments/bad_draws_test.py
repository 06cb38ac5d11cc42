"""Bad words of all commands, drawn from the ranges that settings and flags declare.

A new flag, setting or command is drawn from without a line here.
"""

import ast
import functools
import math
import random
import re
import runpy

import pytest
from absl import flags
from command_flags_test import COMMANDS
from support import bad_input, commands
from support.bad_cases import BASE
from support.bad_settings import BAD

from experiments import recipes
from experiments.recipes.config import SETTINGS
from meshpar.commands import command_line
from meshpar.runs.config import values_of
from meshpar.runs.modes import MODES
from meshpar.settings import Choice, Number, Switch

NUMBER = 320
SHARED = {flag.name: flag for flag in command_line.OF_RUNS}
UNPARSABLE = {
    "int": ("abc", "1.5", ""),
    "float": ("abc", "1,5", ""),
    "bool": ("perhaps", "2"),
    "string enum": ("nonsense", "x" * 5000),
}
"""{type of a flag: texts that it does not take}."""

OUTSIDE = BAD | {command_line.Address: lambda _: ("nonsense", "localhost:99999")}


HEXADECIMAL = "0x10"
"""A whole number as a flag, and none as a setting."""


@functools.cache
def flags_of(file):
    """{flag: (its type, its declared range or None)} that a file defines."""
    tree = ast.parse(file.read_text())
    with commands.flags_anew():
        names = runpy.run_path(str(file))
        own = {
            node.targets[0].id: names[node.targets[0].id].name
            for node in tree.body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.value).startswith("flags.DEFINE_")
        }
        found = {name: [flags.FLAGS[name].flag_type(), None] for name in own.values()}
        for call in ast.walk(tree):
            is_limit = isinstance(call, ast.Call) and (
                ast.unparse(call.func) == "command_line.limit"
            )
            if is_limit and ast.unparse(call.args[0]) in own:
                declared = eval(ast.unparse(call.args[1]), dict(names))
                found[own[ast.unparse(call.args[0])]][1] = declared
    return found


LLAMA = bad_input.THEIRS / "hugging_face_llama"


def outside(allowed):
    """Texts outside of a range."""
    return [
        x[0] if isinstance(x, tuple) else x for x in OUTSIDE[type(allowed)](allowed)
    ]


def is_infinite(text):
    """Whether a text is a number that absl reads, and shows, as infinite."""
    try:
        return math.isinf(float(text))
    except ValueError:
        return False


def own_flag(draw, name):
    """A flag of the command with a value outside of its range, or of another type."""
    own = flags_of(commands.code_of(name))
    known = {
        flag: bad
        for flag, (kind, allowed) in own.items()
        if (bad := outside(allowed) if allowed else UNPARSABLE.get(kind))
    }
    if known:
        flag = draw.choice(sorted(known))
        text = draw.choice([x for x in known[flag] if x != HEXADECIMAL])
        shown = "inf" if own[flag][0] == "float" and is_infinite(text) else text
        return [f"--{flag}={text}"], flag, shown


def flag_of_others(draw, name):
    """A shared flag that the command does not read."""
    others = sorted(SHARED.keys() - commands.taken(name))
    if others:
        flag = draw.choice(others)
        return [f"--{flag}={draw.choice(('3', 'x', 'a=b'))}"], flag, ""


def unknown_flag(draw, name):
    """A flag that no command has, near one of its own."""
    flag = draw.choice(sorted(commands.taken(name) | {"json", "workdir"}))
    flag = flag[:-1] + draw.choice("qxz")
    return [f"--{flag}=3"], flag, ""


def shared_value(draw, name):
    """A shared flag with a value outside of the range of its setting."""
    known = sorted(SETTINGS.keys() & SHARED.keys() & commands.taken(name))
    if name in BASE and known:
        flag = draw.choice(known)
        bad = outside(SETTINGS[flag].range)
        if flag == "layout":
            bad += ["dta=2", "data=0", "data=two", "data=2,data=2", "data=2,zero=9"]
        text = draw.choice([x for x in bad if x != HEXADECIMAL])
        if text in ("data=0", "data=2,zero=9"):  # Well written; one option is wrong.
            wrong = text.split(",")[-1]
            return [f"--layout={text}"], wrong.split("=")[0], wrong
        return [f"--{flag}={text}"], flag, text


def setting(draw, name):
    """A setting with a value outside of its range, or under a key that is none."""
    if name in BASE and "set" in commands.taken(name):
        key = draw.choice(sorted(SETTINGS))
        if draw.random() < 0.2:
            return [f"--set={key}z=1"], f"{key}z", ""
        text = draw.choice(outside(SETTINGS[key].range))
        return [f"--set={key}={text}"], key, text


def other_value(draw, key):
    """A value of a setting that is in its range, and not the recipe's."""
    allowed = SETTINGS[key].range
    now = dict(values_of(recipes.get("tiny")))[key]
    if isinstance(allowed, Switch):
        return str(not now).lower()
    if isinstance(allowed, Choice):
        return draw.choice([word for word in allowed.words if word not in ("", now)])
    low, high = max(allowed.low, -1e6), min(allowed.high, 1e6)
    near = [(1 - w) * low + w * high for w in (0.1, 0.3, 0.5)]
    values = [int(x) if allowed.whole else x for x in near] + [2 * now, now / 2]
    return str(draw.choice([x for x in values if x != now and allowed.allows(x)]))


def unread_setting(draw, name):
    """A setting that nothing reads with the others as they are."""
    if name not in BASE or "set" not in commands.taken(name):
        return None
    config = recipes.get("tiny")
    known = [*config.unread, *(f"model.{key}" for key in config.model.unread)]
    if name in ("run", "explain"):
        known += [key for key in SETTINGS if key.partition(".")[0] in MODES]
    kinds = Number, Choice, Switch
    known = [key for key in known if isinstance(SETTINGS[key].range, kinds)]
    key = draw.choice(sorted(known))
    return [f"--set={key}={other_value(draw, key)}"], key.split(".")[-1], ""


KINDS = 3 * [own_flag, setting, unread_setting]
KINDS += [shared_value, shared_value, flag_of_others, unknown_flag]
"""Kinds of bad words; those with many values are drawn more often."""


def drawn(seed):
    """(command, words, what the message names, the value that it shows)."""
    draw = random.Random(seed)
    while True:
        known = COMMANDS if seed % 3 == 0 else sorted(BASE)
        name = known[seed // 3 % len(known)]
        if found := draw.choice(KINDS)(draw, name):
            return name, *found


@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_bad_word_is_refused_in_a_line(seed, tmp_path, monkeypatch, capsys):
    name, words, subject, value = drawn(seed)
    (tmp_path / "text.txt").write_text("alpha beta gamma " * 2000)
    places = {"{root}": str(tmp_path), "{cwd}": str(tmp_path / "out")}
    places = {"{root}/../hugging_face_llama": f"{LLAMA}"} | places
    words = [*BASE.get(name, []), *words]
    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
    monkeypatch.chdir(tmp_path)
    outcome = commands.run(name, words, monkeypatch, capsys)
    bad_input.check_refused(outcome, subject, longest=1000)
    shown = value.partition("\0")[0].partition("\a")[0][:12]
    assert shown in outcome.err
    assert not re.search("literal|convert", outcome.err), "these are Python's words"
    assert outcome.err.strip().count("\n") <= 2, outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_every_kind_and_every_command_is_drawn():
    found = [drawn(seed) for seed in range(NUMBER)]
    assert {name for name, *_ in found} == set(COMMANDS)
    unread = [words for _, words, *_ in found if words[0].startswith("--set=model.")]
    assert len(unread) > 20
    assert len({(name, *words) for name, words, *_ in found}) > 0.8 * NUMBER
