"""Defaults of pipelines: what stages save, who runs the head, and when sums move."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.marks import slow
from support.tiny_models import lower, model

import meshpar
from meshpar import compose
from meshpar.layouts import parse
from meshpar.pipeline.stage_memory import stage_bytes

DEEP = model(depth=4)


@pytest.mark.parametrize(
    "layout, saves",
    [
        ("pipe=2", False),
        slow("pipe=2,remat=full", True),
        slow("pipe=2,remat=dots", False),
        ("pipe=2,save=residuals", True),
        slow("pipe=2,remat=full,save=inputs", False),
    ],
)
def test_no_layer_runs_forward_three_times_unless_asked(layout, saves):
    runner = lower(f"{layout},microbatches=2", DEEP).lowering.runner
    assert runner.saves_residuals == saves
    again = "forward again" in [run.name for run in runner.layer_passes]
    assert again == (not saves)


def test_what_no_pipeline_does_is_the_default_without_one():
    assert parse("data=2,vocab=edge,save=inputs") == parse("data=2")


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(compose, "LARGE_VOCABULARY", 64)


def test_a_large_vocabulary_is_split_over_the_stages(small_is_large):
    assert lower("pipe=2,microbatches=2", DEEP).layout.vocab == "pipe"
    assert lower("pipe=2,microbatches=2,vocab=edge", DEEP).layout.vocab == "edge"
    assert lower("data=2", DEEP).layout.vocab == "auto"


def test_a_small_vocabulary_stays_at_the_edges():
    layout = lower("pipe=2,microbatches=2", DEEP).layout
    assert layout.vocab == "auto" and not layout.splits_vocabulary


class Plain(nnx.Module):
    """Names the dims of its vocabulary, and reads it in ways of its own."""

    def __init__(self, rngs):
        def weight(names, *shape):
            return nnx.Param(rngs.params.normal(shape) / 4, out_sharding=names)

        self.table = weight(("vocab", "embed"), 64, 8)
        self.layers = nnx.List(
            [nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)]
        )
        self.head = weight(("embed", "vocab"), 8, 64)


def plain():
    def loss(module, batch):
        x = module.table[...][batch["tokens"]]
        for layer in module.layers:
            x = layer(x)
        logits = x @ module.head[...]
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    return meshpar.from_nnx(Plain, loss, layers="layers")


def test_a_head_that_forbids_the_split_is_named(small_is_large, monkeypatch):
    monkeypatch.setattr(compose, "_uses_vocabulary", lambda *_: True)
    program = lower("pipe=2,microbatches=2", plain())
    assert not program.layout.splits_vocabulary
    assert "vocab=auto took edge (" in program.why_auto


def test_a_model_that_reads_its_vocabulary_otherwise_keeps_it_whole(small_is_large):
    program = lower("pipe=2,microbatches=2", plain())
    assert program.layout.vocab == "auto" and program.why_auto.count("vocab") == 0


@pytest.mark.slow
def test_zero_2_reduces_in_every_tick_and_holds_shards_of_the_sums():
    def of(zero):
        program = lower(f"pipe=2,fsdp=4,microbatches=2,zero={zero}", DEEP)
        terms = program.inspection.written_terms
        moves = sum(t.count for t in terms if t.kind == "reduce_scatter")
        runner = program.lowering.runner
        return moves, stage_bytes(runner.frame, runner.zero)[1]

    (once, whole), (often, shards) = of(1), of(2)
    ticks = 3
    assert often > once and often >= ticks
    assert shards < whole / 2
