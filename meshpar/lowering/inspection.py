"""Inspection of a lowered program: compiled once, and read back."""

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.contracts.collective import Collective
from meshpar.contracts.compiler_log import captured_log
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.hlo import HloModule, parse_hlo
from meshpar.contracts.hlo_work import Work, work_of
from meshpar.contracts.host_transfers import HostTransfer, host_transfers
from meshpar.contracts.loop_order import order_violations
from meshpar.contracts.step_time import Rates, StepTime, estimate
from meshpar.contracts.written import (
    WrittenCollective,
    written_collectives,
    written_terms,
)
from meshpar.lowering.base import Lowering
from meshpar.mesh.chips import chip_of
from meshpar.mesh.compiler import compiler_options
from meshpar.mesh.platform import platform_of


def read_collectives(compiled: jax.stages.Compiled, mesh: Mesh) -> list[Collective]:
    """The collectives of a program compiled for a mesh."""
    return parse_hlo(compiled.as_text(), dict(mesh.shape))


def read_time(compiled: jax.stages.Compiled, mesh: Mesh) -> StepTime | None:
    """The time of a program compiled for a mesh, by the compiler's own cycles.

    None if the compiler states none, or the chip is unknown.
    """
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    rates = Rates(chip.clock_rate, chip.link_bandwidth, chip.host_bandwidth)
    return estimate(compiled.as_text(), dict(mesh.shape), rates)


class _Compilation(NamedTuple):
    """A compiled program, and what one reading of its text tells.

    Attributes:
      program: the compiled program.
      collectives: the collectives in it.
      order_violations: as `Inspection.order_violations`.
    """

    program: jax.stages.Compiled
    collectives: list[Collective]
    order_violations: list[str]


class Inspection:
    """One program: lowered and compiled when it is first asked for, and its reading."""

    def __init__(
        self,
        trace: Callable[[], jax.stages.Traced],
        mesh: Mesh,
        check: Callable[[list[Collective]], None],
        ordered: bool = False,
    ):
        """Inspects a program.

        Args:
          trace: traces it.
          mesh: the device mesh.
          check: raises MeshparError if the compiled program must not run.
          ordered: as `Lowering.orders_collectives`.
        """
        self._trace, self.mesh, self._check = trace, mesh, check
        self._ordered = ordered

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The one trace of the program that is lowered and compiled."""
        return self._trace()

    @functools.cached_property
    def written(self) -> list[WrittenCollective]:
        """The collectives that the program's own code writes."""
        widens = platform_of(self.mesh).widens_collectives
        return written_collectives(self.traced.jaxpr, dict(self.mesh.shape), widens)

    @functools.cached_property
    def written_terms(self) -> tuple[DeclaredCollective, ...]:
        """The terms that the program writes, for its contract."""
        return written_terms(self.written)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The program as StableHLO."""
        with jax.set_mesh(self.mesh):
            return self.traced.lower()

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program.

        Raises:
          MeshparError: it could deadlock.
        """
        return self._compilation.program

    @functools.cached_property
    def _compilation(self) -> _Compilation:
        program = self.lowered.compile()
        module = HloModule(program.as_text(), dict(self.mesh.shape))
        collectives = module.collectives()
        self._check(collectives)
        ordered = self._ordered and platform_of(self.mesh).mixes_collectives
        lines = order_violations(module) if ordered else []
        return _Compilation(program, collectives, lines)

    @functools.cached_property
    def compiler_log(self) -> list[str]:
        """Lines that the compiler writes; none if the program was compiled before.

        A training run does not capture them, so that the last words of a compiler that
        crashes are not lost.
        """
        with captured_log() as log:
            _ = self.compiled
        return log

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled program."""
        return self._compilation.collectives

    @functools.cached_property
    def host_transfers(self) -> HostTransfer | None:
        """Transfers of the compiled program between device and host memory.

        None on platforms whose programs do not show it.
        """
        if platform_of(self.mesh).shows_host_transfers:
            return host_transfers(self.compiled.as_text())
        return None

    @property
    def order_violations(self) -> list[str]:
        """Collectives that may mix with a loop's collectives, and should wait."""
        return self._compilation.order_violations

    @functools.cached_property
    def time(self) -> StepTime | None:
        """The time of one run, as `read_time` reads it."""
        return read_time(self.compiled, self.mesh)

    @functools.cached_property
    def work(self) -> Work:
        """FLOPs and bytes moved of one run on one device."""
        return work_of(self.compiled.as_text(), self.compiled.cost_analysis())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the lowered program: equal on processes that may run together."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()[:16]

    @property
    def exposed_bytes(self) -> float:
        """Bytes that one device sends with no compute scheduled beside them."""
        return sum(c.wire_bytes for c in self.collectives if not c.overlapped)

    @property
    def peak_bytes(self) -> int:
        """Bytes in one device's memory at the peak of the program, as compiled.

        At most, if the program puts temporary arrays into host memory: the compiler
        counts them too, and does not tell how many there are at the peak.
        """
        analysis = self.compiled.memory_analysis()
        if platform_of(self.mesh).reports_peak:
            # Compilers count host memory in the peak, and arguments are always there.
            host = analysis.host_argument_size_in_bytes
            return analysis.peak_memory_in_bytes - host
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def inspect_step(
    lowering: Lowering,
    step: Callable,
    abstract_state: Any,
    *arguments: Any,
    metrics_spec: PartitionSpec | None = None,
) -> Inspection:
    """Inspects step(state, *arguments) -> (state, metrics), which donates its state.

    Args:
      lowering: of the step.
      step: the step, a function to trace.
      abstract_state: ShapeDtypeStructs with shardings.
      *arguments: abstract arguments after the state.
      metrics_spec: spec of the metrics; on all devices by default.
    """
    mesh, metrics_spec = lowering.mesh, metrics_spec or PartitionSpec()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)

    def trace() -> jax.stages.Traced:
        with jax.set_mesh(mesh):
            return jax.jit(
                step,
                donate_argnums=0,
                out_shardings=(shardings, NamedSharding(mesh, metrics_spec)),
                compiler_options=compiler_options(mesh),
            ).trace(abstract_state, *arguments)

    return Inspection(trace, mesh, lowering.check_compiled, lowering.orders_collectives)


def bytes_per_device(abstract: Any, shardings: Any) -> int:
    """Bytes that one device holds of a tree of ShapeDtypeStructs."""

    def leaf_bytes(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(leaf_bytes, abstract, shardings)))
