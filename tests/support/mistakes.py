"""Mistakes planted in programs that are otherwise equal to their judge."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support import tiny_stack

import meshpar
from meshpar import layouts
from meshpar.explain.verify import VerifyReport, judged, record, verify
from meshpar.ops import vocabulary
from meshpar.ops.context.positions import positions
from meshpar.ops.experts import Experts, MixtureConfig, mixture

CLIP = 0.1
VOCAB, LENGTH, WIDTH, DEPTH, NUM_EXPERTS = 8, 4, 8, 2, 4
ADAM = optax.adamw(1e-2, eps=1e-2)
Place = tuple[Any, str, Callable[[Any], Any]]
"""(owner, name of a function of it, the function -> its replacement)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model and an optimizer, and how their program is judged.

    Attributes:
      lower: (layout) -> the program.
      batches: one per step.
      second: layout of the program on one device that is the judge of a model that
        draws noise; "" for the plain loop.
    """

    lower: Callable[[str], meshpar.TrainProgram]
    batches: tuple[Any, ...]
    second: str = ""

    @functools.cached_property
    def expected(self) -> list:
        """The numbers of the judge; no mistake may be planted yet."""
        one = self.lower(self.second or "data=1")
        return list((record if self.second else judged)(one, self.batches))


def stack(
    make_optimizer: Callable[[], Any] = lambda: ADAM, clip: float | None = CLIP
) -> Case:
    """Four matrices and a head, whose loss has a weight for each row; two steps."""

    def lower(layout: str) -> meshpar.TrainProgram:
        return tiny_stack.lower(layout, optimizer=make_optimizer(), clip_norm=clip)

    return Case(lower, (tiny_stack.batch(0), tiny_stack.batch(1)))


class Layer(nnx.Module):
    """A norm, and a matrix or a mixture of experts."""

    def __init__(self, dropout: float, experts: int, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.experts = experts

        def matrix(*dims: tuple[str | None, int]) -> nnx.Param:
            names, sizes = zip(*dims, strict=True)
            return nnx.Param(rngs.params.normal(sizes) / 3, out_sharding=names)

        rows, columns = ("embed", WIDTH), ("mlp", WIDTH)
        if experts:
            self.router = matrix(rows, (None, experts))
            self.up = matrix(("expert", experts), rows, columns)
            self.down = matrix(("expert", experts), columns, rows)
        else:
            self.kernel = matrix(rows, columns)

    def __call__(self, x: Any) -> Any:
        x_BLD, earlier = x
        scale_D = self.scale[...][None, None]
        mean = jnp.mean(jnp.square(x_BLD), -1, keepdims=True)
        y_BLD = x_BLD * jax.lax.rsqrt(mean + 1e-5) * scale_D
        if not self.experts:
            y_BLD = jnp.tanh(y_BLD @ self.kernel[...])
            return x_BLD + self.dropout(y_BLD), earlier
        config = MixtureConfig(self.experts, 2, capacity_factor=4.0, normalize=False)
        experts = Experts(self.up[...], self.down[...])
        mixed = mixture(y_BLD, self.router[...], experts, config)
        return x_BLD + mixed.y, earlier + mixed.statistics.balance


class Words(nnx.Module):
    """A tied embedding, positions and two layers."""

    def __init__(self, dropout: float, experts: int, rngs: nnx.Rngs):
        def table(name: str, size: int) -> nnx.Param:
            x = rngs.params.normal((size, WIDTH))
            return nnx.Param(x, out_sharding=(name, "embed"))

        self.embedding, self.places = table("vocab", VOCAB), table("length", LENGTH)

        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(dropout, experts, rngs)

        self.layers = stacked(rngs)

    def embed(self, ids_BL: Any) -> Any:
        """The input of the first layer, and the auxiliary loss so far."""
        w_VD = layouts.constrain(self.embedding[...], "vocab", "embed")
        places_LD = self.places[...][positions(ids_BL.shape[1])]
        x_BLD = vocabulary.lookup(w_VD, ids_BL) + places_LD[None]
        return layouts.constrain(x_BLD, "batch", "length", "embed"), jnp.zeros(())

    def loss(self, x: Any, batch: Any) -> Any:
        """The mean over the tokens, and the auxiliary loss."""
        x_BLD, balance = x
        head = self.embedding[...].T
        losses_BL = vocabulary.head_losses(x_BLD, head, batch["targets"])
        return losses_BL.mean() + 0.1 * balance


def words_batch() -> dict[str, np.ndarray]:
    """Eight sequences and the tokens that follow theirs."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH + 1), np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def words(dropout: float = 0.0, experts: int = 0, second: str = "") -> Case:
    """A language model of two layers; one step."""
    layers = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: net.embed(batch["tokens"]),
        layer=lambda layer, x: layer(x),
        head_loss=lambda net, x, batch: net.loss(x, batch),
    )

    def lower(layout: str) -> meshpar.TrainProgram:
        model = meshpar.from_nnx(lambda rngs: Words(dropout, experts, rngs), layers)
        return on_devices(model, layout, words_batch())

    return Case(lower, (words_batch(),), second)


