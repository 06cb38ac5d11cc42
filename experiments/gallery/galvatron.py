"""Galvatron: the fastest layout under a memory budget, of all layouts and of some."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax

import meshpar
from experiments import recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.language_model import language_model
from meshpar.layouts.layout import Layout
from meshpar.planner.candidate import Candidate
from meshpar.planner.plans import Plans

_MACHINE, _ROWS, _LENGTH = "v5e:2x4", 32, 1024
_BUDGETS_GB = (3, 4, 6, 8, 10, 12, 15)
_QUICK_BUDGETS_GB = (4, 8)
_FULL = "all axes and options"


def _only(*axes: str) -> Callable[[Layout], bool]:
    """Layouts that use these axes alone, and compute no activation again."""

    def keeps(layout: Layout) -> bool:
        used = {axis for axis, size in layout.sizes.items() if size > 1}
        return layout.remat == "none" and used <= set(axes)

    return keeps


SPACES: dict[str, Callable[[Layout], bool]] = {
    "data": _only("data"),
    "fsdp (ZeRO-3)": lambda x: _only("fsdp")(x) and x.zero_level == 3,
    "tensor": _only("tensor"),
    "pipe": _only("pipe"),
    "data, tensor, pipe": _only("data", "tensor", "pipe"),
    _FULL: lambda x: True,
}
"""{name: whether a layout is in the space}; those that Galvatron is compared with."""


def planned(budget: float | None = None) -> Plans:
    """The plans of llama-1b on 8 chips, with so many GB on each."""
    return meshpar.plan(
        _model(),
        optax.adam(1e-4),
        {name: _tokens() for name in ("tokens", "targets")},
        _MACHINE,
        compute_dtype=jnp.bfloat16,
        memory=None if budget is None else int(budget * 1e9),
    )


@functools.cache
def _model() -> meshpar.Model:
    return language_model(recipes.get("llama-1b").model)


def _tokens() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)


def best(
    candidates: list[Candidate], keeps: Callable[[Layout], bool], budget: float
) -> Candidate | None:
    """The fastest candidate of a space that needs at most so many GB."""
    fit = [
        c for c in candidates if keeps(c.layout) and c.memory.total <= int(budget * 1e9)
    ]
    return min(fit, key=lambda c: (c.seconds.total, c.memory.total), default=None)


def claims_of(
    found: dict[str, dict[float, float]], planner: dict[float, float]
) -> list[Claim]:
    """Whether the full search is never below a limited one.

    Args:
      found: {space: {budget: predicted sequences per second, 0 if nothing fits}}.
      planner: {budget: what the planner itself chooses}.
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
            ", ".join(f"{x:.2f}x" for x in over.values())
            + f" the best of them; alone at {', '.join(map(str, alone))} GB"
            * bool(alone),
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
            "the planner chooses what trying all layouts finds",
            "",
            f"at {' and '.join(map(str, planner))} GB",
            all(abs(rate / full[b] - 1) < 1e-9 for b, rate in planner.items()),
        ),
    ]


def _run(setting: Setting) -> Result:
    budgets = _QUICK_BUDGETS_GB if setting.quick else _BUDGETS_GB
    setting.progress("predicts all layouts", 0.0)
    plans = planned()
    candidates = [*plans.fitting, *plans.too_large]
    chosen = {
        name: {budget: best(candidates, keeps, budget) for budget in budgets}
        for name, keeps in SPACES.items()
    }
    rates = {
        name: {b: _ROWS / c.seconds.total if c else 0.0 for b, c in by_budget.items()}
        for name, by_budget in chosen.items()
    }
    planner = {}
    for budget in budgets[:: max(1, len(budgets) - 1)]:
        setting.progress(f"plans with {budget} GB", 0.5)
        planner[budget] = _ROWS / planned(budget).best[0].seconds.total

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
        tuple(claims_of(rates, planner)),
        {"sequences_per_second": rates, "layouts": len(candidates)},
        draw,
    )


PAPER = Paper(
    name="galvatron",
    title="Galvatron: all kinds of parallelism under a memory budget",
    source="Miao et al., VLDB 2023; Wang et al., TKDE 2024, arXiv:2307.02031",
    shows="predicted throughput of llama-1b on 8 chips over the memory of a chip, by "
    "the planner with all axes and options and with some of them; nothing is run",
    run=_run,
)
