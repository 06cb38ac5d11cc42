"""Column- and row-parallel matmuls: gradients, and the bytes that they move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality import first_step
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, batch, host, lower, model, relative_error

from meshpar.collectives import transport
from meshpar.ops import tensor_split
from meshpar.ops.tensor_parallel import column_parallel, row_parallel

TINY = model()
DEPTH, EMBED = TINY.layered.depth, 32
FORWARD, BACKWARD = 2 * DEPTH, 2 * DEPTH
"""Gathers, and as many reduce_scatters: before and after attention and mlp."""

RINGS = transport.Rings({"tensor": (4,)})


def tensor_traffic(program, of=("permute", "all_gather", "reduce_scatter")):
    """{kind: (runs, bytes of one run)} of the layers' collectives over tensor."""
    found = {}
    for c in program.collectives:
        if c.axes == ("tensor",) and c.kind in of and c.executions % DEPTH == 0:
            runs, size = found.setdefault(c.kind, (0, c.payload_bytes))
            assert size == c.payload_bytes
            found[c.kind] = runs + c.executions, size
    return found


def gradients(layout, of=TINY):
    program = lower(layout, of)
    return host(program.gradients(program.init(0), batch())[1])


WANT = {}


def one_device(of, key):
    if key not in WANT:
        WANT[key] = gradients("data=1", of)
    return WANT[key]


@pytest.mark.parametrize(
    "layout, remat",
    [
        ("fsdp=2,tensor=4", "full"),
        slow("tensor=4", "full"),
        slow("fsdp=2,tensor=4", "none"),
        slow("fsdp=2,tensor=4", "dots"),
    ],
)
def test_the_bytes_are_those_of_megatron(layout, remat):
    """Two gathers and two reduce_scatters of [B, L, D] in a layer and pass."""
    program = lower(f"{layout},remat={remat}", TINY)
    assert program.violations() == []
    moved = tensor_traffic(program)
    size = BATCH // program.layout.fsdp * LENGTH * EMBED * 4
    # What is recomputed gathers what the gradients of column-parallel weights need.
    assert moved["all_gather"] == (2 * FORWARD + BACKWARD, size)
    # Recomputing a layer leaves out its last matmul.
    scatters = FORWARD + BACKWARD + (DEPTH if remat == "full" else 0)
    assert moved["reduce_scatter"] == (scatters, size)
    assert "permute" not in moved
    _, got = first_step(program, batch())
    assert relative_error(got, one_device(TINY, "tiny")) < 1e-5


