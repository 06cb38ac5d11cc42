"""The table of refusals: every record is met, and layouts that fit are not refused."""

import collections
import dataclasses
import functools
import itertools
import pickle
import random

import pytest

from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.explain.random_layouts import draw_layouts
from meshpar.islands.mode import Islands
from meshpar.layouts.layout import DEFAULTS
from meshpar.layouts.refusals import OF_GENERATION, OF_LAYOUTS, OF_TRAINING, REFUSALS
from meshpar.layouts.refusals.combination import Combination, ModelTraits
from meshpar.layouts.refusals.reasons import (
    UnsupportedError,
    check,
    first_reason,
    fitting,
    possible_lowerings,
    reasons,
)
from meshpar.layouts.remat import NONE, REMAT_POLICIES
from meshpar.local_sgd.mode import LocalSGD
from meshpar.pipeline.spec import pipeline_traits

ISLANDS, LOCAL_SGD = Islands().traits, LocalSGD().traits
PLAIN, LAYERED = ModelTraits(), ModelTraits(8)
NORMALIZED = ModelTraits(changed="norm/mean")
OWN_EVALUATION = ModelTraits(8, evaluates=False)


def combination(layout, model=LAYERED, lowering="", mode=None, clip_norm=None):
    pipelines = functools.partial(pipeline_traits, depth=model.depth)
    layout = layouts.parse(layout)
    return Combination(layout, model, lowering, mode, clip_norm, pipelines)


OF_ONE_LAYOUT = [
    ("data=4,zero=2", "zero=2 with fsdp=1", "fsdp=4,zero=2"),
    ("data=4,vocab=pipe,save=residuals", "vocab=pipe, save=residuals with", "data=4"),
    (
        "data=2,context_mode=ring,context_order=striped",
        "context_order=striped",
        "data=2",
    ),
    ("context=4,context_heads=2", "mode=allgather", "context=4,context_mode=ring,"),
    ("context=4,context_mode=ring,context_heads=4", "with context=4", "mode=ulysses"),
    ("context=2,context_mode=ulysses,context_order=zigzag", "zigzag", "mode=ulysses"),
    ("pipe=2,remat=3*full+5*dots", "with pipe=2: all stages", "pipe=2,remat=dots"),
    ("pipe=2,offload=optimizer", "offload=optimizer with pipe=2", "pipe=2"),
    ("replica=2,offload=optimizer", "optimizer with replica=2", "replica=2"),
    ("fsdp=2,zero=1,offload=parameters", "with zero=1", "zero=3,offload=parameters"),
    ("data=2,layers=fsdp", "layers=fsdp with tensor=1", "data=2"),
    ("tensor=2,pipe=2,layers=fsdp", "with pipe=2: beside", "pipe=2,tensor=2"),
    ("tensor=2,fsdp=2,zero=2,layers=fsdp", "with zero=2", "zero=3,layers=fsdp"),
    ("tensor=2,layers=fsdp,offload=optimizer", "with offload", "offload=optimizer"),
    ("pipe=2,scan_unroll=2", "scan_unroll=2 with pipe=2", "pipe=2"),
    (
        "fsdp=2,zero=2,prefetch=mlp",
        "prefetch=mlp with fsdp=2,zero=2",
        "zero=3,prefetch",
    ),
]
"""One layout for each record of `OF_LAYOUTS`, words of its message, and of the layout
that fits."""


@pytest.mark.parametrize(
    "refusal, case", [*zip(OF_LAYOUTS, OF_ONE_LAYOUT, strict=True)]
)
def test_a_layout_meets_each_record_of_its_own(refusal, case):
    layout, words, near = case
    with pytest.raises(UnsupportedError) as error:
        layouts.parse(layout)
    assert [reason.refusal for reason in error.value.reasons] == [refusal]
    cause, fits = str(error.value).split("\nThis layout fits: ")
    assert words in cause and cause.endswith(f": {refusal.why}; {refusal.remedy}")
    assert near in str(layouts.parse(fits))


