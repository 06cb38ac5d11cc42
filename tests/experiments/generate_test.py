"""The commands that generate and score, with the weights of a run and of a folder."""

import dataclasses
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from support import commands, tiny_runs, whole_weights
from support.marks import slow
from support.tiny_runs import ROOT

import meshpar
from experiments import data
from experiments.generation import prompt_files, sources
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from meshpar.errors import CheckpointError
from meshpar.runs import metrics
from meshpar.runs.metrics import EVALUATION_LOSS
from meshpar.runs.stored import newest_checkpoint, weights_for


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command on a folder; returns what it printed."""

    def run(name, folder, *words, code=0):
        words = [str(folder), *map(str, words)]
        for word in words:
            if word.startswith("--layout=") and "devices" in commands.taken(name):
                layout = meshpar.layouts.parse(word.partition("=")[2])
                words = [*words, f"--devices={layout.num_devices}"]
        outcome = commands.run(name, words, monkeypatch, capsys)
        assert outcome.code in (code, None if code == 0 else code), outcome.err
        return outcome.err if code else outcome.out

    return run


def held_out_loss(workdir):
    rows = metrics.read(workdir / "metrics.jsonl")
    return [row[EVALUATION_LOSS] for row in rows if EVALUATION_LOSS in row][-1]


SCORED = "pipe=2,data=2,microbatches=2,partition=1/1"


@pytest.mark.parametrize(
    "layout",
    [
        SCORED,
        slow("data=1"),
        slow("fsdp=8"),
        slow("tensor=4,params.kv_heads=none,activations.kv_heads=none"),
        slow("context=2,fsdp=2,tensor=2"),
        slow("pipe=2,fsdp=2,tensor=2,microbatches=2"),
    ],
)
def test_the_score_is_the_held_out_loss_of_the_run(unbroken, layout, command):
    said = command("score", unbroken[1], f"--layout={layout}")
    loss = float(re.search(r"loss (\S+) nats", said)[1])
    assert loss == pytest.approx(held_out_loss(unbroken[1]), rel=1e-6)


@pytest.mark.slow
def test_all_held_out_samples_are_evaluated_and_scored(text, tmp_path, command):
    """Batches of 16 of few samples: the last one has fewer rows."""
    changes = dict(steps=1, evaluation_batches=100)
    own = tiny_runs.config(text, tmp_path / "run", **changes)
    own = dataclasses.replace(own, data=dataclasses.replace(own.data, held_out=0.01))
    assert tiny_runs.train(own, SCORED) == 0
    said = command("score", tmp_path / "run", "--layout=data=2,tensor=2")
    corpus = data.load(own.data)
    own = own.fitted(corpus)
    number = (len(corpus.held_out) - 1) // own.model.length
    assert number > 16 and number % 16
    assert f"{number * own.model.length:,} tokens" in said
    checkpoint = newest_checkpoint(str(tmp_path / "run"))
    program = own.make_program(meshpar.layouts.parse("data=1"), jax.devices()[:1])
    model = program.model.bind(weights_for(program, checkpoint))
    length = own.model.length
    tokens = np.asarray(corpus.held_out[: number * length + 1], np.int32)
    logits = nnx.jit(lambda model, x: jax.nn.log_softmax(model(x)))(
        model, tokens[:-1].reshape(number, length)
    )
    targets = tokens[1:].reshape(number, length, 1)
    want = -np.take_along_axis(np.asarray(logits), targets, axis=2).mean()
    assert held_out_loss(tmp_path / "run") == pytest.approx(want, rel=1e-5)
    loss = float(re.search(r"loss (\S+) nats", said)[1])
    assert loss == pytest.approx(want, rel=1e-5)


def test_scores_of_a_text_are_those_of_its_tokens(unbroken, tmp_path, command):
    """Windows of the model's length; the last one is padded."""
    text, out = tmp_path / "text.txt", tmp_path / "scores.jsonl"
    text.write_text("alpha beta delta gamma " * 7)
    words = [f"--data={text}", f"--out={out}", f"--layout={SCORED}"]
    said = command("score", unbroken[1], *words)
    ids = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int32)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["token"] for row in rows] == ids[1:].tolist()
    assert "".join(row["text"] for row in rows) == text.read_text()[1:]
    checkpoint = newest_checkpoint(str(unbroken[1]))
    config = sources.config_of(checkpoint, "data=1")
    program = config.make_program(meshpar.layouts.parse("data=1"), jax.devices()[:1])
    params = weights_for(program, checkpoint)
    model = program.model.bind(params)
    want = []
    for start in range(0, len(ids) - 1, config.model.length):
        window = ids[start : start + config.model.length + 1]
        logits = jax.nn.log_softmax(model(window[None, :-1]))[0]
        want += [float(logits[i, token]) for i, token in enumerate(window[1:])]
    np.testing.assert_allclose([r["log_probability"] for r in rows], want, rtol=1e-4)
    loss, perplexity = re.search(
        r"loss (\S+) nats per token, perplexity (\S+)", said
    ).groups()
    assert float(loss) == pytest.approx(-np.mean(want), rel=1e-5)
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_a_text_without_tokens_to_score_is_an_error(unbroken, tmp_path, command):
    (tmp_path / "short.txt").write_text("a")
    words = [f"--data={tmp_path}/short.txt", "--layout=data=1"]
    assert "1 token(s)" in command("score", unbroken[1], *words, code=2)


FLAGS = ["--layout=data=2,tensor=2", "--tokens=6", "--batch_size=2", "--seed=3"]