@pytest.mark.parametrize(
    "gathers_beside_compute", [slow(True), False], ids=["v5e", "v5p"]
)
@pytest.mark.parametrize("remat", ["full", slow("none"), slow("dots")])
def test_around_rings(monkeypatch, gathers_beside_compute, remat):
    """Transports as on TPUs; whole activations come once more, for weights alone."""
    weights = transport.ONE_SHOT if gathers_beside_compute else RINGS
    transports = transport.Transports(weights=weights, gradients=RINGS)
    monkeypatch.setattr(transport, "LARGE_BYTES", 1)
    monkeypatch.setattr(tensor_split, "transports_for", lambda *_: transports)
    program = lower(f"fsdp=2,tensor=4,remat={remat}", TINY)
    assert program.violations() == []
    moved, part = tensor_traffic(program), BATCH // 2 * LENGTH * EMBED
    again = {"none": 0, "dots": 0, "full": FORWARD + DEPTH}[remat]
    steps = 3 * (2 * FORWARD + 2 * BACKWARD + again)
    if gathers_beside_compute:
        assert moved["all_gather"] == (FORWARD + BACKWARD, 4 * part)
        assert moved["permute"] == (steps, part)
    else:  # Parts that rows use at once are joined.
        assert moved == {"permute": (steps + 3 * FORWARD, part)}
    _, got = first_step(program, batch())
    assert relative_error(got, one_device(TINY, "tiny")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, again",
    [
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,vocab=pipe", True),
        slow("pipe=2,fsdp=2,tensor=2,microbatches=4,remat=full", True),
        slow("pipe=2,fsdp=2,tensor=2,microbatches=4,save=residuals", False),
    ],
)
def test_in_pipelines_the_bytes_are_those_of_megatron(layout, again):
    """In every tick in which a stage works; B runs F again, but for its last matmul."""
    program = lower(layout, TINY)
    assert program.violations() == []
    ticks = 4 + 2 - 1
    scattered = [
        c
        for c in program.collectives
        if c.axes == ("tensor",) and c.kind == "reduce_scatter"
    ]
    assert {c.payload_bytes for c in scattered} == {BATCH // 8 * LENGTH * EMBED * 4}
    outside = ticks + 4  # The embedding in every tick, the head for each microbatch.
    runs = ticks * DEPTH // 2 * (2 + 2 + again) + outside
    assert sum(c.executions for c in scattered) == runs
    _, got = first_step(program, batch())
    assert relative_error(got, one_device(TINY, "tiny")) < 1e-5


@pytest.mark.slow
def test_rings_in_pipelines(monkeypatch):
    transports = transport.Transports(weights=RINGS, gradients=RINGS)
    monkeypatch.setattr(transport, "LARGE_BYTES", 1)
    monkeypatch.setattr(tensor_split, "transports_for", lambda *_: transports)
    program = lower("pipe=2,tensor=4,microbatches=2,remat=full", TINY)
    assert program.violations() == []
    assert any(
        c.axes == ("tensor",) and c.kind == "permute" for c in program.collectives
    )
    _, got = first_step(program, batch())
    assert relative_error(got, one_device(TINY, "tiny")) < 1e-5


@pytest.mark.slow
def test_no_matmul_is_done_twice():
    def flops(layout, **options):
        program = lower(layout, TINY, **options)
        return program.compiled.cost_analysis()["flops"]

    by_hand = flops("fsdp=2,tensor=4")
    assert by_hand <= 1.01 * flops("fsdp=2,tensor=4", lowering="jit")


@pytest.mark.slow
def test_fewer_kv_heads_than_devices():
    """Each device has all of them; queries and mlp go by hand."""
    grouped = model(kv_heads=2)
    layout = "fsdp=2,tensor=4,params.kv_heads=none,activations.kv_heads=none,remat=full"
    program = lower(layout, grouped)
    assert program.violations() == []
    scattered = [c for c in program.collectives if c.kind == "reduce_scatter"]
    by_hand = sum(c.executions for c in scattered if c.axes == ("tensor",))
    assert by_hand >= FORWARD + DEPTH + BACKWARD
    _, got = first_step(program, batch())
    assert relative_error(got, one_device(grouped, "grouped")) < 1e-5


def test_an_extra_gather_shows_beside_those_of_megatron(monkeypatch):
    gathered = tensor_split.MatmulSplit.gathered

    def twice(self, x_BKD, weights):
        ys, x_BLD = gathered(self, x_BKD, weights)
        return [y + 0 * jnp.sum(self.whole(2 * x_BKD)) for y in ys], x_BLD

    monkeypatch.setattr(tensor_split.MatmulSplit, "gathered", twice)
    runs, size = tensor_traffic(lower("fsdp=2,tensor=4,remat=full", TINY))["all_gather"]
    assert size == BATCH // 2 * LENGTH * EMBED * 4
    assert runs > 2 * FORWARD + BACKWARD


@pytest.mark.parametrize(
    "layout, lowering",
    [
        slow("fsdp=2,tensor=4", "jit"),
        slow("fsdp=2,tensor=4,activations.residual_length=none", "shard_map"),
        ("fsdp=2,tensor=4,params.mlp=none,params.heads=none,params.kv_heads=none", ""),
    ],
)
def test_elsewhere_the_compiler_moves_activations(monkeypatch, layout, lowering):
    def by_hand(*_):
        raise AssertionError("by hand")

    monkeypatch.setattr(tensor_split.MatmulSplit, "gathered", by_hand)
    monkeypatch.setattr(tensor_split.MatmulSplit, "scattered", by_hand)
    options = {"lowering": lowering} if lowering else {}
    assert lower(layout, TINY, **options).lowered.as_text()


def test_alone_the_axis_is_by_hand_under_jit_too():
    text = lower("tensor=4", TINY, lowering="jit").lowered.as_text()
    assert "stablehlo.reduce_scatter" in text


def test_outside_a_layout_they_are_matmuls():
    draws = np.random.default_rng(0)
    x, q, o = (draws.normal(size=s) for s in ((2, 3, 8), (8, 4, 2), (4, 2, 8)))
    names = "heads", "head_dim"
    y, z = column_parallel(x, (q, ("embed", *names)), (2 * q, ("embed", *names)))
    want = np.einsum("BLD,DNH->BLNH", x, q)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z, 2 * want, rtol=1e-5, atol=1e-6)
    back = row_parallel(y, o, (*names, "embed"))
    np.testing.assert_allclose(back, np.einsum("BLNH,NHD->BLD", want, o), 1e-5, 1e-5)


def test_operands_may_have_two_dtypes():
    x, w = jnp.ones((2, 3, 8), jnp.bfloat16), jnp.ones((8, 4), jnp.float32)

    def loss(x, w):
        (y,) = column_parallel(x, (w, ("embed", "mlp")))
        assert y.dtype == jnp.float32
        return row_parallel(y, w.T, ("mlp", "embed")).sum()

    dx, dw = jax.grad(loss, argnums=(0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