OF_A_COMBINATION = [
    (dict(layout="pipe=2", model=PLAIN), "pipe=2: this needs layers", "data=2"),
    (
        dict(layout="data=2", model=NORMALIZED, lowering="shard_map"),
        "changes norm/mean by the whole batch",
        "",
    ),
    (
        dict(layout="fsdp=2,activations.batch=none", lowering="shard_map"),
        "activations.batch=none: .*or use lowering=jit",
        "fsdp=2,zero=3",
    ),
    (
        dict(layout="fsdp=2,params.layers=fsdp", lowering="shard_map"),
        "params.layers=fsdp: .*or use lowering=jit",
        "fsdp=2,zero=3",
    ),
    (
        dict(layout="pipe=2,microbatches=2", lowering="jit"),
        "pipe=2: .*or use lowering=shard_map",
        "data=2,microbatches=2",
    ),
    (
        dict(layout="data=2,scan_unroll=2", lowering="jit"),
        "scan_unroll=2: .*or use lowering=shard_map",
        "data=2",
    ),
    (
        dict(layout="fsdp=2,prefetch=mlp,offload=activations", lowering="jit"),
        "prefetch=mlp, offload=activations: ",
        "fsdp=2,zero=3",
    ),
    (
        dict(layout="context=2,context_order=striped", lowering="jit"),
        "context_order=striped: .*or use lowering=shard_map",
        "context=2",
    ),
    (dict(layout="remat=3*full+4*none"), "names 7 layers, the model has 8", ""),
    (
        dict(layout="pipe=2,schedule=1f1b,virtual_stages=2"),
        "schedule=1f1b has one chunk",
        "pipe=2,schedule=1f1b",
    ),
    (dict(layout="pipe=2", model=OWN_EVALUATION), "evaluation_loss_fn", "data=2"),
    (
        dict(layout="pipe=2,fsdp=2,save=residuals,schedule=pipedream", clip_norm=1.0),
        "fsdp=2, save=residuals, clip_norm=1.0 with schedule=pipedream",
        "pipe=2,fsdp=2,zero=2,schedule=1f1b,save=residuals",
    ),
    (dict(layout="replica=2"), r"replica=2: .*give mode=LocalSGD", "data=2"),
    (
        dict(layout="data=2", mode=LOCAL_SGD),
        "mode=LocalSGD with replica=1: .*add replica=N",
        "replica=2",
    ),
    (
        dict(layout="replica=2", mode=ISLANDS),
        "mode=Islands with replica=2: .*use more islands",
        "data=2",
    ),
    (
        dict(layout="replica=2", mode=LOCAL_SGD, lowering="auto"),
        "mode=LocalSGD with lowering=auto: .*use lowering=shard_map or jit",
        "",
    ),
    (
        dict(layout="pipe=2,schedule=pipedream", mode=ISLANDS),
        "mode=Islands with schedule=pipedream",
        "pipe=2,schedule=1f1b",
    ),
    (
        dict(layout="replica=2,pipe=2,partition=5/3", mode=LOCAL_SGD),
        "mode=LocalSGD with schedule=1f1b: that pipeline stores",
        "replica=2,pipe=2",
    ),
]
"""One combination for each record of `OF_TRAINING` that is not of a layout alone."""


@pytest.mark.parametrize(
    "refusal, case",
    [*zip(OF_TRAINING[len(OF_LAYOUTS) :], OF_A_COMBINATION, strict=True)],
)
def test_a_combination_meets_each_record(refusal, case):
    given, words, near = case
    with pytest.raises(UnsupportedError, match=words) as error:
        check(combination(**given), OF_TRAINING)
    assert [reason.refusal for reason in error.value.reasons] == [refusal]
    assert str(error.value).partition("\nThis layout fits: ")[2] == near
    if near:
        assert first_reason(combination(**given | {"layout": near}), OF_TRAINING) == ""


@pytest.mark.parametrize(
    "refusal, layout, model, words, near",
    [
        (OF_GENERATION[0], "data=2", PLAIN, "generation: .*give cached=", ""),
        (OF_GENERATION[1], "replica=2", PLAIN, "replica=2: .*use data", "data=2"),
        (
            OF_GENERATION[2],
            "fsdp=2,offload=optimizer+parameters",
            PLAIN,
            "offload=optimizer.parameters: .*over_layers",
            "fsdp=2,zero=3,offload=optimizer",
        ),
    ],
)
def test_generation_meets_each_record(refusal, layout, model, words, near):
    model = model._replace(caches=refusal != OF_GENERATION[0])
    with pytest.raises(UnsupportedError, match=words) as error:
        check(combination(layout, model), OF_GENERATION)
    assert [reason.refusal for reason in error.value.reasons] == [refusal]
    assert str(error.value).partition("\nThis layout fits: ")[2] == near