def test_a_file_of_prompts_goes_on_after_a_kill(unbroken, tmp_path, command):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["alpha ", "b", "gamma delta " * 9, "be", "a"]
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    prompts.write_text(rows)
    words = [f"--prompts={prompts}", f"--out={out}", *FLAGS]
    said = command("generate", unbroken[1], *words)
    assert re.search(r"\d+ tokens in .* tokens/s", said)
    assert "prompt 2 has 108 tokens, and the model sees the last 31 of them" in said
    whole = out.read_text()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [row["prompt"] for row in found] == texts
    assert [row["tokens"] for row in found] == [6] * 5
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:20])
    said = command("generate", unbroken[1], *words)
    assert "holds 3 of 5 texts" in said
    assert out.read_text() == whole
    said = command("generate", unbroken[1], *words, "--temperature=0.1", code=2)
    assert "other weights or flags" in said
    assert out.read_text() == whole


def test_prompt_and_stop_of_a_run(unbroken, command):
    words = ["--prompt=alpha be", "--temperature=0", *FLAGS, "--tokens=12"]
    plain = command("generate", unbroken[1], *words)
    assert "alpha be" in plain and "step 12 of" in plain
    streamed = command("generate", unbroken[1], *words, "--stream_weights")
    assert streamed.splitlines()[1] == plain.splitlines()[1]
    stopped = command("generate", unbroken[1], *words, "--stop= ")
    assert stopped.splitlines()[1].count(" ") == 1
    said = command("generate", unbroken[1], *words, "--stop=ab", code=2)
    assert "--stop='ab' is 2 tokens" in said


def test_weights_come_without_optimizer_state_and_changed_ones_are_seen(
    unbroken, tmp_path
):
    checkpoint = newest_checkpoint(str(unbroken[1]))
    source = sources.find_source(str(unbroken[1]), "fsdp=2", None)
    generator = sources.make_generator(source, jax.devices()[:2], 0, 0)
    params = source.load(generator)
    layout = meshpar.layouts.parse("data=1")
    config = sources.config_of(checkpoint, "data=1")
    program = config.make_program(layout, jax.devices()[:1])
    want = weights_for(program, checkpoint)
    for path, x in params.items():
        np.testing.assert_array_equal(x, want[path])
        assert x.sharding == generator.program.abstract_params[path].sharding
    sums = checkpoint.metadata["checksums"][0]
    wrong = checkpoint.metadata | {"checksums": [[x + 1 for x in sums], []]}
    with pytest.raises(CheckpointError, match="is corrupt: .* has changed"):
        weights_for(program, checkpoint._replace(metadata=wrong))
    tensors = {k: [[1, *x[0]], x[1]] for k, x in checkpoint.metadata["tensors"].items()}
    other = checkpoint.metadata | {"tensors": tensors}
    with pytest.raises(CheckpointError, match="use the configuration of that run"):
        weights_for(program, checkpoint._replace(metadata=other))


def test_a_folder_of_transformers(tmp_path, command):
    config = DecoderConfig(vocab=128, length=32, depth=2, embed=32, heads=4, mlp=64)
    params = jax.device_get(jax.jit(language_model(config).init)(jax.random.key(0)))
    whole_weights.write(tmp_path, config, params)
    said = command("generate", tmp_path, "--prompt=a", code=2)
    assert "has no tokenizer.json; add it, or give" in said
    vocab = {chr(i): i for i in range(32, 127)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    source = sources.find_source(str(tmp_path), "tensor=2", None)
    assert source.tokenizer.encode("ab c") == [97, 98, 32, 99]
    generator = sources.make_generator(source, jax.devices()[:2], 0, 0)
    for path, x in source.load(generator).items():
        np.testing.assert_array_equal(x, params[path])


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "give one of --prompt"),
        (["--prompt=a", "--prompts=b"], "give one of --prompt"),
        (["--prompts=b"], "go together"),
        (["--prompt="], "at least one character"),
        (["--prompt=a", "--top_p=0"], "top_p=0.0: use"),
        (["--prompt=a", "--tokens=0"], "tokens"),
        (["--prompts=no", "--out=/tmp"], "cannot be written"),
    ],
)
def test_flags_that_do_not_fit(words, message, tmp_path, command):
    assert message in command("generate", tmp_path, *words, code=2)


def test_folders_and_files_that_are_none(tmp_path, command):
    said = command("generate", tmp_path, "--prompt=a", code=2)
    assert "holds no checkpoint; give" in said
    prompts = tmp_path / "prompts.jsonl"
    for content, message in [
        ("", "is empty; give at least one"),
        ('{"prompt": "a"}\nb\n', "line 2: 'b' is no prompt; write"),
        ('{"prompt": ""}\n', "line 1: .* is no prompt; write"),
    ]:
        prompts.write_text(content)
        with pytest.raises(meshpar.MeshparError, match=message):
            prompt_files.read_prompts(str(prompts))
    shutil.copy(ROOT / "README.md", tmp_path / "out.jsonl")
    with pytest.raises(meshpar.MeshparError, match="line 1 is not the text of prompt"):
        prompt_files.ResultFile(str(tmp_path / "out.jsonl"), ["a"], "")


@pytest.mark.parametrize(
    "name, flag",
    [
        ("score", "--steps=3"),
        ("score", "--seed=5"),
        ("generate", "--set=model.depth=99"),
        ("generate", "--optimizer_mode=islands"),
        ("checkpoint", "--layout=fsdp=8"),
    ],
)
def test_flags_that_a_command_does_not_read_are_refused(name, flag, tmp_path, command):
    said = command(name, tmp_path, flag, code=2)
    assert f"{flag.split('=')[0]} is not read by this command" in said
