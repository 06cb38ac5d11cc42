"""Recipes and settings: typed, and strict about names."""

import dataclasses
import itertools

import pytest

from experiments import data, recipes
from experiments.recipes import optimizers
from experiments.recipes.config import DataConfig
from experiments.recipes.optimizers import OptimizerConfig
from meshpar import layouts
from meshpar.errors import ConfigError, MeshparError
from meshpar.runs import programs
from meshpar.runs.config import values_of, with_mode, with_settings
from meshpar.runs.modes import MODES, SYNCHRONOUS


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_are_named_as_they_are_listed(name):
    assert recipes.get(name).recipe == name


def test_settings_change_nested_typed_values():
    config = with_settings(
        recipes.get("tiny"),
        ["model.depth=4", "optimizer.learning_rate=1e-2", "model.tied=true", "steps=7"],
    )
    assert config.model.depth == 4 and config.model.tied is True
    assert config.optimizer.learning_rate == 0.01 and config.steps == 7


@pytest.mark.parametrize(
    "setting, words",
    [
        ("model.dept=4", "no key 'dept'.*did you mean 'depth'"),
        ("modle.depth=4", "no key 'modle'.*did you mean 'model'"),
        ("model.depth", "write KEY=VALUE"),
        ("model=4", "set one of model.vocab"),
        ("steps.x=4", "steps has no parts"),
        ("model.depth=four", "model.depth=four: use a whole number of layers"),
        ("model.tied=yes", "use true or false"),
        ("model.depth=0", "model.depth=0: use .* at least 1"),
        ("model.heads=3", "heads must divide embed"),
        ("model.norm=batch", "use rmsnorm or layernorm"),
        ("model.loss_block=5", "loss_block=5: use a divisor of length=32"),
        ("batch_size=0", "batch_size=0: use .* of samples, at least 1"),
        ("data.held_out=1.5", "held_out=1.5"),
        ("seed=-1", "seed=-1"),
        ("framework=torch", "use nnx or linen"),
        ("compute_dtype=int8", "use float32 or bfloat16"),
        ("optimizer_mode=local", "did you mean 'local_sgd'"),
    ],
)
def test_wrong_settings_say_what_to_do(setting, words):
    with pytest.raises(ConfigError, match=words):
        with_settings(recipes.get("tiny"), [setting])


@pytest.mark.parametrize(
    "settings",
    [
        ["model.heads=3", "model.kv_heads=3", "model.embed=48"],
        ["model.length=48", "model.loss_block=24"],
        ["model.global_every=2", "model.window=8"],
        ["model.num_experts=8", "model.shared_experts=1", "model.router_nodes=4"]
        + ["model.nodes_per_token=2", "model.balance_loss=0.5"],
        ["model.rope_low=5.0", "model.rope_high=9.0"]
        + ["model.rope_factor=2.0", "model.rope_length=32"],
        ["islands.quorum=5", "islands.workers=8", "islands.grace=0.5"],
        ["local_sgd.merge=lerp", "local_sgd.merge_weight=0.25"],
    ],
)
def test_settings_are_set_together_so_their_order_does_not_matter(settings):
    found = {
        with_settings(recipes.get("tiny"), order)
        for order in itertools.permutations(settings)
    }
    assert len(found) == 1
    for key, text in (setting.split("=") for setting in settings):
        assert str(dict(values_of(*found))[key]) == text


def test_of_two_values_of_one_setting_the_last_counts():
    config = with_settings(
        recipes.get("tiny"), ["steps=3", "model.heads=3", "steps=5"] + ["model.heads=2"]
    )
    assert (config.steps, config.model.heads) == (5, 2)


