"""Folders and files that no command can use, made by hand."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct

import numpy as np

from experiments import recipes

THEIRS = pathlib.Path(__file__).parents[1] / "data"

REMEDY = re.compile(
    r"\b(use|write|give|choose|add|leave|mend|convert|delete|install|change|known:|"
    r"set one of|did you mean|help lists|lists them|belongs to other|only .* supported|"
    r"return|rename|import it)"
)


def check_refused(outcome, pattern: str, longest: int) -> None:
    """Asserts that a command refused its words with a remedy, before any work.

    Args:
      outcome: of `commands.run`.
      pattern: that the message matches.
      longest: most characters of the message.
    """
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: "), outcome
    assert "Traceback" not in outcome.err + outcome.out
    message = outcome.err.replace("\n", " ")
    assert re.search(pattern, message), outcome.err
    assert REMEDY.search(message), outcome.err
    assert len(message) < longest, outcome.err
    assert outcome.compilations == 0


def _checkpoint(run: pathlib.Path, metadata) -> None:
    """A run with one checkpoint, complete but for its tensors."""
    folder = run / "checkpoints" / "5"
    (folder / "state").mkdir(parents=True)
    (folder / "metadata").mkdir()
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    (folder / "metadata" / "metadata").write_text(text)


def _stored_config(**changes) -> dict:
    return dataclasses.asdict(recipes.get("tiny")) | changes


def _weights(path: pathlib.Path, dtype: str) -> None:
    """A safetensors file with one tensor of a dtype of one byte."""
    header = {"model.norm.weight": dict(dtype=dtype, shape=[4], data_offsets=[0, 4])}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0\0\0")


def _theirs(folder: pathlib.Path, **changes) -> pathlib.Path:
    """A copy of transformers' Llama with another config.json."""
    shutil.copytree(THEIRS / "hugging_face_llama", folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | changes))
    return folder


def make_checkpoints(root: pathlib.Path) -> None:
    """Runs that cannot be resumed or exported."""
    tensors = {"tensors": {}}
    config = {"config": _stored_config()}
    layout = {"layout": "data=2,waive=[/a]", "position": "[red]"}
    _checkpoint(root / "run", tensors | config | layout)
    _checkpoint(root / "no_config", tensors)
    _checkpoint(root / "list_config", tensors | {"config": [1, 2]})
    _checkpoint(root / "empty_config", tensors | {"config": {}})
    text = {"config": _stored_config(steps="many")}
    _checkpoint(root / "text_config", tensors | text)
    model = {"config": _stored_config(model={"depth": 10**9})}
    _checkpoint(root / "deep_model", tensors | model)
    other = {"config": _stored_config(model=3)}
    _checkpoint(root / "number_for_model", tensors | other)
    clash = {"config": _stored_config(model={"heads": 3})}
    _checkpoint(root / "clashing_model", tensors | clash)
    _checkpoint(root / "no_tensors", config)
    _checkpoint(root / "list_metadata", "[]")
    _checkpoint(root / "nested_metadata", "[" * 100_000)
    (root / "empty_run" / "checkpoints").mkdir(parents=True)


def make_weights(root: pathlib.Path) -> None:
    """Folders of transformers that cannot be imported."""
    texts = {
        "list": "[]",
        "nested": "[" * 100_000,
        "latin": '{"model_type": "llamä"}'.encode("latin-1"),
        "number": "7",
        "torn": '{"model_type": "lla',
        "digits": '{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}",
        "type_list": '{"model_type": ["llama"]}',
    }
    for name, text in texts.items():
        folder = root / f"hf_{name}"
        folder.mkdir()
        encoded = text if isinstance(text, bytes) else text.encode()
        (folder / "config.json").write_bytes(encoded)
    changes = {
        "no_heads": dict(num_attention_heads=0),
        "negative": dict(num_hidden_layers=-1),
        "text": dict(hidden_size="16"),
        "half": dict(num_hidden_layers=1.5),
        "true": dict(vocab_size=True),
        "deep": dict(num_hidden_layers=10**9),
        "wide": dict(hidden_size=2**40, head_dim=None),
        "nan": dict(rms_norm_eps=float("nan")),
        "huge": dict(rms_norm_eps=1e300),
        "rope": dict(rope_parameters=[1]),
        "theta": dict(rope_parameters={"rope_theta": "many"}),
        "kv_heads": dict(num_key_value_heads=3),
        "tied": dict(tie_word_embeddings="no"),
        "mlp": dict(intermediate_size=[16]),
        "other": dict(model_type="bert" * 2000),
    }
    for name, change in changes.items():
        _theirs(root / f"hf_{name}", **change)
    _weights(_theirs(root / "hf_f8") / "model.safetensors", "F8_E4M3")
    _weights(_theirs(root / "hf_i8") / "model.safetensors", "I8")
    (_theirs(root / "hf_torn_weights") / "model.safetensors").write_bytes(b"\xff" * 9)
    (_theirs(root / "hf_no_weights") / "model.safetensors").unlink()
    indices = {
        "up": {"weight_map": {"a": "../hf_f8/model.safetensors"}},
        "absolute": {"weight_map": {"a": f"{root}/hf_f8/model.safetensors"}},
        "folder": {"weight_map": {"a": "sub/model.safetensors"}},
        "none": {"weight_map": {"a": None}},
        "list": {"weight_map": ["model.safetensors"]},
        "empty": {},
        "number": 7,
        "missing": {"weight_map": {"a": "model-9.safetensors"}},
    }
    for name, index in indices.items():
        folder = _theirs(root / f"hf_index_{name}")
        text = json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(text)


def make_data(root: pathlib.Path) -> None:
    """A text that is fine, and data that is not."""
    (root / "text.txt").write_text("alpha beta gamma delta " * 4000)
    (root / "short.txt").write_text("alpha")
    (root / "empty.txt").write_text("")
    (root / "latin.txt").write_bytes(b"caf\xe9 " * 2000)
    (root / "zero.txt").write_bytes(b"a\0b")
    os.mkfifo(root / "fifo")
    os.mkfifo(root / "fifo.bin")
    (root / "folder").mkdir()
    (root / "folder.npy").mkdir()
    (root / "hidden").mkdir()
    (root / "hidden" / ".text").write_text("alpha")
    np.save(root / "floats.npy", np.ones(10))
    np.save(root / "two_dims.npy", np.ones((3, 3), int))
    np.save(root / "negative.npy", np.array([1, -2]))
    np.save(root / "large.npy", np.array([1, 2**62]))
    np.save(root / "none.npy", np.zeros(0, int))
    np.save(root / "objects.npy", np.array([{}], object), allow_pickle=True)
    (root / "odd.bin").write_bytes(b"abc")
    (root / "empty.bin").write_bytes(b"")
    (root / "torn.npy").write_bytes(b"\x93NUMPY")
    for name in ("a", "b"):
        np.arange(500, dtype="<u2").tofile(root / f"part_{name}.bin")
    (root / "list.json").write_text("[]")
    (root / "sweep").mkdir()
    (root / "sweep" / "results.jsonl").write_text('{"case": "sync\n')


def make_inputs(root: pathlib.Path) -> None:
    """Everything above."""
    make_data(root)
    make_checkpoints(root)
    make_weights(root)