def test_all_records_have_a_case_and_their_words_are_whole():
    assert len(REFUSALS) == len({(one.feature, one.beside) for one in REFUSALS})
    assert len(REFUSALS) == len(OF_ONE_LAYOUT) + len(OF_A_COMBINATION) + 3
    for one in REFUSALS:
        assert all((one.feature, one.beside, one.why, one.remedy))


def test_several_causes_stand_in_one_message_each_once():
    with pytest.raises(UnsupportedError) as error:
        layouts.parse("pipe=2,tensor=2,layers=fsdp,offload=optimizer")
    first, *causes, fits = str(error.value).splitlines()
    assert first.startswith('layout "pipe=2,tensor=2,layers=fsdp,offload=optimizer"')
    assert len(causes) == len(set(causes)) == 3
    assert fits == "This layout fits: pipe=2,tensor=2"


def test_a_layout_that_fits_has_sizes_that_fit():
    refused = combination("fsdp=4,pipe=2,schedule=pipedream")
    near = fitting(refused, OF_TRAINING)
    assert near == "pipe=2,data=4,schedule=pipedream"
    without_data = fitting(refused, OF_TRAINING, lambda layout: layout.data == 1)
    assert without_data == "pipe=2,fsdp=4,zero=2,schedule=1f1b"
    assert fitting(refused, OF_TRAINING, lambda _: False) == ""


def test_a_refusal_by_both_lowerings_names_both():
    both = combination("pipe=2,activations.batch=none")
    assert possible_lowerings(both, OF_TRAINING) == ()
    reason = first_reason(both, OF_TRAINING)
    assert "pipe=2: the compiler makes no pipeline; leave pipe out" in reason
    assert "lowering=shard_map is not possible: activations.batch=none" in reason
    assert fitting(both, OF_TRAINING) == "data=2,activations.batch=none"
    rule = combination("fsdp=2,activations.batch=none", lowering="auto")
    assert possible_lowerings(rule, OF_TRAINING) == ("jit",)


def test_an_error_goes_to_another_process_with_its_message():
    with pytest.raises(UnsupportedError) as error:
        layouts.parse("data=4,zero=2")
    again = pickle.loads(pickle.dumps(error.value))
    assert isinstance(again, LayoutError) and str(again) == str(error.value)


def test_no_refusal_looks_at_which_policy_all_layers_have():
    """Planners check a layout under one policy for all (`space.layouts`)."""
    rng, refused = random.Random(0), 0
    drawn = [layouts.parse(draw.layout) for draw in draw_layouts(300, 8, seed=6)]
    for one, other in itertools.pairwise(drawn):
        fields = rng.sample(sorted(DEFAULTS), len(DEFAULTS) // 2)
        mixed = one.unchecked({name: getattr(other, name) for name in fields})
        met = []
        for policy in (NONE, *REMAT_POLICIES):
            layout = mixed.unchecked({"remat": policy})
            asked = dataclasses.replace(combination("data=1"), layout=layout)
            tables = OF_LAYOUTS, OF_TRAINING
            met.append([r.refusal for table in tables for r in reasons(asked, table)])
        assert all(causes == met[0] for causes in met), mixed
        refused += bool(met[0])
    assert 50 < refused < 250


def test_layouts_that_fit_random_combinations_are_not_refused():
    rng, counts = random.Random(0), collections.Counter()
    for draw in draw_layouts(400, 8, seed=5):
        model = rng.choice([PLAIN, NORMALIZED, LAYERED, OWN_EVALUATION])
        mode, clip_norm = rng.choice([None, ISLANDS]), rng.choice([None, 1.0])
        asked = combination(draw.layout, model, draw.lowering, mode, clip_norm)
        if not any(reasons(asked, OF_TRAINING)):
            continue
        near = fitting(asked, OF_TRAINING)
        counts[bool(near)] += 1
        if near:
            other = combination(near, model, draw.lowering, mode, clip_norm)
            assert list(reasons(other, OF_TRAINING)) == []
            assert other.layout.num_devices == asked.layout.num_devices
    assert counts[True] > 100 and counts[True] > 4 * counts[False]
