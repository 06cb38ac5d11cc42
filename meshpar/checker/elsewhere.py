"""A step for other devices than those it was written for.

The jaxpr of the step is evaluated again with every mesh in it replaced: by the same
axes over the chips of a topology, or by axes of size 1 on one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshpar.checker.steps import meshes_in, meshes_of
from meshpar.compat import bind_on, user_line
from meshpar.errors import MeshparError
from meshpar.jaxprs.walk import Interpreter, equations, opened
from meshpar.mesh.topologies import topology as devices_of_topology
from meshpar.mesh.torus import arrange_devices

Swap = Callable[[Mesh], Mesh]


def on_topology(
    step: Any, traced: jax.stages.Traced, arguments: Any, keywords: Any, text: str
) -> tuple[Any, Any, Any]:
    """A step and its abstract arguments, on the chips of a topology.

    Args:
      step: the jitted step.
      traced: its trace.
      arguments: of the step.
      keywords: of the step.
      text: the topology, such as "v5e:4x4".

    Returns:
      The jitted step, its arguments and its keyword arguments, all abstract.

    Raises:
      MeshparError: the step's mesh has another number of devices.
    """
    chips = devices_of_topology(text)

    def swap(mesh: Mesh) -> Mesh:
        if mesh.size != len(chips):
            raise MeshparError(
                f"topology={text!r} has {len(chips)} chips, and the step's mesh "
                f"{dict(mesh.shape)} has {mesh.size} devices: make the step for "
                f"{len(chips)} (meshpar.simulate({len(chips)}) before jax starts)"
            )
        devices = arrange_devices(tuple(mesh.shape.values()), chips)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    swap = _once_each(swap)
    swapped = _Swapped(swap)
    moved = jax.tree.map(lambda x: _abstract(x, swapped), (arguments, keywords))
    return _again(step, traced, swapped), *moved


def on_mesh(
    step: Any,
    traced: jax.stages.Traced,
    arguments: Any,
    keywords: Any,
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """A step and its arguments on another mesh with the same axes.

    Args:
      step: the jitted step.
      traced: its trace.
      arguments: arrays.
      keywords: keyword arguments of the step.
      mesh: the other mesh; by default the first device of the step's own.

    Raises:
      MeshparError: the step has a shard_map, whose code is for parts of arrays; or an
        axis that the mesh does not have.
    """
    for eqn in equations(traced.jaxpr.jaxpr):
        if eqn.primitive.name in ("shard_map", "xla_pmap"):
            at = f", at {line}," if (line := user_line(eqn)) else ""
            raise MeshparError(
                f"{eqn.primitive.name}{at} computes on parts of arrays, whose number "
                "is written into it: give against= a function of whole arrays that "
                "computes the same step on one device"
            )

    def swap(own: Mesh) -> Mesh:
        if mesh is None:
            devices = own.devices.ravel()[:1].reshape((1,) * own.devices.ndim)
            return Mesh(devices, own.axis_names, axis_types=own.axis_types)
        if own.axis_names != mesh.axis_names:
            raise MeshparError(
                f"against= has the axes {mesh.axis_names}, and the step's mesh "
                f"{own.axis_names}: give a mesh with the same axes"
            )
        return Mesh(mesh.devices, own.axis_names, axis_types=own.axis_types)

    swapped = _Swapped(_once_each(swap))
    found = [*meshes_in((arguments, keywords)), *meshes_of(traced.jaxpr.jaxpr)]
    alone = swap(found[0]).devices.flat[0] if found else jax.devices()[0]

    def place(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        named = isinstance(sharding, NamedSharding)
        target = swapped.value(sharding) if named and mesh is not None else alone
        return jax.device_put(x, target)

    placed, named = jax.tree.map(place, (tuple(arguments), dict(keywords)))
    return functools.partial(_again(step, traced, swapped), **named), placed


def _once_each(swap: Swap) -> Swap:
    """The swap, which gives the same mesh again for the same mesh."""
    known: dict[Mesh, Mesh] = {}

    def remembered(mesh: Mesh) -> Mesh:
        if mesh not in known:
            known[mesh] = swap(mesh)
        return known[mesh]

    return remembered


def _again(step: Any, traced: jax.stages.Traced, swapped: "_Swapped") -> Any:
    """The step, jitted on other devices; it donates what it donated."""

    def run(*arguments: Any, **named: Any) -> Any:
        outer = jax.make_jaxpr(step)(*arguments, **named)
        leaves = jax.tree.leaves((arguments, named))
        results = swapped.evaluate(outer, leaves)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)

    # jax names the arguments by the function's signature, and knows its line.
    if (wrapped := getattr(step, "__wrapped__", None)) is not None:
        run.__wrapped__ = wrapped
    run.__name__ = getattr(step, "__name__", "step")
    donated, _ = traced.args_info
    numbers = [
        number
        for number, argument in enumerate(donated)
        if any(info.donated for info in jax.tree.leaves(argument))
    ]
    return jax.jit(run, donate_argnums=numbers)


def _abstract(x: Any, swapped: "_Swapped") -> jax.ShapeDtypeStruct:
    """The type of an argument, on the other devices."""
    sharding = getattr(x, "sharding", None)
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    named = isinstance(sharding, NamedSharding)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=swapped.value(sharding) if named else None,
        weak_type=bool(getattr(aval, "weak_type", False)),
    )


class _Swapped(Interpreter[Any]):
    """Evaluates a jaxpr with other meshes in place of its own."""

    def __init__(self, swap: Swap):
        self.swap = swap
        self.abstract: dict[AbstractMesh, AbstractMesh] = {}

    def constant(self, value: Any) -> Any:
        """An array without a device, so that it may be on any."""
        return jax.device_get(value) if isinstance(value, jax.Array) else value

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of an equation."""
        params = {name: self.value(x) for name, x in eqn.params.items()}
        return bind_on(eqn.replace(params=params), operands, self.value)

    def value(self, x: Any) -> Any:
        """A parameter of an equation, with the other meshes."""
        if isinstance(x, Mesh):
            return x if x.empty else self._swap(x)
        if isinstance(x, AbstractMesh):
            return self.abstract.get(x, x)
        if isinstance(x, NamedSharding):
            mesh = self.value(x.mesh)
            return NamedSharding(mesh, x.spec, memory_kind=_memory(x))
        if isinstance(x, core.ClosedJaxpr | core.Jaxpr):
            return self._jaxpr(x)
        if type(x) in (tuple, list):
            return type(x)(map(self.value, x))
        return x

    def _jaxpr(self, x: Any) -> Any:
        """A jaxpr inside an equation; some versions of jax know one kind alone."""
        inside, consts = opened(x)
        eqns = [
            eqn.replace(params={k: self.value(v) for k, v in eqn.params.items()})
            for eqn in inside.eqns
        ]
        consts = list(map(self.constant, consts))
        if inside is not x:
            return core.ClosedJaxpr(inside.replace(eqns=eqns), consts)
        return x.replace(eqns=eqns, consts=consts) if consts else x.replace(eqns=eqns)

    def _swap(self, mesh: Mesh) -> Mesh:
        other = self.swap(mesh)
        self.abstract[mesh.abstract_mesh] = other.abstract_mesh
        return other


def _memory(sharding: NamedSharding) -> str | None:
    """The memory of a sharding, where it is not that of the device itself."""
    kind = sharding.memory_kind
    return kind if kind == "pinned_host" else None
