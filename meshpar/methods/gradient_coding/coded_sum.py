"""Gradient coding over a mesh axis: a masked sum decodes the gradient in one program.

Worker i is device i of the axis `data`. It computes the gradients of its parts,
combines them by its row of the code, and multiplies the result by its coefficient. The
sum over the axis is the gradient of all parts. Missing workers have the coefficient 0,
and whatever they computed counts nothing.

Rows of the cyclic code are random, so that float32 loses a digit or two: about 1e-6
of the sum is left as error with s = 1 or 2.

Source: Tandon, Lei, Dimakis, Karampatziakis, Gradient Coding, ICML 2017,
  arXiv:1612.03301, section 2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.layouts.axes import DATA
from meshpar.methods.gradient_coding.codes import Code


@dataclasses.dataclass(frozen=True, eq=False)
class CodedSum:
    """The sum of the gradients of all parts, from the workers that answer.

    Attributes:
      code: of as many workers as the axis `data` has devices.
      mesh: the device mesh.
      gradient: (parameters, one part) -> gradient, a pytree as the parameters.

    Raises:
      MeshparError: another number of workers.
    """

    code: Code
    mesh: Mesh
    gradient: Callable[[Any, Any], Any]

    def __post_init__(self):
        workers, devices = len(self.code.matrix), self.mesh.shape[DATA]
        if workers != devices:
            raise MeshparError(
                f"a code for {workers} workers on {DATA}={devices}: use one worker per "
                "device of that axis"
            )

    def place(self, parts: Any) -> Any:
        """Gives every worker its parts.

        Args:
          parts: pytree of arrays [parts, ...].

        Returns:
          Arrays [workers, parts of a worker, ...] that `data` splits.

        Raises:
          MeshparError: another number of parts.
        """
        workers, num_parts = self.code.matrix.shape
        given = {len(x) for x in jax.tree.leaves(parts)}
        if given != {num_parts}:
            raise MeshparError(
                f"{sorted(given)} parts for a code of {num_parts}: cut the data into "
                f"{num_parts} parts"
            )
        own = np.stack([self.code.parts(worker) for worker in range(workers)])
        sharding = NamedSharding(self.mesh, PartitionSpec(DATA))
        place = lambda x: jax.device_put(np.asarray(x)[own], sharding)  # noqa: E731
        return jax.tree.map(place, parts)

    def coefficients(self, workers: Sequence[int]) -> np.ndarray:
        """[workers] by which the answers are multiplied, 0 for those that are missing.

        Args:
          workers: those that answer.

        Raises:
          StragglersError: they do not determine the sum.
        """
        found = np.zeros(len(self.code.matrix))
        found[list(workers)] = self.code.decode(workers)
        return found

    def sum(self, params: Any, placed: Any, coefficients: Any) -> Any:
        """The sum of the gradients of all parts, on every device; call it under jit.

        Communication: one all_reduce over `data`.

        Args:
          params: pytree of arrays.
          placed: the result of `place`.
          coefficients: the result of `coefficients`.
        """
        dtype = jax.tree.leaves(params)[0].dtype
        own = [row[row != 0] for row in self.code.matrix]
        inputs = jnp.asarray(np.stack(own), dtype), jnp.asarray(coefficients, dtype)
        return jax.shard_map(
            self._answer,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), *[PartitionSpec(DATA)] * 3),
            out_specs=PartitionSpec(),
            axis_names={DATA},
        )(params, placed, *inputs)

    def _answer(self, params: Any, placed: Any, weights: Array, share: Array) -> Any:
        """The sum, from one worker's parts [1, parts, ...], weights and coefficient."""
        params = jax.lax.pcast(params, (DATA,), to="varying")
        parts = jax.tree.map(lambda x: x[0], placed)
        gradients = jax.vmap(self.gradient, (None, 0))(params, parts)

        def masked(x: Array) -> Array:
            answer = share[0] * jnp.tensordot(weights[0], x, 1)
            return jnp.where(share[0] == 0, jnp.zeros_like(answer), answer)

        return jax.lax.psum(jax.tree.map(masked, gradients), DATA)
