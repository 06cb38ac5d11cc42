"""Catalogs: the recipes that a command knows by name, beside those of files."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshpar.errors import ConfigError, nearest, shown
from meshpar.runs import recipe_file
from meshpar.runs.config import RunConfig, from_dict


class Catalog(NamedTuple):
    """Recipes by name.

    Attributes:
      recipes: {name: function that makes its configuration}.
      kind: class of the configurations; None without recipes.
      default: name of the recipe where none is given; "" for none.
    """

    recipes: Mapping[str, Callable[[], RunConfig]]
    kind: type[RunConfig] | None = None
    default: str = ""

    def get(self, name: str) -> RunConfig:
        """The configuration of a recipe, with its defaults.

        Args:
          name: of the catalog; or FILE.py:FUNCTION or MODULE:FUNCTION of your own.

        Raises:
          ConfigError: there is no such recipe; lists those that exist.
        """
        if ":" in name:
            return recipe_file.config_of(name)
        if name in self.recipes:
            return self.recipes[name]()
        what = f"no recipe {shown(name)!r}" if name else "no recipe is given"
        known = f" ({nearest(name, self.recipes)})" if self.recipes else ""
        raise ConfigError(
            f"{what}{known}; a recipe of your own is FILE.py:FUNCTION or "
            "MODULE:FUNCTION"
        )

    def stored(self, values: Any, recipe: str = "") -> RunConfig:
        """The configuration that a checkpoint stores.

        A recipe that is not of the catalog is code. It is not run because a checkpoint
        names it, as the checkpoint may be a stranger's.

        Args:
          values: its fields, as `dataclasses.asdict` gives them.
          recipe: the recipe as the user names it, whose code may be run.

        Raises:
          ConfigError: fields or values that this version, or the recipe's file as it is
            now, does not know, a recipe of a file that the user has not named, or
            another one than the user has named.
        """
        name = values.get("recipe") if isinstance(values, Mapping) else None
        own = isinstance(name, str) and ":" in name
        if self.kind is None and not own:
            raise ConfigError(
                f"the run's recipe {name!r} is not known here; use the command with "
                "which it was trained"
            )
        if own and name != recipe:
            raise ConfigError(
                f"the run names the recipe {shown(name)}, whose code this command "
                "would run; if you trust it, and the command takes a recipe, say "
                f"--recipe={shown(name)}"
            )
        if recipe and name != recipe:
            raise ConfigError(
                f"--recipe={shown(recipe)}: the run is of {shown(str(name))}; leave it "
                "out"
            )
        return from_dict(values, type(self.get(name)) if own else self.kind)


FILES_ALONE = Catalog({})
"""No recipes but those of files."""
