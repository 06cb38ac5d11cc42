"""Forms in which a step is given: a jitted function, lowered, compiled, or text."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshpar.checker.facts import Facts
from meshpar.checker.leaves import (
    aliases,
    arguments_in_text,
    arguments_of,
    results_of,
)
from meshpar.contracts.hlo_text import Instruction
from meshpar.errors import MeshparError
from meshpar.jaxprs.walk import equations
from meshpar.mesh.platform import Platform, platform_named, platform_of_text

ONE_DEVICE = "device"
"""The axis of a program that runs on one device."""

MeshLike = Mesh | Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step, compiled.

    Attributes:
      text: of the compiled program.
      program: the compiled program; None where only text is given.
      traced: the trace of the step; None where only a program is given.
    """

    text: str
    program: jax.stages.Compiled | None = None
    traced: jax.stages.Traced | None = None

    @classmethod
    def of(cls, step: Any, arguments: Sequence[Any], keywords: dict) -> "CompiledStep":
        """Compiles a step, where it is not compiled yet.

        Raises:
          MeshparError: it is not jitted, or no program.
        """
        if isinstance(step, str):
            if "ENTRY" not in step:
                raise MeshparError(
                    "this text is no compiled program: give compiled.as_text(), where "
                    "compiled = step.lower(...).compile()"
                )
            return cls(step)
        stage = _stage(step) or traced_step(step, arguments, keywords)
        if stage is None:  # Some jitted functions can be lowered alone.
            stage = _stage(step.lower(*arguments, **keywords))
        traced = stage if isinstance(stage, jax.stages.Traced) else None
        if traced is not None:
            stage = traced.lower()
        program = stage.compile() if isinstance(stage, jax.stages.Lowered) else stage
        return cls(program.as_text(), program, traced)

    def facts(self, mesh: MeshLike | None, arguments: Any) -> Facts:
        """The facts of the step.

        Args:
          mesh: on which it runs; None to find it in the step and its arguments.
          arguments: of the step, whose shardings may name the mesh.

        Raises:
          MeshparError: there is no mesh, or one of another size.
        """
        sizes, platform = self._mesh(mesh, arguments)
        header = self.text.partition("\n")[0]
        if self.program is not None:
            platform = platform or self._platform
        facts = Facts.of(
            self.text,
            sizes,
            platform=platform or platform_of_text(self.text),
            leaves=(),
            written_over=frozenset(aliases(header)),
            jaxpr=None if self.traced is None else self.traced.jaxpr.jaxpr,
        )
        parameters = _parameters(facts)
        if self.program is None:
            leaves = arguments_in_text(parameters, header, sizes)
            return dataclasses.replace(facts, leaves=leaves)
        return dataclasses.replace(
            facts,
            leaves=arguments_of(self.program, parameters, header, sizes),
            results=results_of(self.program, sizes, facts.jaxpr),
            peak_bytes=_peak(self.program, facts.platform),
        )

    @property
    def _platform(self) -> Platform | None:
        """The platform of the program's devices; None if it does not tell."""
        for sharding in jax.tree.leaves(self.program.input_shardings):
            for device in sharding.device_set:
                return platform_named(device.platform)
        return None

    def _mesh(self, mesh: MeshLike | None, arguments: Any) -> tuple[dict, Any]:
        """({axis: size}, the platform or None)."""
        found = mesh if mesh is not None else self._found_mesh(arguments)
        count = _num_devices(self.text)
        if found is None:
            if count == 1:
                return {ONE_DEVICE: 1}, None
            raise MeshparError(
                f"the program runs on {count} devices, and nothing names their axes: "
                "give mesh=, a jax.sharding.Mesh or {axis: size} from outer to inner"
            )
        sizes = dict(found.shape) if isinstance(found, Mesh) else dict(found)
        if math.prod(sizes.values()) != count:
            raise MeshparError(
                f"mesh={sizes} has {math.prod(sizes.values())} devices, and the "
                f"program runs on {count}: give the mesh that it was compiled for"
            )
        if isinstance(found, Mesh):
            return sizes, platform_named(found.devices.flat[0].platform)
        return sizes, None

    def _found_mesh(self, arguments: Any) -> MeshLike | None:
        """The largest mesh that the arguments, the step or its program name."""
        meshes = list(meshes_in(arguments))
        if self.program is not None:
            of_program = self.program.input_shardings, self.program.output_shardings
            meshes += [s.mesh for s in jax.tree.leaves(of_program) if _named(s)]
        if self.traced is not None:
            meshes += meshes_of(self.traced.jaxpr.jaxpr)
        if not (context := jax.sharding.get_mesh()).empty:
            meshes.append(context)
        if not meshes and (name := re.search(r"xla_pmap\((\w+)\)", self.text)):
            return {name.group(1): _num_devices(self.text)}
        return max(meshes, key=lambda m: (m.size, len(m.axis_names)), default=None)


def traced_step(
    step: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> jax.stages.Traced | None:
    """The trace of a step; None if it can be lowered alone.

    Raises:
      MeshparError: the step is not jitted.
    """
    if not hasattr(step, "lower"):
        raise MeshparError(
            f"check needs a compiled step, and {_name(step)} is not jitted: give "
            "jax.jit(step), also around a shard_map, a Lowered or Compiled, or the "
            "text of a compiled program and mesh="
        )
    if not hasattr(step, "trace"):
        return None
    return _stage(step.trace(*arguments, **keywords))


def _stage(step: Any) -> Any:
    """A stage of jax, also inside of one of nnx.jit or equinox; None for others."""
    stages = jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled
    if isinstance(step, stages):
        return step
    names = "traced", "lowered", "compiled"
    inside = (getattr(step, name, None) for name in names)
    return next((x for x in inside if isinstance(x, stages)), None)


def meshes_in(tree: Any) -> Iterator[Mesh]:
    """The meshes on which arrays of a tree are placed."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if _named(sharding):
            yield sharding.mesh


def meshes_of(jaxpr: Any) -> Iterator[Mesh]:
    """The meshes that the equations of a jaxpr name."""
    for eqn in equations(jaxpr):
        for value in jax.tree.leaves(list(eqn.params.values())):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield mesh


def _named(sharding: Any) -> bool:
    named = isinstance(sharding, NamedSharding)
    return named and isinstance(sharding.mesh, Mesh) and not sharding.mesh.empty


def _name(step: Any) -> str:
    return getattr(step, "__name__", None) or type(step).__name__


def _num_devices(text: str) -> int:
    """The number of devices on which a program runs."""
    header = text.partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(map(int, counts))


def _parameters(facts: Facts) -> list[Instruction]:
    """The parameters of the entry computation, in order."""
    entry = facts.module.computations[facts.module.entry]
    found = [x for x in entry.values() if x.opcode == "parameter"]
    return sorted(found, key=lambda x: int(re.search(r"parameter\((\d+)", x.line)[1]))


def _peak(program: jax.stages.Compiled, platform: Platform) -> int | None:
    """Memory of one device at the peak; None if the compiler does not say."""
    if (analysis := program.memory_analysis()) is None:
        return None
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    held += analysis.temp_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.peak_memory_in_bytes if platform.reports_peak else held
