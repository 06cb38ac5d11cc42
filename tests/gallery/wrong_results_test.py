"""Claims of figures see results that are wrong; small cases of what they compute."""

import numpy as np
from support.figures import failed

from experiments.gallery import (
    galvatron,
    hogwild,
    host_memory,
    parameter_server,
    sandblaster,
    unsupervised,
)
from experiments.gallery.linear_classifiers import LOGISTIC, RIDGE
from meshpar.methods.dbpg.training import Pass, Result


def trained(sent, pushed=0.1, weights=(1.0, 0.0), objective=100.05):
    passes = [Pass(i + 1, objective, 1, pushed, sent) for i in range(10)]
    return Result(np.array(weights, np.float32), passes, [], sent)


def outcomes():
    names = list(parameter_server._cases(parameter_server.Settings()))
    return dict(zip(names, map(trained, (400, 300, 200, 100)), strict=True))


def test_filters_that_lose_or_send_too_much_are_seen():
    found, claims = outcomes(), parameter_server.claims_of
    last = list(found)[-1]
    assert failed(claims(found, found[last], 100.0)) == []
    (text,) = failed(claims(found, found[last], 99.0))
    assert "within 1e-3" in text
    (text,) = failed(claims({**found, last: trained(100, 0.3)}, found[last], 100.0))
    assert text.startswith("keys that are pushed")
    (text,) = failed(claims({**found, last: trained(500)}, found[last], 100.0))
    assert text.startswith("every filter sends less")
    (text,) = failed(claims(found, trained(100, weights=(1.0, 1e-7)), 100.0))
    assert text.startswith("a server dies")
    changed = {**found, list(found)[1]: trained(300, weights=(1.0, 1e-7))}
    (text,) = failed(claims(changed, found[last], 100.0))
    assert text.startswith("key caching and compression")


def test_a_step_that_is_not_that_of_lbfgs_is_seen():
    costs = {
        backup: {n: sandblaster.cost(n, backup) for n in sandblaster._PORTIONS}
        for backup in (False, True)
    }
    assert failed(sandblaster.claims_of([2.0, 1.0], [2.0, 1.0], costs)) == []
    (text,) = failed(sandblaster.claims_of([2.0, 1.00001], [2.0, 1.0], costs))
    assert text.startswith("equals SciPy's")
    slow = {**costs, True: {**costs[True], sandblaster._PORTIONS[-1]: 1.31}}
    assert len(failed(sandblaster.claims_of([1.0], [1.0], slow))) == 3
    without = {True: costs[False], False: costs[False]}
    (text,) = failed(sandblaster.claims_of([1.0], [1.0], without))
    assert text.startswith("with backups a batch ends")


def test_a_sparse_problem_that_loses_updates_is_seen():
    found = {"sparse": {1: [0.0], 2: [0.004], 4: [-0.005]}}
    found["dense"] = {1: [0.0], 2: [0.04], 4: [0.07]}
    assert failed(hogwild.claims_of(found)) == []
    lossy = {**found, "sparse": {1: [0.0], 2: [0.004], 4: [0.02]}}
    (text,) = failed(hogwild.claims_of(lossy))
    assert text.startswith("sparse rows")
    (text,) = failed(hogwild.claims_of({**found, "dense": {1: [0.0], 4: [0.001]}}))
    assert text == "dense rows lose more"


def test_a_search_below_a_limited_one_is_seen():
    found = {"data": {4: 0.0, 8: 2.0}, galvatron._FULL: {4: 1.0, 8: 3.0}}
    assert failed(galvatron.claims_of(found, {8: 3.0})) == []
    (text,) = failed(galvatron.claims_of({**found, "data": {4: 0.0, 8: 3.1}}, {8: 3.0}))
    assert text.startswith("never below")
    (text,) = failed(galvatron.claims_of(found, {8: 3.1}))
    assert text.startswith("never below the best of all layouts")
    shrinks = {**found, galvatron._FULL: {4: 4.0, 8: 3.0}}
    (text,) = failed(galvatron.claims_of(shrinks, {8: 3.0}))
    assert text == "more memory is never slower"


def test_offload_that_changes_losses_or_saves_little_is_seen():
    curves = {name: np.ones(3) for name in ("none", "optimizer")}
    sizes = {"none": 1.8, "optimizer": 13.5}
    assert failed(host_memory.claims_of(sizes, curves)) == []
    (text,) = failed(host_memory.claims_of({**sizes, "optimizer": 12.0}, curves))
    assert text.startswith("13 billion parameters fit")
    other = {**curves, "optimizer": np.array([1, 1, 1 + 2e-6])}
    (text,) = failed(host_memory.claims_of(sizes, other))
    assert text.startswith("3 losses")
    assert host_memory._compiled_claim(13.0, 33.0, 34.0).holds
    assert not host_memory._compiled_claim(13.0, 35.0, 34.0).holds
    assert not host_memory._compiled_claim(13.0, 28.0, 34.0).holds


def test_features_that_do_not_help_or_depend_on_the_mesh_are_seen():
    kinds = unsupervised.PIXELS, unsupervised.MACHINE, unsupervised.NETWORK
    kinds += unsupervised.RANDOM, unsupervised.CODES
    by_kind = {kind: [0.8 + i / 50] for i, kind in enumerate(kinds)}
    by_kind[unsupervised.MACHINE] = by_kind[unsupervised.NETWORK] = [0.86]
    errors, flops = {unsupervised.MACHINE: 1e-14}, {256: (8.0, 2.0), 1024: (8.0, 1.0)}
    both = {RIDGE: by_kind, LOGISTIC: by_kind}
    claims = unsupervised.claims_of
    assert failed(claims(errors, both, flops)) == []
    (text,) = failed(claims({unsupervised.MACHINE: 1e-7}, both, flops))
    assert "equals one device" in text
    (text,) = failed(claims(errors, both, {256: (8.0, 1.0), 1024: (8.0, 2.0)}))
    assert text.startswith("a device of 8")
    lower = {**by_kind, unsupervised.NETWORK: [0.79]}
    (text,) = failed(claims(errors, {**both, LOGISTIC: lower}, flops))
    assert text == "DBN, two RBMs lifts logistic regression"
    little = {**by_kind, unsupervised.MACHINE: [0.84]}
    (text,) = failed(claims(errors, {**both, RIDGE: little}, flops))
    assert text == "RBM lifts ridge by 5 points"
    same = {**by_kind, unsupervised.RANDOM: by_kind[unsupervised.CODES]}
    (text,) = failed(claims(errors, {**both, RIDGE: same}, flops))
    assert text.startswith("learned bases")