@pytest.mark.parametrize(
    "setting, because",
    [
        ("model.shared_experts=2", "model.num_experts=0"),
        ("model.router_jitter=0.1", "model.num_experts=0"),
        ("model.z_loss=0.5", "model.num_experts=0"),
        ("model.window_rope_theta=500", "model.window=0"),
        ("model.rope_high=8", "model.rope_length=0"),
        ("model.rope_length=8", "model.rope_factor=1"),
        ("model.position=learned model.rope_theta=5", "model.position=learned"),
        ("model.bias=true model.attention_bias=qkv", "model.bias=True"),
        ("model.num_experts=4 model.exchange_bound=2", "model.routing=capacity"),
        (
            "model.num_experts=4 model.routing=dropless model.capacity_factor=2",
            "model.routing=dropless",
        ),
        ("optimizer.router_bias_rate=0.1", "model.router_bias=False"),
        ("data.separator=3", "data that is no file of token ids"),
        ("local_sgd.merge_weight=0.1", "local_sgd.merge=shift"),
        ("local_sgd.outer_momentum=0.1", "local_sgd.outer=average"),
        ("islands.alpha=0.2", "islands.algorithm=downpour"),
        ("islands.momentum=0.2", "islands.server_optimizer=adagrad"),
        ("islands.compensation=0.2", "islands.algorithm=downpour"),
        ("islands.grace=2", "islands.quorum=0"),
        ("islands.error_feedback=false", "islands.wire=f32"),
        ("optimizer_mode=islands optimizer.b1=0.8", "whose optimizer is the store's"),
    ],
)
def test_a_value_that_nothing_reads_is_refused(setting, because):
    *_, last = setting.split()
    with pytest.raises(ConfigError) as caught:
        with_settings(recipes.get("tiny"), setting.split())
    said = str(caught.value)
    assert said.startswith(f"--set {last}: nothing reads it with ") and because in said
    assert said.endswith("; leave it out, or change that")


def test_a_value_that_is_there_already_may_be_said_again():
    tiny = recipes.get("tiny")
    assert with_settings(tiny, ["model.shared_experts=0"]) == tiny


def test_former_names_of_fields_still_work():
    config = with_settings(recipes.get("tiny"), ["model.loss_chunk=8"])
    assert config.model.loss_block == 8
    stored = dataclasses.asdict(config)
    assert recipes.stored(stored) == config
    stored["model"]["loss_chunk"] = stored["model"].pop("loss_block")
    assert recipes.stored(stored) == config
    stored["model"]["loss_size"] = 8
    with pytest.raises(ConfigError, match="'loss_size', which this version does not"):
        recipes.stored(stored)


def test_every_optimizer_mode_makes_a_mode_from_its_settings():
    """Its settings are the field of the configuration with its name."""
    for name in MODES:
        config = with_mode(recipes.get("tiny"), name)
        assert config.optimizer_mode == name
        assert (programs.make_mode(config) is None) == (name == SYNCHRONOUS)
        assert hasattr(config, name) != (name == SYNCHRONOUS)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        recipes.get("tinny")


@pytest.mark.parametrize("num", [1, 2, 4, 6, 8, 64])
def test_default_layout_fills_all_devices(num):
    assert layouts.parse(recipes.get("tiny").default_layout(num)).num_devices == num
    assert recipes.get("tiny").default_layout(8) == "data=2,fsdp=2,tensor=2"


def test_vocabulary_comes_from_the_data_or_must_hold_it(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    corpus = data.load(DataConfig(path=str(tmp_path)))
    config = recipes.get("tiny")
    assert config.fitted(corpus).model.vocab == 256
    small = with_settings(config, ["model.vocab=100"])
    with pytest.raises(ConfigError, match="model.vocab=100.*token id 1"):
        small.fitted(corpus)


def test_published_hyperparameters():
    llama = recipes.get("llama2-70b")
    assert llama.batch_size * llama.model.length == 2**22
    assert llama.steps == 476_837 and llama.optimizer.warmup_steps == 2000
    assert llama.optimizer.learning_rate == 1.5e-4 and llama.optimizer.eps == 1e-5
    gpt = recipes.get("gpt3-175b")
    assert gpt.optimizer.learning_rate == 0.6e-4
    tokens = gpt.batch_size * gpt.model.length
    assert gpt.optimizer.warmup_steps * tokens == pytest.approx(375e6, rel=0.01)
    assert gpt.steps * tokens == pytest.approx(300e9, rel=0.01)


def test_linen_refuses_what_it_does_not_have():
    config = with_settings(recipes.get("bytes-linen"), ["model.vocab=256"])
    config.make_model()
    with pytest.raises(MeshparError, match="model.norm='rmsnorm'.*framework=nnx"):
        with_settings(config, ["model.norm=rmsnorm"]).make_model()


def test_learning_rate_warms_up_and_decays():
    rates = optimizers.learning_rates(
        OptimizerConfig(learning_rate=1.0, warmup_steps=10), steps=100
    )
    assert 0 < rates(0) < rates(5) < rates(10) == 1.0
    assert rates(100) == pytest.approx(0.1)
