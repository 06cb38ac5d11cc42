"""Mesh-TensorFlow: any legal layout trains the same model, shown on random layouts."""

import functools

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.explain.random_layouts import draw_layouts
from meshpar.explain.verify import verify

_AXES = ("data", "fsdp", "tensor", "pipe")
_TOLERANCE = 1e-5
_ROWS, _WIDTH, _DEPTH = 16, 16, 8


class Stack(nnx.Module):
    """Residual layers with named dims, small enough to compile quickly."""

    def __init__(self, rngs: nnx.Rngs):
        def layer(rngs: nnx.Rngs) -> nnx.Linear:
            dims = {"out_sharding": ("embed", "mlp")}
            sizes = _WIDTH, _WIDTH
            return nnx.Linear(*sizes, use_bias=False, kernel_metadata=dims, rngs=rngs)

        stacked = nnx.vmap(layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = stacked(rngs.split(_DEPTH))
        head = rngs.params.normal((_WIDTH, 1)) / 4
        self.head = nnx.Param(head, out_sharding=("embed", None))


def small_model() -> meshpar.Model:
    """The stack, whose loss is a squared error."""

    def loss(model: Stack, x_BD: Array, batch: dict[str, Array]) -> Array:
        return jnp.square((x_BD @ model.head[...])[:, 0] - batch["y"]).mean()

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda model, batch: batch["x"],
        layer=lambda layer, x_BD: x_BD + jnp.tanh(layer(x_BD)),
        head_loss=loss,
    )
    return meshpar.from_nnx(Stack, stack)


def small_batches(num: int) -> list[dict[str, np.ndarray]]:
    """Batches of the stack, of random numbers."""
    draws = np.random.default_rng(0)
    xs = draws.normal(size=(num, _ROWS, _WIDTH)).astype(np.float32)
    return [{"x": x, "y": np.sin(x.sum(1))} for x in xs]


def _run(setting: Setting) -> Result:
    wanted, batches = 3 if setting.quick else 24, small_batches(2)
    model = small_model()

    def lower(layout: meshpar.Layout, lowering: str = "") -> meshpar.TrainProgram:
        devices = jax.devices()[: layout.num_devices]
        optimizer = optax.adamw(1e-2, eps=1e-2)
        return meshpar.lower(
            model, optimizer, layout, batches[0], devices=devices, lowering=lowering
        )

    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    refused = 0
    for draw in draw_layouts(50 * wanted, 8, seed=3, axes=_AXES):
        if len(errors) == wanted:
            break
        layout = meshpar.layouts.parse(draw.layout)
        if layout.num_devices < 8 or str(draw) in errors:
            continue
        setting.progress(draw.layout, len(errors) / wanted)
        try:
            program = lower(layout, draw.lowering)
            if program.reason_not_equal:
                continue
            report = verify(program, None, batches, tolerance=_TOLERANCE)
        except MeshparError:
            refused += 1
            continue
        errors[str(draw)] = max(c.error for c in report.comparisons)
        if not report.ok:
            wrong[str(draw)] = report.problem
    largest = max(errors.values())
    claims = (
        Claim(
            f"{len(errors)} random layouts of 8 devices train the same model",
            "any legal layout gives the same result",
            f"largest relative error {largest:.1e}",
            not wrong and len(errors) == wanted,
        ),
    )
    rows = [(layout, f"{error:.1e}") for layout, error in errors.items()]

    return Result(
        ("layout", "largest relative error"),
        tuple(rows),
        claims,
        {"errors": errors, "refused": refused, "wrong": wrong},
        functools.partial(_draw, errors),
    )


def _draw(errors: dict[str, float], figure: matplotlib.figure.Figure) -> None:
    axes = figure.subplots()
    axes.plot(range(1, len(errors) + 1), list(errors.values()), "o")
    axes.axhline(_TOLERANCE, color="black", linestyle=":", label="counts as rounding")
    axes.set(yscale="log", ylim=(1e-8, 1e-4), xlabel="layout, as in the table")
    axes.set_ylabel("largest relative error against a plain loop")
    axes.legend()


PAPER = Paper(
    name="legal_layouts",
    title="Any legal layout trains the same model",
    source="Shazeer et al., Mesh-TensorFlow, NeurIPS 2018, arXiv:1811.02084, section 3",
    shows="relative error of losses, gradients and moments under random layouts of 8 "
    "devices, against a plain loop on one device",
    run=_run,
)
