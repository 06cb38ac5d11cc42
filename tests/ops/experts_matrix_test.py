"""Every layout trains a mixture of experts as one device does.

It drops the same choices, and a bias that balances the experts takes the same steps.
"""

import functools

import jax
import optax
import pytest
from support import equality
from support.marks import slow
from support.tiny_models import batch, lower, model

from meshpar import layouts
from meshpar.lowering.jit import JitLowering
from meshpar.ops import experts

STEPS = 2

LAYOUTS = [
    slow("capacity fsdp=2,expert=2,tensor=2,params.embed=fsdp+expert"),
    slow("dropless data=2,expert=4,remat=full"),
    slow("dropless pipe=2,fsdp=2,expert=2,microbatches=4"),
    slow("capacity fsdp=2,expert=2,context=2"),
    slow("dropless expert=2,context=4,remat=full"),
    slow("capacity expert=8"),
    slow("dropless fsdp=2,expert=2,tensor=2,microbatches=2"),
    slow("capacity data=2,expert=2 jit"),
    slow("capacity pipe=2,expert=2,context=2,microbatches=4"),
    slow("capacity pipe=2,fsdp=2,expert=2,microbatches=4"),
    slow("capacity expert=2"),
    slow("capacity expert=4,remat=dots"),
    slow("capacity fsdp=4,expert=2,zero=1,params.embed=fsdp+expert"),
    slow("capacity fsdp=2,expert=4,zero=2,microbatches=2,params.embed=fsdp+expert"),
    slow("capacity data=2,fsdp=2,expert=2,remat=full"),
    slow("capacity data=2,tensor=2"),
    slow("capacity tensor=4,remat=full"),
    slow("dropless tensor=2,microbatches=2"),
    slow("dropless tensor=2 jit"),
    slow("capacity pipe=2,data=2,microbatches=2"),
    slow("capacity pipe=2,expert=2,tensor=2,microbatches=4,save=residuals"),
    slow(
        "capacity pipe=2,fsdp=2,expert=2,zero=3,microbatches=4,params.embed=fsdp+expert"
    ),
    slow("dropless expert=8"),
    slow("dropless expert=2,fsdp=4,zero=2"),
    slow("dropless fsdp=2,expert=2,tensor=2,params.embed=fsdp+expert jit"),
    slow("dropless pipe=2,expert=4,microbatches=4,virtual_stages=2"),
    slow("capacity expert=2,context=4,remat=experts"),
    slow("capacity expert=2,context=2,tensor=2,remat=full"),
    slow("capacity data=2,expert=2,context=2 jit"),
    slow("dropless pipe=2,expert=2,context=2,microbatches=4,save=residuals"),
    slow("dropless fsdp=2,expert=2,context=2 jit"),
]


def program(layout, routing, depth, lowering=""):
    """Dropless mixtures are balanced by a bias, too."""
    sizes = dict(depth=depth, kv_heads=4, mlp=32, num_experts=8, routing=routing)
    optimizer = optax.adamw(1e-2, eps=1e-2)
    if routing == "capacity":
        of = model(capacity_factor=1.0, **sizes)
    else:
        of = model(router_score="sigmoid", router_bias=True, **sizes)
        optimizer = experts.balanced(optimizer, of, rate=0.01)
    return lower(layout, of, optimizer, clip_norm=1.0, lowering=lowering)


@functools.cache
def one_device(routing, depth, microbatches):
    layout = f"data=1,microbatches={microbatches}"
    batches = [batch(i) for i in range(STEPS)]
    return equality.record(program(layout, routing, depth), batches)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_equals_one_device(case):
    routing, text, *lowering = case.split()
    layout = layouts.parse(text)
    depth = 2 * layout.virtual_stages
    tested = program(layout, routing, depth, *lowering)
    assert isinstance(tested.lowering, JitLowering) == (lowering == ["jit"])
    reference = one_device(routing, depth, layout.microbatches)
    batches = [batch(i) for i in range(STEPS)]
    report = equality.compare(tested, reference, batches)
    assert report.ok, report.problem
    names = {row.tensor: row for row in report.comparisons if row.kind == "metric"}
    assert {"experts_dropped", "experts_overflow", "experts_load"} <= names.keys()
    (dropped,) = {
        float(group.tensors["experts_dropped"])
        for group in reference[1]
        if group.kind == "metric" and "experts_dropped" in group.tensors
    }
    assert (dropped > 0) == (routing == "capacity")
    # Loads are among the gradients, and no moment holds them: the bias follows them.
    biases = [row for row in report.comparisons if row.kind == "state"]
    assert len(biases) == STEPS * (routing == "dropless")
    assert all(row.error < 1e-6 for row in biases)
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    "layout", ["fsdp=2,expert=2,tensor=2", slow("tensor=2"), slow("data=2,tensor=2")]
)
def test_experts_without_a_gate_train_as_in_a_plain_loop(layout):
    sizes = dict(kv_heads=4, mlp=32, num_experts=4, routing="dropless")
    of, adam = model(activation="gelu", **sizes), optax.adamw(1e-2, eps=1e-2)
    report = equality.compare(lower(layout, of, adam), None, [batch(0)])
    assert report.ok, report.problem
