"""Weights under the names of transformers: same logits, and back bit for bit.

The models in tests/data are transformers' own, of random weights or of those of a
formula (make_hugging_face.py).
"""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support import commands, formula_weights, whole_weights
from support.whole_weights import every_part

from experiments.interchange import hugging_face
from experiments.interchange.hugging_face_config import config_json, decoder_config
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from meshpar.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("gpt2", "llama", "mixtral", "qwen3_moe")
BY_FORMULA = (
    "llama3",
    "llama_attention_bias",
    "llama_bias",
    "qwen2",
    "qwen3",
    "qwen3_bias",
    "mistral",
    "olmo2",
    "gemma3",
    "gemma3_odd",
    "phi3",
)


def folder_of(kind):
    return ROOT / "tests/data" / f"hugging_face_{kind}"


def with_weights(kind, tmp_path):
    """A folder of theirs with all its files."""
    if kind in KINDS:
        return folder_of(kind)
    return formula_weights.write(folder_of(kind), tmp_path / "theirs")


def logits_of(config, params, tokens):
    model = language_model(config)
    return np.asarray(jax.jit(lambda p, t: model.bind(p)(t))(params, tokens))


def ours(folder):
    """Decoder, model and parameters of a folder of theirs."""
    config, tensors = hugging_face.read(folder)
    model = language_model(config)
    shapes = {path: param.shape for path, param in model.params.items()}
    weights = hugging_face.imported(config, shapes, tensors)
    return config, model, {path: x[every_part(x)] for path, x in weights.items()}


def stored(folder):
    return safetensors.numpy.load_file(folder / hugging_face.WEIGHTS)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name], tensor)


