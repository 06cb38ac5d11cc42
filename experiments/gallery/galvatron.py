"""Galvatron: the fastest layout under a memory budget, of all layouts and of some."""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments import recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.language_model import language_model
from meshpar.errors import LayoutError
from meshpar.explain.report import explain
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.mesh.chips import CHIPS
from meshpar.planner import layer_policies
from meshpar.planner.candidate import Candidate
from meshpar.planner.layer_policies import LayerCost, LayerPolicy
from meshpar.planner.plans import Plans

_MACHINE, _CHIPS, _ROWS, _LENGTH = "2*v5e:2x2", 8, 32, 1024
_BUDGETS_GB, _QUICK_BUDGETS_GB, _GB = (3, 4, 6, 8, 10, 12, 15), (4, 10), 1e9
_FULL = "all axes"
_AXES = "data", "fsdp", "tensor", "pipe", "context", "expert"
SPACES = {
    "data": ("data",),
    "fsdp": ("fsdp",),
    "tensor": ("tensor",),
    "pipe": ("pipe",),
    "data, tensor, pipe": ("data", "tensor", "pipe"),
    _FULL: _AXES,
}
"""{name: axes}; options such as rematerialization are free in all of them."""
_QUICK_SPACES = "data, tensor, pipe", _FULL


def planned(axes: Sequence[str], budget: float | None = None) -> Plans | None:
    """The plans of llama-1b on 8 chips in two slices; None if nothing fits.

    Args:
      axes: that layouts may use.
      budget: GB that a step may take on a chip; by default nearly all that it has.
    """
    try:
        return meshpar.plan(
            _model(),
            optax.adam(1e-4),
            {name: _tokens() for name in ("tokens", "targets")},
            _MACHINE,
            compute_dtype=jnp.bfloat16,
            memory=None if budget is None else int(budget * _GB),
            forbid=",".join(axis for axis in _AXES if axis not in axes),
            top=1,
        )
    except LayoutError:
        return None


@functools.cache
def _model() -> meshpar.Model:
    return language_model(recipes.get("llama-1b").model)


def _tokens() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)


def best_of_all(plans: Plans, budget: float) -> float:
    """Most sequences per second among all candidates of at most so many GB; or 0."""
    seconds = [
        c.seconds.total
        for c in (*plans.fitting, *plans.too_large)
        if c.memory.total <= int(budget * _GB)
    ]
    return _ROWS / min(seconds) if seconds else 0.0


def brute_force_misses(cases: int = 40, depth: int = 5) -> tuple[int, int]:
    """(cases in which the dynamic program is not the best of all, cases).

    Random costs of three policies of rematerialization and two uses of `tensor` per
    layer, as whole numbers; all choices of all layers are tried one by one.
    """
    draws, missed = np.random.default_rng(0), 0
    kinds = [LayerPolicy(r, u) for r in ("none", "full") for u in (FEATURES, ROWS)]
    for _ in range(cases):
        layers = [
            {k: LayerCost(*map(float, draws.integers(1, 20, 2))) for k in kinds}
            for _ in range(depth)
        ]
        budget, change = (float(draws.integers(1, most)) for most in (20 * depth, 12))
        best = math.inf
        for chosen in itertools.product(kinds, repeat=depth):
            costs = [layer[k] for layer, k in zip(layers, chosen, strict=True)]
            uses = [FEATURES, *(k.use for k in chosen), FEATURES]
            seconds = sum(c.seconds for c in costs)
            seconds += change * sum(a != b for a, b in itertools.pairwise(uses))
            if sum(c.saved for c in costs) <= budget:
                best = min(best, seconds)
        found = layer_policies.best_choices(layers, budget, change)
        missed += (found.seconds if found else math.inf) != best
    return missed, cases


def search_claim() -> Claim:
    """Whether the dynamic program over layers finds what trying all finds."""
    missed, cases = brute_force_misses()
    return Claim(
        "the dynamic program over layers is the best of all choices, tried one by one",
        "an optimal strategy by dynamic programming (section 3.3)",
        f"in {cases - missed} of {cases} random cases",
        missed == 0,
    )


def budget_claims(chosen: dict[float, Candidate | None]) -> list[Claim]:
    """Claims about what is planned with all axes: its memory and its speed.

    Args:
      chosen: {GB: the fastest}.
    """
    over = [b for b, c in chosen.items() if c and c.memory.total > b * _GB]
    size = sum(math.prod(x.shape) for x in _model().params.values())
    least = 6 * size * _ROWS * _LENGTH / (_CHIPS * CHIPS["v5e"].peak_flops)
    shares = [least / c.seconds.total for c in chosen.values() if c]
    return [
        Claim(
            "no budget is exceeded",
            "under a memory budget",
            f"{len(over)} of {len(chosen)}",
            not over,
        ),
        Claim(
            "6 FLOPs for each parameter and token take 10% to 70% of the peak",
            "",
            f"{min(shares):.0%} to {max(shares):.0%}",
            0.1 < min(shares) and max(shares) < 0.7,
        ),
    ]


