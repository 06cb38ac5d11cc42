"""`plan`: the layouts of a model on a machine, ranked by predicted time.

Every layout of the space is predicted: of a model with layers by formulas, and nothing
is compiled; of another model by its compiled program. Those that need more memory than
a device has are set aside, with what they lack. The best ones are lowered, which holds
them to all that a layout, a model and a batch refuse.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import optax

from meshpar.compose import lower
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.layout import Layout
from meshpar.layouts.wanted import Wanted
from meshpar.mesh.chips import GPU
from meshpar.mesh.machine import Machine, machine_of
from meshpar.mesh.topologies import (
    devices_of,
    has_compiler,
    parse_topology,
    stand_ins,
)
from meshpar.models.model import Model
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.compiled import compiled_candidates
from meshpar.planner.facts import Facts
from meshpar.planner.layer_policies import mixed_layout
from meshpar.planner.space import beside_layers, layouts, offloaded
from meshpar.units import readable_bytes, readable_seconds

_SECONDS_TO_COMPILE = 2.6
"""Seconds that compiling takes longer for each layer outside of a loop, as measured on
the host of an H100 (docs/performance.md)."""

_LOWERED = 50
"""Most candidates that are lowered in search of those that a model takes."""


FROM_LAYERS = "all layouts predicted, from one traced layer"
FROM_PROGRAMS = "layouts compiled, and their programs read"
"""Methods of prediction: of models with layers, and of others."""


@dataclasses.dataclass(frozen=True, repr=False)
class Plans:
    """The layouts of one model on one machine, ranked.

    Attributes:
      machine: the machine.
      best: those that fit and that the model takes, fastest first.
      others: those that fit, but for `best`, fastest first.
      too_large: those that need more memory than there is, smallest first.
      refused: {reason, without its numbers: number of layouts that were refused}.
      method: how memory and time were predicted.
    """

    machine: Machine
    best: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: dict[str, int]
    method: str

    def __repr__(self) -> str:
        """The best layouts with their time and memory, a line each."""
        machine, large = self.machine, len(self.too_large)
        title = (
            f"{len(self.fitting)} layouts fit {len(machine.devices)} "
            f"{machine.chip.name} devices, {large} are too large; the fastest:"
        )
        return "\n".join([title, *map(_line, self.best)])

    @property
    def layout(self) -> Layout:
        """The best layout."""
        return self.best[0].layout

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The candidates that fit into memory, fastest first."""
        every = (*self.best, *self.others)
        return tuple(sorted(every, key=lambda c: c.seconds.total))

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """The Pareto front of time and memory, fastest first."""
        front: list[Candidate] = []
        for candidate in (*self.fitting, *self.too_large):
            if not any(_beats(other, candidate) for other in front):
                front = [c for c in front if not _beats(candidate, c)] + [candidate]
        return tuple(sorted(front, key=lambda c: c.seconds.total))

    def why_not(self, candidate: Candidate) -> str:
        """Says why a candidate is worse than the best one."""
        if (lack := candidate.memory.total - self.machine.memory_bytes) > 0:
            return f"memory: {lack / 1e9:.1f} GB too much"
        ours, best = candidate.seconds, self.best[0].seconds
        if ours.total <= best.total:
            return self.warning(candidate)
        lost = {t: s - best.by_term[t] for t, s in ours.by_term.items()}
        term = max(lost, key=lost.get)
        percent = 100 * (ours.total / best.total - 1)
        share = 100 * ours.by_term[term] / ours.total
        slower = f"{percent:.0f}% slower: {term} takes {share:.0f}% of the step"
        return "; ".join(filter(None, (slower, self.warning(candidate))))

    def warning(self, candidate: Candidate) -> str:
        """Memory that a layout may lack, and a slow compilation; "" for neither."""
        notes = []
        most, budget = candidate.most_memory, self.machine.memory_bytes
        if candidate.memory.total <= budget < most:
            sizes = f"{most / 1e9:.1f} of {budget / 1e9:.1f} GB"
            notes.append(f"may need up to {sizes}: compile it")
        if (layers := candidate.layout.scan_unroll) > 1:
            longer = _SECONDS_TO_COMPILE * layers
            notes.append(f"without a loop, compiling takes about {longer:.0f} s longer")
        return "; ".join(notes)


