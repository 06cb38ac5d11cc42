"""Models of any layer, drawn at random: each equals a plain loop, or is refused."""

import re

import pytest
from models.random_models import EQUAL, REFUSED, Draw, draw, named, outcome
from support.marks import first

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")

NUM_DRAWS = 200

EXPECTED = {
    "as in batch normalization": "BatchNorm sees all rows of a batch at once",
    "is no mean over rows: .* use a layer that keeps no such state": "nor its state",
    "models that run layer by layer keep no running state": "layers are pure",
    "a layer keeps .*, which is no parameter": "layers are pure, in Linen too",
    "nnx.SpectralNorm and nnx.WeightNorm write into": "only optimizers change weights",
    "lowering=shard_map, and the model changes": "a shard sees a part of the batch",
    "a loop runs as long as the batch says": "rows wait for each other",
    "feature groups, .*lowering=jit": "XLA's gradient is wrong there",
    "of all layers that nn.scan stacks": "no device has all of them",
}
"""{words of a refusal: why nothing else can be done}."""

CHOSEN = [
    ("nnx sequences scanned lstm+filtered masked adamw", "data=2,microbatches=2"),
    ("nnx images one sown+cached+counter sown sgd", "data=4"),
    ("linen images remat weight_norm+spectral_norm cosine lion", "fsdp=4,zero=2"),
    # With -m slow:
    ("nnx tokens twice shared+row_by_row+ensemble with_metrics multi", "fsdp=2"),
    ("linen sequences layers dense+decayed penalized partly", "pipe=2,microbatches=2"),
    (
        "nnx images one conv+batch_norm+depthwise mean_squares momentum",
        "data=2,fsdp=2",
    ),
    ("nnx sequences layers attention+layer_norm weighted lamb", "fsdp=4"),
    ("nnx sequences attributes gru+dropout scheduled clipped", "pipe=2,microbatches=2"),
    (
        "nnx sequences one dense+lora+stacked noisy accumulated",
        "data=2,tensor=2,allow=.",
    ),
    ("linen tokens scanned causal_attention+rms_norm smoothed adafactor", "fsdp=2"),
    (
        "linen sequences one bidirectional+whitened masked_by_row by-ndim",
        "fsdp=4,zero=1",
    ),
]
NUM_BY_DEFAULT = 3
"""Models of both frameworks; -m slow has the others."""


def test_draws_follow_the_seed_and_meet_every_kind():
    draws = [draw(seed) for seed in range(NUM_DRAWS)]
    assert draws == [draw(seed) for seed in range(NUM_DRAWS)]
    assert len(set(draws)) == NUM_DRAWS
    parts = {part for each in draws for part in each.parts}
    assert len(parts) > 55
    for name, least in ("loss", 12), ("optimizer", 24), ("layout", 20):
        assert len({getattr(each, name) for each in draws}) >= least, name


@pytest.mark.parametrize(
    "words, layout",
    first(NUM_BY_DEFAULT, CHOSEN),
    ids=[words for words, _ in CHOSEN],
)
def test_chosen_models_equal_a_plain_loop(words, layout):
    framework, data, arrangement, parts, loss, optimizer = words.split()
    parts, optimizer = tuple(parts.split("+")), optimizer.replace("-", " ")
    of = Draw(framework, data, arrangement, parts, loss, optimizer, layout)
    assert outcome(of) == (EQUAL, "")


def test_a_gradient_that_xla_adds_up_wrongly_is_refused():
    of = "nnx", "sequences", "one", ("depthwise", "dense"), "mean_squares", "sgd"
    verdict, why = outcome(Draw(*of, "data=2,tensor=2,allow=."))
    assert verdict == REFUSED and "along tensor" in why
    assert "leave tensor out, or name the layers" in why
    layered = *of[:2], "layers", *of[3:]
    assert outcome(Draw(*layered, "data=2,tensor=2,allow=.")) == (EQUAL, "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_random_models_equal_a_plain_loop_or_are_refused(seed):
    of = draw(seed)
    verdict, why = outcome(of)
    assert verdict in (EQUAL, REFUSED), (named(of), why)
    if verdict == REFUSED:
        assert any(re.search(words, why) for words in EXPECTED), (named(of), why)