class ListedLayer(nnx.Module):
    """A layer with a matrix and two vectors."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(self.dense(self.norm(x)))


class Listed(nnx.Module):
    """Layers in a list, of which programs make a stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([ListedLayer(rngs) for _ in range(DEPTH)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def listed(optimizer: Any) -> Case:
    """Layers in a list; two steps."""

    def loss(net: Listed, batch: Any) -> Any:
        return jnp.square(net(batch["x"]).mean(-1) - batch["y"]).mean()

    def lower(layout: str) -> meshpar.TrainProgram:
        model = meshpar.from_nnx(Listed, loss, layers="layers")
        return on_devices(model, layout, tiny_stack.batch(), optimizer)

    return Case(lower, (tiny_stack.batch(0), tiny_stack.batch(1)))


class LinenLayer(nn.Module):
    """A layer that subtracts the mean of the batch."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(WIDTH)(x)
        return x + jnp.tanh(y - y.mean(axis=0, keepdims=True))


def on_devices(
    model: Any, layout: str, batch: Any, optimizer: Any = ADAM, **options: Any
) -> meshpar.TrainProgram:
    """Lowers a model onto as many devices as the layout fills."""
    devices = jax.devices()[: layouts.parse(layout).num_devices]
    options = {"devices": devices, "clip_norm": CLIP} | options
    return meshpar.lower(model, optimizer, layout, batch, **options)


@functools.cache
def check_clean(case: Case, layout: str) -> None:
    """Checks that a program without the mistake is equal to its judge."""
    report = verify(case.lower(layout), case.expected, case.batches)
    assert report.ok, report


def planted(case: Case, layout: str, *places: Place) -> VerifyReport:
    """The report on a program with a mistake; without it, the program is clean.

    Args:
      case: the model and its optimizer.
      layout: of the program.
      *places: where the mistake is planted.
    """
    check_clean(case, layout)
    with mistakes_at(*places):
        report = verify(case.lower(layout), case.expected, case.batches)
    assert not report.ok
    return report


@contextlib.contextmanager
def mistakes_at(*places: Place) -> Any:
    """Replaces functions, and forgets the traces of what calls them."""
    jax.clear_caches()
    with contextlib.ExitStack() as patches:
        for owner, name, wrong in places:
            new = wrong(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, new))
        yield
    jax.clear_caches()


UNCHECKED: Place = (
    jax,
    "shard_map",
    lambda mapped: functools.partial(mapped, check_vma=False),
)
"""jax does not check what differs between devices."""


def kinds(report: VerifyReport) -> set[str]:
    """The kinds of tensors that differ."""
    return {c.kind for c in report.comparisons if not c.ok}


def kinds_at(report: VerifyReport, step: int) -> set[str]:
    """The kinds of tensors that differ in one step."""
    return {c.kind for c in report.comparisons if not c.ok and c.step == step}


def tensors(report: VerifyReport, kind: str) -> set[str]:
    """The tensors of a kind that differ."""
    return {c.tensor for c in report.comparisons if not c.ok and c.kind == kind}