def _line(candidate: Candidate) -> str:
    """Time, memory and layout of a candidate."""
    seconds = readable_seconds(candidate.seconds.total)
    size = readable_bytes(candidate.memory.total)
    return f"{seconds:>12} {size:>11}  {candidate.layout}"


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate is at least as good in time and memory."""
    return (
        one.seconds.total <= other.seconds.total
        and one.memory.total <= other.memory.total
    )


def plan(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    batch: Any,
    topology: str | Sequence[jax.Device] | None = None,
    *,
    compute_dtype: Any = None,
    memory: int | None = None,
    require: str = "",
    forbid: str = "",
    top: int = 5,
    slowdown: float = 1.0,
) -> Plans:
    """Ranks the layouts of a model on a machine that need not be present.

    Args:
      model: from `from_nnx` or `from_linen`. Layouts of a model with layers are all
        predicted; the few of another model are compiled (`planner.compiled`), which
        takes as long as so many compilations.
      optimizer: as in `meshpar.lower`.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], the global shapes.
      topology: a machine such as "v5p:4x4x2", as in `mesh.topology`, or devices; those
        of this machine by default.
      compute_dtype: as in `meshpar.lower`.
      memory: bytes that a step may take on one device; by default nearly all that the
        chip has.
      require: items that layouts must have, such as "zero=3,remat=full".
      forbid: names of axes and options that they must not use, such as "tensor,pipe".
      top: number of layouts that are listed as the best.
      slowdown: what steps took on such a machine over what was predicted; all times
        become so many times as long, and their order stays.

    Returns:
      The plans, the best one first.

    Raises:
      LayoutError: no layout fits the model, the batch, the memory and what is wanted;
        with what comes nearest.
      MeshparError: the topology does not exist, or there is no compiler for it.
    """
    wanted = Wanted.of(require, forbid)
    batch = abstract_batch(batch)
    if model.layered is None:
        machine, method = _compiling_machine(topology, memory, slowdown)
        found = compiled_candidates(
            model, optimizer, batch, compute_dtype, machine, wanted
        )
        method = f"{len(found.candidates)} {method}"
        refused = kinds_of(found.errors)
        return ranked(
            machine, found.candidates, refused, method, top, nearest=found.nearest
        )
    devices = devices_of(topology)
    machine = machine_of(devices, memory, slowdown)
    facts = Facts(model, optimizer, batch, compute_dtype, devices)
    with _without_collections():
        candidates, refused = predicted(facts, machine, wanted)
    options = dict(devices=devices, compute_dtype=compute_dtype)
    lowered = functools.partial(lower, model, optimizer, batch=batch, **options)
    return ranked(machine, candidates, refused, FROM_LAYERS, top, lowered)


def abstract_batch(batch: Any) -> Any:
    """Shapes and dtypes of a batch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _compiling_machine(
    topology: str | Sequence[jax.Device] | None, memory: int | None, slowdown: float
) -> tuple[Machine, str]:
    """The machine to compile for, and a text that says how predictions are made.

    Simulated CPU devices stand in for chips whose compiler is not installed. Times
    follow the chips' rates all the same.
    """
    try:
        devices = devices_of(topology)
    except MeshparError:
        chip = parse_topology(topology)[0]
        if has_compiler(chip):
            raise
        method = (
            f"{FROM_PROGRAMS}; without a compiler for {chip.name} they are programs "
            f"for CPUs, which give memory and traffic; times follow {chip.name}'s rates"
        )
        return machine_of(stand_ins(topology), memory, slowdown, chip), method
    return machine_of(devices, memory, slowdown), FROM_PROGRAMS


