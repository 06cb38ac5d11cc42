"""Random layouts: drawn from the grammar, each equal, refused or wrong."""

import jax
from support import tiny_stack

import meshpar
from meshpar.explain import random_layouts
from meshpar.explain.random_layouts import (
    EQUAL,
    REFUSED,
    WRONG,
    Draw,
    draw_layouts,
    verify_layouts,
)
from meshpar.layouts.axes import PIPE, REPLICA
from meshpar.layouts.layout import DEFAULTS, parse
from meshpar.lowering import shard_map

BATCHES = [tiny_stack.batch()]


def test_draws_follow_the_seed_and_fit_the_devices():
    draws = draw_layouts(500, 8, seed=1)
    assert draws == draw_layouts(500, 8, seed=1) != draw_layouts(500, 8, seed=2)
    layouts = [parse(draw.layout) for draw in draws]
    assert {layout.num_devices for layout in layouts} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert sum(layout.num_devices == 8 for layout in layouts) > 250
    for axis in random_layouts.DRAWN_AXES:
        assert {layout.sizes[axis] for layout in layouts} >= {1, 2, 4, 8}
    assert {draw.lowering for draw in draws} == {"", "jit", "shard_map"}


def test_draws_keep_to_the_axes_that_are_asked_for():
    layouts = [parse(d.layout) for d in draw_layouts(300, 8, axes=("data", "fsdp"))]
    assert {layout.data * layout.fsdp for layout in layouts} == set(range(1, 9))
    assert all(layout.pipe == layout.tensor == 1 for layout in layouts)


def test_every_option_of_a_layout_is_drawn_or_left_out_by_name():
    """A new option needs a line among the options that are drawn, or here."""
    drawn = {*random_layouts.DRAWN_AXES, *random_layouts.OPTIONS}
    drawn |= {*random_layouts.SHARDED, *random_layouts.SPLIT}
    drawn |= {*random_layouts.UNPIPED, *random_layouts.PIPELINE}
    needs_the_model = {"params", "activations", "paths", "prefetch", "partition"}
    needs_the_model |= {"expert", "axes"}
    assert drawn | needs_the_model | {REPLICA, "allow"} == set(DEFAULTS)
    layouts = [parse(draw.layout) for draw in draw_layouts(500, 8)]
    for name in drawn:
        values = {getattr(layout, name) for layout in layouts}
        assert len(values) > 1, name
    assert any(layout.pipe == 2 and layout.vocab == PIPE for layout in layouts)


def test_outcomes_are_equal_refused_and_wrong(capsys):
    compiled = []

    def lower_layout(layout, lowering):
        if layout.data == 8:
            raise KeyError("a bug of ours")
        compiled.append(layout)
        return tiny_stack.lower(layout, lowering)

    draws = [
        Draw("fsdp=2", "jit"),
        Draw("fsdp=3"),
        Draw("pipe=2", "jit"),
        Draw("data=8"),
        Draw("pipe=2,microbatches=4"),
    ]
    outcomes = list(verify_layouts(lower_layout, draws, BATCHES))
    assert [o.verdict for o in outcomes] == [EQUAL, REFUSED, REFUSED, WRONG, EQUAL]
    assert "batch=16 does not divide" in str(outcomes[1])
    assert "the compiler makes no pipeline" in outcomes[2].reason
    assert "KeyError" in outcomes[3].reason
    assert "a bug of ours" in capsys.readouterr().err
    # No program on one device is compiled: the judge is a plain loop.
    assert meshpar.Layout() not in compiled


def test_a_difference_is_wrong_and_named(monkeypatch):
    """Gradients are twice what their devices add up to."""
    reduce = shard_map.all_reduce_grads

    def twice(*args):
        return jax.tree.map(lambda x: 2 * x, reduce(*args))

    monkeypatch.setattr(shard_map, "all_reduce_grads", twice)
    draws = [Draw("data=2")]
    (outcome,) = verify_layouts(tiny_stack.lower, draws, BATCHES)
    assert outcome.verdict == WRONG
    assert outcome.reason.startswith("first gradient ")
