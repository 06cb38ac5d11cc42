"""Weights of transformers are imported and exported with a few parts in memory."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import weakref

import numpy as np
import optax
import pytest
import safetensors.numpy
from support import commands
from support.tiny_runs import ROOT
from support.whole_weights import every_part

import meshpar
from experiments.interchange import hugging_face, runs
from experiments.interchange.hugging_face_files import new_tensors, stored_tensors
from experiments.models.language_model import language_model
from meshpar.checkpoint import blocks, find_checkpoints

LLAMA = ROOT / "tests/data/hugging_face_llama"


def flags(text, source):
    return [f"--import={source}", "--recipe=tiny", f"--data={text}", "--batch_size=8"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.bin"
    np.random.default_rng(0).integers(0, 48, 4000).astype(np.uint16).tofile(path)
    return path


class Alive:
    """Counts the bytes of arrays that have not been freed."""

    def __init__(self):
        self.now = self.most = self.total = 0

    def add(self, array):
        self.now, self.total = self.now + array.nbytes, self.total + array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._freed, array.nbytes)
        return array

    def _freed(self, size):
        self.now -= size


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of half a kilobyte, which the tensors of the small model exceed."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)


def test_few_parts_are_alive_at_once(text, tmp_path, monkeypatch, capsys, small_blocks):
    run, written, read = str(tmp_path / "run"), Alive(), Alive()
    part, parts = blocks.Blocks.__getitem__, runs.read_in_blocks
    monkeypatch.setattr(
        blocks.Blocks, "__getitem__", lambda self, index: written.add(part(self, index))
    )
    monkeypatch.setattr(
        runs,
        "read_in_blocks",
        lambda *given: ((path, at, read.add(x)) for path, at, x in parts(*given)),
    )
    done = commands.run("checkpoint", [run, *flags(text, LLAMA)], monkeypatch, capsys)
    assert not done.code, done.err
    weights = safetensors.numpy.load_file(LLAMA / "model.safetensors")
    size = sum(x.nbytes for x in weights.values())
    assert max(x.nbytes for x in weights.values()) > 2000
    assert written.total > 3 * size and written.most <= 2 * 512
    done = commands.run(
        "checkpoint", [run, "--export=safetensors"], monkeypatch, capsys
    )
    assert not done.code, done.err
    assert read.total == size and read.most <= 3 * 512
    found = safetensors.numpy.load_file(f"{run}/huggingface/model.safetensors")
    for name, x in weights.items():
        np.testing.assert_array_equal(found[name], x)


def test_a_changed_or_unfinished_import_or_export_leaves_nothing(
    text, tmp_path, monkeypatch, capsys
):
    def command(*words):
        return commands.run("checkpoint", [str(run), *words], monkeypatch, capsys)

    run, bad = tmp_path / "run", tmp_path / "bad"
    bad.mkdir()
    weights = safetensors.numpy.load_file(LLAMA / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    safetensors.numpy.save_file(weights, bad / "model.safetensors")
    (bad / "config.json").write_text((LLAMA / "config.json").read_text())
    done = command(*flags(text, bad))
    assert done.code == 2 and "model.norm.weight holds NaN or infinite" in done.err
    assert [path.name for path in run.glob("*")] == []
    assert not command(*flags(text, LLAMA)).code
    checkpoint = find_checkpoints(run / "checkpoints")[0]
    metadata = checkpoint.path / "metadata/metadata"
    changed = json.loads(metadata.read_text())
    changed.pop("checksum")
    changed["checksums"][0] = [x + 1 for x in changed["checksums"][0]]
    metadata.write_text(json.dumps(changed))
    done = command("--export=safetensors")
    assert done.code == 2 and "blocks/attention/k has changed since" in done.err
    assert not (run / "huggingface").exists()
    for file in (checkpoint.path / "state").rglob("d/*"):
        file.unlink()
    done = command("--export=safetensors")
    assert done.code == 2 and "checkpoints/0 cannot be read: " in done.err


def test_each_device_reads_its_shard_alone():
    config, tensors = hugging_face.read(LLAMA)
    model, read = language_model(config), Alive()
    shapes = {path: param.shape for path, param in model.params.items()}
    weights = hugging_face.imported(config, shapes, tensors)
    counted = {
        path: dataclasses.replace(x, read=lambda at, x=x: read.add(x.read(at)))
        for path, x in weights.items()
    }
    tokens = np.zeros((8, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    program = meshpar.lower(model, optax.sgd(0.1), "fsdp=8", batch)
    state = program.init(params=counted)
    for path, x in weights.items():
        np.testing.assert_array_equal(state.params[path], x[every_part(x)])
    assert read.total == sum(4 * math.prod(shape) for shape in shapes.values())


CHILD = """
import runpy, sys
try:
    runpy.run_module("experiments.checkpoint", run_name="__main__", alter_sys=True)
finally:
    status = open("/proc/self/status").read()
    print("peak", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
"""


def peak_of(*words):
    """The most bytes that the command has held in memory."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stderr.rpartition("peak ")[2].split()[0])


@pytest.mark.slow
def test_peak_memory_follows_the_largest_tensor_and_not_the_model(text, tmp_path):
    """2.3 GB of weights, of which a tensor has 0.8 GB; 6.9 GB of checkpoint."""
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    wide, vocab, depth, mlp = 1280, 160_000, 12, 4096
    said = json.loads((LLAMA / "config.json").read_text())
    said |= {"hidden_size": wide, "vocab_size": vocab, "num_hidden_layers": depth}
    said |= {"intermediate_size": mlp, "tie_word_embeddings": False}
    said |= {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 128}
    (source / "config.json").write_text(json.dumps(said))
    shapes = {name: (vocab, wide) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm"] = (wide,)
    for layer in range(depth):
        prefix = f"model.layers.{layer}."
        for name in ("input", "post_attention"):
            shapes[f"{prefix}{name}_layernorm"] = (wide,)
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj"] = (wide, wide)
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj"] = (mlp, wide)
        shapes[f"{prefix}mlp.down_proj"] = (wide, mlp)
    names = {f"{name}.weight": shape for name, shape in shapes.items()}
    numbers = np.random.default_rng(0)
    for name, tensor in new_tensors(source / "model.safetensors", names).items():
        with tensor.changed(0, math.prod(names[name])) as elements:
            numbers.standard_normal(out=elements, dtype="f4")
    most = 1.2 * 4 * vocab * wide + 1e9
    assert pathlib.Path(source / "model.safetensors").stat().st_size > 2.3e9
    found = peak_of(run, *flags(text, source))
    print(f"import: {found:,} of {most:,.0f}")
    assert found < most
    found = peak_of(run, "--export=safetensors")
    print(f"export: {found:,} of {most:,.0f}")
    assert found < most
    ours = stored_tensors(run / "huggingface/model.safetensors")
    for name, theirs in stored_tensors(source / "model.safetensors").items():
        whole = 0, math.prod(names[name])
        np.testing.assert_array_equal(
            ours[name].elements(*whole), theirs.elements(*whole)
        )