def ranked(
    machine: Machine,
    candidates: Sequence[Candidate],
    refused: collections.Counter[str],
    method: str,
    top: int,
    lowered: Callable[[Layout], Any] | None = None,
    nearest: str = "",
) -> Plans:
    """Ranks candidates: those that fit, fastest first, and those that do not.

    Args:
      machine: to plan for.
      candidates: of all layouts.
      refused: {reason: number of layouts that were refused}.
      method: how memory and time were predicted.
      top: number of layouts to lower.
      lowered: lowers a layout, to hold it to the model; None if all are lowered.
      nearest: what comes nearest if there are no candidates.

    Raises:
      LayoutError: no layout is left.
    """
    fitting = [c for c in candidates if c.memory.total <= machine.memory_bytes]
    too_large = [c for c in candidates if c.memory.total > machine.memory_bytes]
    fitting.sort(key=lambda c: (c.seconds.total, c.memory.total))
    too_large.sort(key=lambda c: c.memory.total)
    best: list[Candidate] = []
    tried = 0
    for candidate in fitting:
        if len(best) == top or tried == _LOWERED:
            break
        tried += 1
        try:
            if lowered is not None:
                lowered(candidate.layout)
        except LayoutError as error:
            refused[_kind(error)] += 1
        else:
            best.append(candidate)
    if not best:
        raise LayoutError(_nothing(machine, too_large, refused, nearest))
    others = tuple(fitting[tried:])
    large = tuple(too_large)
    return Plans(machine, tuple(best), others, large, dict(refused), method)


def kinds_of(errors: Iterable[LayoutError]) -> collections.Counter[str]:
    """Counts errors by reason: {reason, without its numbers: number of errors}."""
    return collections.Counter(map(_kind, errors))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Turns the garbage collector off: a search keeps all of its objects to the end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def predicted(
    facts: Facts, machine: Machine, wanted: Wanted
) -> tuple[list[Candidate], collections.Counter[str]]:
    """Predicts every layout of the space.

    Args:
      facts: of the model.
      machine: to plan for.
      wanted: what layouts must have, and must not use.

    Returns:
      All candidates, and {reason, without its numbers: number of layouts refused}.
    """
    made, found = Candidates(facts, machine), []
    refused: collections.Counter[str] = collections.Counter()
    count = len(machine.devices)

    def predict(layout: Layout) -> Candidate | None:
        """Predicts a layout; None, and a count in `refused`, if it is refused."""
        try:
            found.append(made.candidate(layout))
        except LayoutError as error:
            refused[_kind(error)] += 1
            return None
        return found[-1]

    model, rows, length = facts.model, facts.rows, facts.length
    # Measured on one GPU alone, where it saves copies; compiling takes longer.
    unrolls = count == 1 and machine.chip.platform == GPU
    space = layouts(count, model, rows, length, wanted, lambda: facts.used, unrolls)
    for _, group in itertools.groupby(space, beside_layers):
        uniform = [c for c in map(predict, group) if c is not None]
        large = [c.layout for c in uniform if c.memory.total > machine.memory_bytes]
        for less in offloaded(large, wanted):
            predict(less)
        mix = mixed_layout(uniform, facts.layered.depth, machine.memory_bytes)
        if mix is not None and wanted.keeps(mix):
            predict(mix)
    return found, refused


def _kind(error: LayoutError) -> str:
    """The reason of an error: a line of its text, without layout and numbers."""
    lines = [line.strip() for line in str(error).splitlines()]
    line = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]
    line = re.sub('layout "[^"]*"', "a layout", line)
    return re.sub(r"(?<!\w)\d+", "N", line.split(";")[0])[:160]


def _nothing(
    machine: Machine,
    too_large: list[Candidate],
    refused: collections.Counter[str],
    otherwise: str,
) -> str:
    """The message of an error: no layout fits, and which comes nearest."""
    count = len(machine.devices)
    lines = [f"plan: no layout of {count} {machine.chip.name} devices fits"]
    if too_large:
        nearest = too_large[0]
        lines.append(
            f"the smallest, {nearest.layout}, needs {nearest.memory.total / 1e9:.1f} "
            f"GB of {machine.memory_bytes / 1e9:.1f} GB a device; use more devices or "
            "a smaller batch"
        )
    elif otherwise:
        lines.append(otherwise)
    for reason, number in itertools.islice(refused.most_common(), 3):
        lines.append(f"{number} layouts refused: {reason}")
    return "\n  ".join(lines)
