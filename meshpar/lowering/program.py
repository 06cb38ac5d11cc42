"""`Program`: a model under a layout without an optimizer, as functions to call.

Parameters, batches and evaluation are here; `train_program` adds the training step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array, Params, abstract
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.token_order import CONTIGUOUS
from meshpar.lowering.base import Lowering
from meshpar.lowering.batches import BatchPlacer, other_batch
from meshpar.lowering.evaluation import Evaluation
from meshpar.lowering.in_trace import is_traced, not_in_trace
from meshpar.lowering.inspection import read_collectives
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.placed import PlacedArrays
from meshpar.lowering.portable import StoredOrder
from meshpar.lowering.state import Metrics, check_alive
from meshpar.mesh.platform import platform_of
from meshpar.metrics import KINDS, WEIGHT, MetricSums
from meshpar.models.model import Model
from meshpar.models.model_scope import model_scope
from meshpar.replicated import num_rows, unmarked


@dataclasses.dataclass(frozen=True)
class Program:
    """A model under a layout, without an optimizer.

    Attributes:
      lowering: the pure functions of the model under the layout.
      abstract_batch: the global batch as ShapeDtypeStructs with shardings.
      layer_order: how a pipeline stores the layers; None for the model's own order.
    """

    lowering: Lowering
    abstract_batch: Any
    layer_order: StoredOrder | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout}, lowering={self.lowering.name})"

    @property
    def model(self) -> Model:
        """The model."""
        return self.lowering.model

    @property
    def plan(self) -> Plan:
        """Spec, reason and bytes of every leaf."""
        return self.lowering.plan

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.plan.layout

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.lowering.mesh

    @functools.cached_property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """{path: ShapeDtypeStruct} of the parameters, with shardings."""
        return {
            path: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=leaf.sharding(self.mesh),
            )
            for path, leaf in self.lowering.plan.parameters.items()
        }

    @functools.cached_property
    def model_rows(self) -> LayerRows:
        """The module's path of every row of a stack, in the order of the model."""
        rows = LayerRows(self.model.rows)
        if (order := self.layer_order) is None:
            return rows
        places = {stack: np.arange(len(paths)) for stack, paths in rows.rows.items()}
        places = {p: np.asarray(x) for p, x in order.in_model_order(places).items()}
        return LayerRows(
            {p: tuple(paths[i] for i in places[p]) for p, paths in rows.rows.items()}
        )

    def init_params(self, seed: int = 0) -> Params:
        """Fresh parameters: the same numbers whatever the layout."""
        with self._on_mesh(()):
            return self._init_params(np.uint32(seed))

    def evaluate_params(
        self, params: Params, batch: Any, rows: int | None = None
    ) -> Metrics:
        """Loss and aux of the model in evaluation mode.

        Args:
          params: {path: array}, sharded as `abstract_params` says.
          batch: device arrays from `place_batch`, or this process's rows of a batch
            (`rows_of`), which may have another number of rows than those of training:
            every number is compiled once.
          rows: number of rows of the batch; needed for another one than that of
            training if a process does not hold all rows.

        Returns:
          Metrics of exactly these rows. The weight of the loss is "weight": the number
          of rows, unless the loss gives one.

        Raises:
          MeshparError: the number of rows is needed, or the batch is another one than
            that of the program.
        """
        check_alive(params)
        return self._evaluated(params, batch, rows)

    def _evaluated(self, of: Any, batch: Any, rows: int | None) -> Metrics:
        """Metrics of parameters, or of a state, on a batch of any number of rows."""
        batch = self._placed_rows(batch, rows)
        rows = num_rows(batch)
        if rows not in self._evaluations:
            self._evaluations[rows] = self._evaluation(rows)
        return self._evaluations[rows](of, batch)

    def predictor(self, fn: Callable[[Any, Any], Any]) -> Callable[[Params, Any], Any]:
        """Makes predict(params, batch): what fn(model, batch) returns, on the mesh.

        Args:
          fn: (model, batch) -> any pytree of arrays. The model is the NNX module, or
            Linen's `apply`, in evaluation mode.

        Returns:
          A function of parameters, such as `state.params`, and of a batch: this
          process's rows of any pytree of arrays [batch, ...], which need not be the
          batch of training; `data` times `fsdp` divides its rows. It compiles once for
          all batches of the same shapes.
        """

        def run(params: Params, batch: Any) -> Any:
            model = self.model.bind(self.lowering.weights(params))
            return fn(model, unmarked(batch))

        jitted = jax.jit(self._traced(run))

        def predict(params: Params, batch: Any) -> Any:
            if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(batch)):
                # Every process holds the same part of all batches.
                parts = self._num_rows // len(self.batch_rows)
                batch = other_batch(batch, parts, self.layout, self.mesh).place(batch)
            elif self._changes_order and self._placed_arrays.holds(batch):
                raise LayoutError(
                    f"predict needs tokens in their own order, and place_batch changed "
                    f"it (context_order={self.batches.order}): give host arrays"
                )
            check_alive(params)
            with self._on_mesh((params, batch)):
                return jitted(params, batch)

        return predict

    def metric_sums(self) -> MetricSums:
        """Adds up the metrics of steps or evaluations by their kinds."""
        return MetricSums(self._metric_kinds)

    @functools.cached_property
    def _metric_kinds(self) -> dict[str, type]:
        """{name: kind} of the metrics that are not weighted as the loss is."""
        return self._kinds_of(self.model.evaluation_loss)

    def _kinds_of(self, loss: Callable, *more: Any) -> dict[str, type]:
        """The kinds that loss(params, batch, *more) returns."""
        arguments = abstract(self.model.params), self.abstract_batch, *more
        with jax.set_mesh(self.mesh), model_scope(self.layout, self.mesh):
            result = jax.eval_shape(lambda *a: loss(*a), *arguments)
        metrics = result.metrics.items()
        return {name: type(x) for name, x in metrics if isinstance(x, KINDS)}

    @functools.cached_property
    def batches(self) -> BatchPlacer:
        """Places batches on the devices."""
        lowering = self.lowering
        return BatchPlacer(
            self.abstract_batch, lowering.token_order, self.layout.context
        )

    @functools.cached_property
    def _placed_arrays(self) -> PlacedArrays:
        return PlacedArrays()

    @property
    def batch_rows(self) -> np.ndarray:
        """Rows of the global batch that this process's devices hold, ascending."""
        return self.batches.rows

    def rows_of(self, rows: int) -> np.ndarray:
        """Rows of a batch with `rows` of them that this process's devices hold."""
        return self._placer(rows).rows

    def _placer(self, rows: int) -> BatchPlacer:
        if rows == self._num_rows:
            return self.batches
        if rows < 1:
            raise MeshparError(f"a batch of {rows} rows: give at least one")
        return self.batches.with_rows(rows)

    @property
    def _num_rows(self) -> int:
        return num_rows(self.abstract_batch)

    def place_batch(self, batch: Any) -> Any:
        """Puts this process's rows of a batch onto its devices.

        Args:
          batch: pytree of host arrays [len(batch_rows), ...]; in a single process
            those are all rows. Tokens are in their own order.

        Returns:
          The global batch as arrays, sharded as the layout says. `context` may change
          the order of tokens (`Layout.token_order`).
        """
        return self._placed_arrays.add(self.batches.place(batch))

    def _placed(self, batch: Any) -> Any:
        """The batch on the devices.

        Raises:
          LayoutError: arrays that others have placed, while the layout needs tokens in
            another order than theirs.
        """
        if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(batch)):
            return self.place_batch(batch)
        if self._changes_order and not self._placed_arrays.holds(batch):
            raise LayoutError(
                f"context_order={self.batches.order} needs tokens in another order, "
                "and the batch lies on devices already: give host arrays or those of "
                f"place_batch, or use context_order={CONTIGUOUS}"
            )
        return batch

    def _placed_rows(self, batch: Any, rows: int | None) -> Any:
        """`_placed`, of a batch of any number of rows.

        Raises:
          MeshparError: the number of rows is not known.
        """
        if all(isinstance(x, jax.Array) for x in jax.tree.leaves(batch)):
            return self._placed(batch)
        batch = self.batches.as_arrays(batch)
        given, here, whole = num_rows(batch), len(self.batches.rows), self._num_rows
        if rows is None and given != here and here != whole:
            raise MeshparError(
                f"{given} rows on this process, which holds {here} of the {whole} of a "
                "batch: give evaluate rows=N, the number of rows over all processes, "
                "and the rows program.rows_of(N) of this process"
            )
        rows = rows or (whole if given == here else given)
        return self._placed_arrays.add(self._placer(rows).place(batch))

    @property
    def _changes_order(self) -> bool:
        return self.batches.order != CONTIGUOUS

    @functools.cached_property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _init_options(self) -> dict[str, Any] | None:
        """Compiler options of a program that runs once."""
        if not platform_of(self.mesh).compiles_slowly:
            return None
        return {"xla_backend_optimization_level": 0}

    @functools.cached_property
    def _init_params(self) -> Callable[[Any], Params]:
        def init(seed: Array) -> Params:
            return self.model.init(jax.random.key(seed))

        shardings = {p: leaf.sharding for p, leaf in self.abstract_params.items()}
        return jax.jit(
            init, out_shardings=shardings, compiler_options=self._init_options
        )

    @functools.cached_property
    def _evaluations(self) -> dict[int, Callable[[Any, Any], Metrics]]:
        """{number of rows: the compiled evaluation of such batches}."""
        return {}

    def _evaluation(self, rows: int) -> Callable[[Any, Any], Metrics]:
        totals = Evaluation.of(self.lowering, rows, self._num_rows)

        def evaluate(params: Params, batch: Any) -> Metrics:
            return {WEIGHT: jnp.float32(rows)} | totals(params, batch).reported()

        return self._jit(evaluate, self._whole)

    def _jit(self, fn: Callable, out_shardings: Any) -> Callable:
        """fn(x, batch) jitted on the mesh; checked first where it might deadlock."""
        jitted = jax.jit(self._traced(fn), out_shardings=out_shardings)
        checked: list[Callable] = [] if self.lowering.may_deadlock else [jitted]

        def call(x: Any, batch: Any) -> Any:
            with self._on_mesh((x, batch)):
                if not checked:
                    compiled = jitted.lower(x, batch).compile()
                    collectives = read_collectives(compiled, self.mesh)
                    self.lowering.check_compiled(collectives)
                    checked.append(compiled)
                return checked[0](x, batch)

        return call

    def _on_mesh(self, arguments: Any) -> contextlib.AbstractContextManager:
        """The context of a jitted function of the program, also in a user's trace."""
        if not is_traced(arguments):
            return jax.set_mesh(self.mesh)
        self._check_in_trace()
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _check_in_trace(self) -> None:
        """Refuses programs that cannot be a part of a program of the user's.

        Raises:
          MeshparError: the program is one of these.
        """
        layout, why = self.layout, ""
        if self.lowering.may_deadlock:
            why = (
                f"schedule={layout.schedule} has conditionals that differ between "
                "stages, and its compiled programs are checked before they run"
            )
        elif layout.offloaded:
            why = f"offload={layout.offload} holds a part of the state in host memory"
        if why:
            raise MeshparError(not_in_trace(why))

    def _traced(self, fn: Callable) -> Callable:
        def traced(x: Any, batch: Any) -> Any:
            with model_scope(self.layout, self.mesh):
                return fn(x, batch)

        return traced