@pytest.mark.parametrize("kind", (*KINDS, *BY_FORMULA[:-1]))
def test_same_logits_and_back_bit_for_bit(kind, tmp_path):
    folder, out = with_weights(kind, tmp_path), tmp_path / "out"
    config, _, params = ours(folder)
    with np.load(folder_of(kind) / "logits.npz") as known:
        tokens, want = known["tokens"], known["logits"]
    assert np.abs(want).max() > 1
    got = logits_of(config, params, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    whole_weights.write(out, config, params)
    assert_same(stored(out), stored(folder))
    theirs = json.loads((folder / "config.json").read_text())
    written = json.loads((out / "config.json").read_text())
    shared = written.keys() & theirs.keys() - {"bos_token_id", "eos_token_id"}
    assert len(shared) > 8 and all(written[key] == theirs[key] for key in shared)
    assert decoder_config(written) == config


def test_phi3_becomes_a_mistral(tmp_path):
    config, _, params = ours(with_weights("phi3", tmp_path))
    with np.load(folder_of("phi3") / "logits.npz") as known:
        tokens, want = known["tokens"], known["logits"]
    whole_weights.write(tmp_path / "out", config, params)
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert (said["model_type"], said["sliding_window"]) == ("mistral", 5)
    config, _, params = ours(tmp_path / "out")
    got = logits_of(config, params, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BY_FORMULA)
def test_shards_of_bfloat16_as_transformers_writes_them(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder, out = with_weights(kind, tmp_path), tmp_path / "out"
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(folder, dtype=torch.bfloat16).save_pretrained(out, max_shard_size="4KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    config, _, params = ours(out)
    tokens = np.random.default_rng(1).integers(0, 24, (2, 12))
    with torch.no_grad():
        theirs = load(out, dtype=torch.float32).eval()
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got = logits_of(config, params, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", (*KINDS, *BY_FORMULA))
def test_transformers_loads_what_we_write(kind, tmp_path):
    """Compares with transformers and torch themselves, where they are installed."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = ours(with_weights(kind, tmp_path))[0]
    config = dataclasses.replace(config, depth=3, vocab=50)
    model = language_model(config)
    params = jax.device_get(model.init(jax.random.key(1)))
    tokens = np.random.default_rng(1).integers(0, 50, (2, 9))
    whole_weights.write(tmp_path, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got = np.asarray(model.bind(params)(tokens))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_bfloat16_files(tmp_path):
    shutil.copy(folder_of("llama") / "config.json", tmp_path)
    short = {n: x.astype(jnp.bfloat16) for n, x in stored(folder_of("llama")).items()}
    safetensors.numpy.save_file(short, tmp_path / hugging_face.WEIGHTS)
    got, want = ours(tmp_path)[2], ours(folder_of("llama"))[2]
    for path, x in want.items():
        np.testing.assert_array_equal(got[path], x.astype(jnp.bfloat16))


def test_old_files_without_prefix_and_with_buffers_and_shards(tmp_path):
    """As the first GPT-2 files on the hub are, and as large models are split."""
    want = stored(folder_of("gpt2"))
    bare = {name.removeprefix("transformer."): x for name, x in want.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    bare["lm_head.weight"] = bare["wte.weight"]
    half, parts = len(bare) // 2, {}
    for number, names in enumerate((list(bare)[:half], list(bare)[half:])):
        file = f"model-{number}.safetensors"
        parts |= dict.fromkeys(names, file)
        tensors = {name: bare[name] for name in names}
        safetensors.numpy.save_file(tensors, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    shutil.copy(folder_of("gpt2") / "config.json", tmp_path)
    assert_same(ours(tmp_path)[2], ours(folder_of("gpt2"))[2])


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        (
            "gpt2",
            {"model_type": "bert"},
            "model_type='bert'.*known: gemma3_text, gpt2, llama",
        ),
        ("gpt2", {"activation_function": "relu"}, "'relu': only 'gelu_new' is"),
        ("llama", {"attention_bias": True}, r"lacks .*self_attn\.k_proj\.bias"),
        ("llama", {"attention_bias": 2}, "attention_bias=2: use true or false"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is supported beside attention_"),
        ("llama", {"head_dim": 8}, r"q_proj.weight is \(16, 16\), not \(32, 16\)"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "of another kind"),
        ("llama", {"intermediate_size": 44}, r"gate_proj.weight is \(40, 16\), not"),
        ("llama", {"num_hidden_layers": 3}, "lacks model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "also has model.layers.1"),
        ("mixtral", {"sliding_window": 8}, "sliding_window=8: only None is"),
        ("mixtral", {"num_experts_per_tok": 5}, "experts_per_token=5: use 1 to"),
        ("qwen3_moe", {"num_local_experts": 7}, r"lacks .*experts\.6\.down_proj"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]: only"),
        ("qwen3_moe", {"norm_topk_prob": 2}, "normalize_weights=2: use true or"),
    ],
)
def test_what_ours_cannot_be_is_an_error(kind, changes, words, tmp_path):
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ConfigError, match=words):
        ours(tmp_path)


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only"),
        ("llama3", {"rope_parameters": {"factor": 2.0, "beta": 1}}, "of another kind"),
        ("llama3", {"rope_parameters": {"rope_type": ["yarn"]}}, "of another kind"),
        ("llama3", {"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ("llama3", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.* only"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "of another kind than"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75: only"),
        ("phi3", {"num_key_value_heads": 4}, r"has 32 outputs, not 48"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0: use a whole number"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True: only False"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping=30.0: only None"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional.*only False"),
        ("gemma3", {"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh' is"),
        (
            "gemma3",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types=.* only .'full_attention', 'full_attention'",
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "lacks 'factor'",
        ),
    ],
)
def test_what_a_family_may_not_have_is_an_error(kind, changes, words, tmp_path):
    folder = with_weights(kind, tmp_path)
    said = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in changes:
        del said["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ConfigError, match=words):
        ours(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="give a folder with config.json and"):
        hugging_face.read(tmp_path)


def test_a_decoder_that_they_do_not_have():
    with pytest.raises(ConfigError, match="gpt2 has no position='rope'.*llama has no"):
        config_json(DecoderConfig(norm="layernorm"))


def test_experts_that_drop_tokens_are_not_theirs():
    with pytest.raises(ConfigError, match="mixtral has no routing='capacity'; qwen3_"):
        config_json(DecoderConfig(num_experts=4))


def test_a_run_starts_from_theirs_and_becomes_theirs(tmp_path, monkeypatch, capsys):
    def command(name, *words):
        done = commands.run(name, words, monkeypatch, capsys)
        assert not done.code, done.out + done.err
        return done.out

    run, text = tmp_path / "run", tmp_path / "text.bin"
    np.random.default_rng(0).integers(0, 48, 4000).astype(np.uint16).tofile(text)
    flags = ["--recipe=tiny", f"--data={text}", "--batch_size=8"]
    checkpoint = ["checkpoint", str(run)]
    source = f"--import={folder_of('llama')}"
    said = command(*checkpoint, source, *flags, "--set=model.length=12")
    assert "21 tensors are step 0" in said
    command(*checkpoint, "--export=safetensors", f"--to={tmp_path / 'same'}")
    assert_same(stored(tmp_path / "same"), stored(folder_of("llama")))
    more = re.findall(r"--(?:recipe|workdir|set)[= ]\S+", said.splitlines()[-1])
    more = [word.replace("--set ", "--set=") for word in more]
    rest = ["--layout=fsdp=2", "--steps=3", "--set=sample_tokens=0", "--set=steps=3"]
    said = command("run", "--devices=2", *flags, *more, "--set=model.length=12", *rest)
    assert "step 3/3" in said
    assert "step 3 " in command(*checkpoint, "--export=safetensors")
    changed = stored(run / "huggingface")["model.norm.weight"]
    before = stored(folder_of("llama"))["model.norm.weight"]
    assert 0 < np.abs(changed - before).max() < 0.05
