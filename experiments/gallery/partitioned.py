"""Layers that devices split as DistBelief and AlexNet do: cross-talk where it is asked.

`Convolution` splits the maps (AlexNet on two GPUs): a device convolves its own maps, or
gathers those of all devices first. `LocallyConnected` splits the rows of a picture
(DistBelief): filters differ by position, and a window reads its device's own rows, or
also the nearest rows of its neighbours. Weights and their gradients never move.

`apply` is called inside shard_map; `whole` is the same layer on one device.

Source: Krizhevsky et al., ImageNet Classification, NeurIPS 2012, section 3.5; Dean et
  al., DistBelief, NeurIPS 2012, section 3.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array
from meshpar.contracts.declared import DeclaredCollective

_ITEM = 4
"""Bytes of a number."""

_DIMS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Layer(abc.ABC):
    """One layer; pictures keep their height and width.

    Attributes:
      name: of the layer.
      maps_in: maps of its input, on all devices together.
      maps_out: maps of its output.
      window: height and width of a filter, odd.
      cross: whether devices exchange activations before it.
      side: height and width of a picture.
    """

    name: str
    maps_in: int
    maps_out: int
    window: int
    cross: bool
    side: int

    @abc.abstractmethod
    def weight_shape(self, n: int) -> tuple[int, ...]:
        """Shape of the weight of all n devices together."""

    @abc.abstractmethod
    def weight_spec(self, axis: str) -> PartitionSpec:
        """The spec by which devices split the weight."""

    @abc.abstractmethod
    def apply(self, x_BHWC: Array, w: Array, axis: str) -> Array:
        """The layer on this device's part of x and of the weight."""

    @abc.abstractmethod
    def whole(self, x_BHWC: Array, w: Array, n: int) -> Array:
        """Computes on one device the result that n devices compute together."""

    @abc.abstractmethod
    def flops(self, pictures: int, n: int) -> float:
        """FLOPs of one device in a step: forward pass and both backward passes."""

    @abc.abstractmethod
    def declared(
        self, pictures: int, n: int, axis: str
    ) -> Iterator[DeclaredCollective]:
        """The collectives of a step; none without cross-talk."""


@dataclasses.dataclass(frozen=True)
class Convolution(Layer):
    """A convolution whose maps the devices split.

    Attributes:
      reads_picture: whether its input is the picture, which every device has whole.
    """

    reads_picture: bool = False

    def _maps_read(self, n: int) -> int:
        """Input maps that one filter reads."""
        return self.maps_in if self.cross or self.reads_picture else self.maps_in // n

    def weight_shape(self, n: int) -> tuple[int, ...]:
        return self.window, self.window, self._maps_read(n), self.maps_out

    def weight_spec(self, axis: str) -> PartitionSpec:
        return PartitionSpec(None, None, None, axis)

    def apply(self, x_BHWC: Array, w: Array, axis: str) -> Array:
        if self.cross:
            x_BHWC = lax.all_gather(x_BHWC, axis, axis=3, tiled=True)
        return _convolve(x_BHWC, w, 1)

    def whole(self, x_BHWC: Array, w: Array, n: int) -> Array:
        return _convolve(x_BHWC, w, self.maps_in // self._maps_read(n))

    def flops(self, pictures: int, n: int) -> float:
        outputs = pictures * self.side**2 * self.maps_out / n
        return 6 * outputs * self.window**2 * self._maps_read(n)

    def declared(
        self, pictures: int, n: int, axis: str
    ) -> Iterator[DeclaredCollective]:
        if self.cross:
            payload = pictures * self.side**2 * self.maps_in * _ITEM
            for kind, use in (("all_gather", "maps"), ("reduce_scatter", "gradients")):
                why = f"{use} of {self.name}"
                yield DeclaredCollective(kind, (axis,), n, 1, payload, why)


@dataclasses.dataclass(frozen=True)
class LocallyConnected(Layer):
    """A locally connected layer, whose filters differ by position; devices split rows.

    A window that crosses the border of a device's rows reads zeros there, unless the
    layer has cross-talk.
    """

    @property
    def _halo(self) -> int:
        """Rows of a neighbour that windows reach."""
        return self.window // 2

    def weight_shape(self, n: int) -> tuple[int, ...]:
        reads = self.maps_in * self.window**2
        return self.side, self.side, reads, self.maps_out

    def weight_spec(self, axis: str) -> PartitionSpec:
        return PartitionSpec(axis)

    def apply(self, x_BHWC: Array, w: Array, axis: str) -> Array:
        if not self.cross:
            return _locally_connect(self._padded(x_BHWC), w, self.window)
        n, halo = lax.axis_size(axis), self._halo
        above = [(i, i + 1) for i in range(n - 1)]
        below = [(i + 1, i) for i in range(n - 1)]
        first = lax.ppermute(x_BHWC[:, -halo:], axis, above)
        last = lax.ppermute(x_BHWC[:, :halo], axis, below)
        rows = jnp.concatenate([first, x_BHWC, last], axis=1)
        return _locally_connect(rows, w, self.window)

    def _padded(self, x_BHWC: Array) -> Array:
        return jnp.pad(x_BHWC, ((0, 0), (self._halo, self._halo), (0, 0), (0, 0)))

    def whole(self, x_BHWC: Array, w: Array, n: int) -> Array:
        parts = 1 if self.cross else n
        xs, ws = jnp.split(x_BHWC, parts, axis=1), jnp.split(w, parts)
        made = [
            _locally_connect(self._padded(x), part, self.window)
            for x, part in zip(xs, ws, strict=True)
        ]
        return jnp.concatenate(made, axis=1)

    def flops(self, pictures: int, n: int) -> float:
        reads = self.maps_in * self.window**2
        return 6 * pictures * self.side**2 * reads * self.maps_out / n

    def declared(
        self, pictures: int, n: int, axis: str
    ) -> Iterator[DeclaredCollective]:
        if self.cross:
            rows = pictures * self._halo * self.side * self.maps_in * _ITEM
            why = f"rows of neighbours for {self.name}, and their gradients"
            yield DeclaredCollective("permute", (axis,), n, 4, 4 * rows, why)


def run(
    layers: Sequence[Layer], x: Array, weights: Sequence[Array], axis: str
) -> Array:
    """All layers with ReLU on one device's part; call inside shard_map."""
    for layer, w in zip(layers, weights, strict=True):
        x = jnp.maximum(layer.apply(x, w, axis), 0)
    return x


def run_whole(
    layers: Sequence[Layer], x: Array, weights: Sequence[Array], n: int
) -> Array:
    """Computes on one device the result of `run` on n devices."""
    for layer, w in zip(layers, weights, strict=True):
        x = jnp.maximum(layer.whole(x, w, n), 0)
    return x


def _convolve(x_BHWC: Array, w: Array, groups: int) -> Array:
    return lax.conv_general_dilated(
        x_BHWC, w, (1, 1), "SAME", dimension_numbers=_DIMS, feature_group_count=groups
    )


def _locally_connect(x_BHWC: Array, w_HWPM: Array, window: int) -> Array:
    """Untied filters w[H, W, C * window^2, M] on x[B, H + 2 (window // 2), W, C]."""
    side = ((0, 0), (window // 2, window // 2))
    patches_BHWP = lax.conv_general_dilated_patches(
        x_BHWC, (window, window), (1, 1), side, dimension_numbers=_DIMS
    )
    return jnp.einsum("bhwp,hwpm->bhwm", patches_BHWP, w_HWPM)
