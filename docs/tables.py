"""Writes the generated tables of docs/: axes, rules, settings, what goes together.

    python -m docs.tables

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import functools
import pathlib
import re
from collections.abc import Iterable, Sequence

from experiments.recipes.config import SETTINGS
from experiments.support import support_table
from meshpar.layouts.axes import RECORDS
from meshpar.layouts.rules import ACTIVATION_RULES, PARAM_RULES

DOCS = pathlib.Path(__file__).parent
_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def axes_table() -> str:
    """One row per mesh axis, outer to inner."""
    header = (
        "item",
        "the axis",
        "splits dims of parameters",
        "collectives under shard_map",
        "between slices",
    )
    return _markdown(
        header,
        (
            (
                f"`{axis.name}=N`",
                axis.doc,
                _names(axis.param_dims),
                "meshpar's" if axis.manual else "the compiler's",
                "yes" if axis.crosses_slices else "no",
            )
            for axis in RECORDS
        ),
    )


def rules_table() -> str:
    """One row per dim name: the axes that split it, for parameters and activations."""
    dims = [
        dim
        for dim in dict.fromkeys((*PARAM_RULES, *ACTIVATION_RULES))
        if PARAM_RULES.get(dim) != (dim,) and not dim.startswith("activation_")
    ]

    def cell(rules: dict[str, tuple[str, ...]], dim: str) -> str:
        if dim not in rules:
            return "no rule"
        return "+".join(rules[dim]) or "none"

    return _markdown(
        ("dim", "of a parameter", "of an activation"),
        (
            (f"`{dim}`", cell(PARAM_RULES, dim), cell(ACTIVATION_RULES, dim))
            for dim in dims
        ),
    )


def settings_table(group: str) -> str:
    """One row per key of `--set` in a group: its values, default and help.

    Args:
      group: a part of the configuration, such as "model"; "" for keys without a part.
    """

    def default(value: object) -> str:
        if isinstance(value, bool):
            return f"`{value}`".lower()
        return "none" if value in ("", None) else f"`{value}`"

    return _markdown(
        ("key", "meaning", "values", "default"),
        (
            (f"`{key}`", help.rstrip("."), range.in_words, default(value))
            for key, (value, range, help) in SETTINGS.items()
            if key.rpartition(".")[0] == group
        ),
    )


_GROUPS = sorted({key.rpartition(".")[0] for key in SETTINGS})

TABLES = {"axes": axes_table, "rules": rules_table, "support": support_table} | {
    f"settings_{group or 'run'}": functools.partial(settings_table, group)
    for group in _GROUPS
}
"""{name of a table: the function that renders it}."""


def with_tables(text: str) -> str:
    """A page with its generated tables made anew."""
    return _TABLE.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def main() -> None:
    """Rewrites the pages in place."""
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
