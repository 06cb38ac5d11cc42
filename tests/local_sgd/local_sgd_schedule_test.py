"""The bound, the schedule and the refusals of local SGD."""

import itertools

import numpy as np
import pytest
from support import tiny_models
from support.regression import NESTEROV, SGD, lower, train

import meshpar
from meshpar import local_sgd
from meshpar.errors import StalenessError
from meshpar.local_sgd.schedule import SyncSchedule, check_arrival


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(period=4, staleness=4), "staleness=4 with period=4.*at most 3"),
        (dict(period=4, staleness=-1), "staleness=-1"),
        (dict(period=8, fragments=4, staleness=3), "period / fragments; use at most 2"),
        (dict(period=2, fragments=3), "fragments=3 with period=2"),
        (dict(period=0), "period=0"),
        (dict(period=lambda t: 8 if t < 50 else 2, staleness=2), "with period=2"),
        (dict(period=lambda t: 8 if t < 50 else 1, staleness=2), "at step 56 while a"),
        (dict(merge=local_sgd.Elastic(0.1), outer=NESTEROV), "leave `outer` out"),
        (dict(gossip=local_sgd.Gossip("ring"), wire="int8"), "leave out wire=int8"),
        (dict(gossip=local_sgd.Gossip("ring"), outer=NESTEROV), "leave out outer"),
        (dict(damping=-1.0), "damping=-1"),
    ],
)
def test_bounds_are_refused_with_the_numbers(options, words):
    with pytest.raises(StalenessError, match=words):
        meshpar.LocalSGD(**options)


def test_settings_that_do_not_fit_the_replicas_are_refused():
    with pytest.raises(meshpar.LayoutError, match="replica=2.*mode=LocalSGD"):
        lower("replica=2", SGD)
    with pytest.raises(meshpar.LayoutError, match="add replica=N"):
        lower("data=2", SGD, mode=meshpar.LocalSGD())
    with pytest.raises(StalenessError, match="replicas \\* alpha = 1.6"):
        lower("replica=4", SGD, mode=meshpar.LocalSGD(merge=local_sgd.Elastic(0.4)))
    with pytest.raises(meshpar.MeshparError, match="needs a power of 2"):
        local_sgd.Gossip("exponential").rounds(6)
    with pytest.raises(meshpar.MeshparError, match="rows and columns have to sum to 1"):
        local_sgd.Gossip([np.eye(4) / 2]).rounds(4)
    with pytest.raises(meshpar.MeshparError, match=r"is \[4, 4\]; replica=2 needs"):
        local_sgd.Gossip([np.eye(4)]).rounds(2)
    with pytest.raises(meshpar.MeshparError, match="wire='int7'"):
        meshpar.LocalSGD(wire="int7")


@pytest.mark.parametrize(
    "layout, lowering, words",
    [
        ("data=2", "", "mode=LocalSGD with replica=1: .*add replica=N"),
        ("replica=2", "auto", "LocalSGD with lowering=auto.*use lowering=shard_map or"),
        (
            "replica=2,pipe=2,microbatches=2,schedule=pipedream",
            "",
            "mode=LocalSGD with schedule=pipedream: .*use schedule=1f1b",
        ),
        (
            "replica=2,pipe=2,microbatches=2,virtual_stages=2",
            "",
            "mode=LocalSGD with schedule=interleaved: .*use virtual_stages=1",
        ),
    ],
)
def test_the_reason_names_the_remedy(layout, lowering, words):
    options = dict(mode=meshpar.LocalSGD(), lowering=lowering)
    with pytest.raises(meshpar.LayoutError, match=words):
        tiny_models.lower(layout, tiny_models.model(depth=4), **options)


@pytest.mark.slow
def test_synchronous_pipelines_have_replicas():
    options = dict(mode=meshpar.LocalSGD(), lowering="shard_map")
    assert tiny_models.lower("replica=2,pipe=2,microbatches=2", **options)


MODES = [
    (period, s, fragments, graph)
    for period, s, fragments in itertools.product((1, 2, 5, 8), (0, 1, 2, 4), (1, 2, 4))
    if s < period and fragments <= period and s * fragments <= period
    for graph in (None, local_sgd.Gossip("ring"))
]


@pytest.mark.parametrize("period, s, fragments, graph", MODES)
def test_every_snapshot_arrives_in_time_and_whole(period, s, fragments, graph):
    mode = meshpar.LocalSGD(period, s, fragments, gossip=graph)
    schedule, launched, arrivals = SyncSchedule(mode), {}, 0
    scattered, gathered = {}, {}
    for step in range(1, 6 * period + 1):
        transfer, arrive, launch, at_once, _ = schedule.actions(step)
        if transfer is not None:
            if transfer.scatter is not None:
                scattered.setdefault(transfer.fragment, []).append(transfer.scatter)
            if transfer.gather is not None:
                gathered.setdefault(transfer.fragment, []).append(transfer.gather)
                assert transfer.gather in scattered[transfer.fragment]
        if arrive is not None:
            assert step == launched.pop(arrive) + s and not at_once | (s == 0)
            slices = list(range(mode.num_slices))
            assert scattered.pop(arrive) == slices
            assert gathered.pop(arrive, []) == (slices if graph is None else [])
            arrivals += 1
        for fragment in launch:
            if at_once:
                arrivals += 1
            else:
                launched[fragment] = step
    assert arrivals + len(launched) == 6 * fragments


def test_a_late_arrival_stops_the_run(monkeypatch):
    """Broken on purpose: a snapshot is merged one step after the bound."""
    actions = SyncSchedule.actions

    def one_step_late(self, step):
        arrive = actions(self, step - 1).arrive if step > 1 else None
        return actions(self, step)._replace(arrive=arrive)

    monkeypatch.setattr(SyncSchedule, "actions", one_step_late)
    mode = meshpar.LocalSGD(4, staleness=2)
    with pytest.raises(StalenessError, match="step 7: fragment 0.*step 4.*bound is s"):
        train(lower("replica=2", SGD, mode=mode))
    with pytest.raises(StalenessError, match="was never taken"):
        check_arrival(mode.staleness, 0, -1, 3)
