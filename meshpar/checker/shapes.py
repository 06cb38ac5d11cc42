"""Shapes of one device, compared with the shapes of weights and gradients."""

import functools
import itertools
import math

from meshpar.checker.facts import Facts, arrays_of


def is_of_state(facts: Facts, hlo_type: str) -> bool:
    """Whether every array of a type has the shape of a part of the state.

    Weights, gradients and moments have, split over any of the axes that split the
    state, in any order of the dims, or of one layer of a stack. Scalars count as well.
    """
    known = _shapes(facts)
    return all(
        tuple(sorted(n for n in shape if n > 1)) in known
        for _, shape in arrays_of(hlo_type)
    )


@functools.lru_cache(maxsize=4)
def _shapes(facts: Facts) -> frozenset[tuple[int, ...]]:
    """The sorted sizes of all arrays that a part of the state may be, without ones."""
    found: set[tuple[int, ...]] = {()}
    for shape, dims in {(leaf.shape, leaf.dims) for leaf in facts.state}:
        sizes = []
        for size, axes in zip(shape, dims or ((),) * len(shape), strict=True):
            ways = [facts.mesh[axis] for axis in axes]
            parts = {
                size // math.prod(chosen)
                for count in range(len(ways) + 1)
                for chosen in itertools.combinations(ways, count)
            }
            sizes.append(sorted(parts))
        for whole in (sizes, sizes[1:]):
            for chosen in itertools.product(*whole):
                found.add(tuple(sorted(n for n in chosen if n > 1)))
    return frozenset(found)