def compiled_claim(budget: float, chosen: Candidate) -> Claim:
    """Whether the compiler of TPUs stays within the budget."""
    program = meshpar.lower(
        _model(),
        optax.adam(1e-4),
        chosen.layout,
        {name: _tokens() for name in ("tokens", "targets")},
        devices=meshpar.mesh.topology(_MACHINE),
        compute_dtype=jnp.bfloat16,
    )
    peak = explain(program).compiled_bytes["peak"] / _GB
    return Claim(
        f"the layout for {budget} GB, compiled for {_MACHINE}: GB on a chip",
        f"at most {budget}",
        f"{peak:.2f}",
        peak <= budget,
    )


def claims_of(
    found: dict[str, dict[float, float]], tried: dict[float, float]
) -> list[Claim]:
    """Whether the full search is never below a limited one.

    Args:
      found: {space: {budget: predicted sequences per second, 0 if nothing fits}}.
      tried: {budget: the most of all layouts, tried one by one}.
    """
    full = found[_FULL]
    limited = {name: rates for name, rates in found.items() if name != _FULL}
    over = {
        budget: rate / max(rates[budget] for rates in limited.values())
        for budget, rate in full.items()
        if any(rates[budget] for rates in limited.values())
    }
    alone = [f"{b} GB" for b, rate in full.items() if rate and b not in over]
    return [
        Claim(
            "never below a search of fewer axes, at any budget of memory",
            "surpasses approaches of limited parallelism in all tested scenarios",
            f"{', '.join(f'{x:.2f}x' for x in over.values())} the best of them"
            + f", and alone at {' and '.join(alone)}" * bool(alone),
            all(x >= 1 for x in over.values()),
        ),
        Claim(
            "more memory is never slower",
            "",
            ", ".join(f"{rate:.1f}" for rate in full.values()) + " sequences/s",
            all(
                a <= b
                for rates in found.values()
                for a, b in zip(rates.values(), list(rates.values())[1:], strict=False)
            ),
        ),
        Claim(
            "never below the best of all layouts whose layers have one policy",
            "",
            f"at {len(tried)} budgets",
            all(full[b] >= rate * (1 - 1e-9) for b, rate in tried.items()),
        ),
    ]


def _run(setting: Setting) -> Result:
    budgets = _QUICK_BUDGETS_GB if setting.quick else _BUDGETS_GB
    spaces = _QUICK_SPACES if setting.quick else tuple(SPACES)
    chosen: dict[str, dict[float, Candidate | None]] = {}
    for index, name in enumerate(spaces):
        chosen[name] = {}
        for budget in budgets:
            setting.progress(f"{name}, {budget} GB", index / (len(spaces) + 1))
            plans = planned(SPACES[name], budget)
            chosen[name][budget] = plans.best[0] if plans else None
    rates = {
        name: {b: _ROWS / c.seconds.total if c else 0.0 for b, c in by_budget.items()}
        for name, by_budget in chosen.items()
    }
    setting.progress("tries all layouts", len(spaces) / (len(spaces) + 1))
    every = planned(_AXES)
    tried = {budget: best_of_all(every, budget) for budget in budgets}

    claims = [*claims_of(rates, tried), search_claim()]
    claims += budget_claims(chosen[_FULL])
    if not setting.quick:
        setting.progress("compiles", 0.95)
        budget = budgets[len(budgets) // 2]
        claims.append(compiled_claim(budget, chosen[_FULL][budget]))

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name, by_budget in rates.items():
            fits = {b: rate for b, rate in by_budget.items() if rate}
            style = "o-" if name == _FULL else "o--"
            label = name if fits else f"{name}: nothing fits"
            axes.plot(list(fits), list(fits.values()), style, label=label)
        axes.set(xlabel="GB on a chip", ylabel="predicted sequences per second", ylim=0)
        axes.legend(title="layouts with", fontsize=8)

    table = [
        (
            name,
            str(budget),
            str(c.layout) if c else "nothing fits",
            f"{rates[name][budget]:.1f}" if c else "",
        )
        for name, by_budget in chosen.items()
        for budget, c in by_budget.items()
    ]
    return Result(
        ("layouts with", "GB", "the fastest", "sequences/s"),
        tuple(table),
        tuple(claims),
        {"sequences_per_second": rates},
        draw,
    )


PAPER = Paper(
    name="galvatron",
    title="Galvatron: all kinds of parallelism under a memory budget",
    source="Miao et al., VLDB 2023; Wang et al., TKDE 2024, arXiv:2307.02031",
    shows="predicted throughput of llama-1b on 8 chips in two slices over the memory "
    "of a chip, as planned with all axes and with some of them; nothing is run",
    run=_run,
)
