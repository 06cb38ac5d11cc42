"""All recipes by name (`--recipe`), and those of files of your own."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.recipes import mixtures, published, small
from experiments.recipes.config import Config
from meshpar.errors import ConfigError, nearest
from meshpar.runs import recipe_file
from meshpar.runs.config import RunConfig, from_dict

RECIPES: dict[str, Callable[[], Config]] = {
    **small.RECIPES,
    **published.RECIPES,
    **mixtures.RECIPES,
}


def get(name: str) -> RunConfig:
    """The configuration of a recipe, with its defaults.

    Args:
      name: of the catalog; or FILE.py:FUNCTION or MODULE:FUNCTION of your own.

    Raises:
      ConfigError: there is no such recipe; lists those that exist.
    """
    if ":" in name:
        return recipe_file.config_of(name)
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe {name!r} ({nearest(name, RECIPES)}); one of your own is "
            "FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    return RECIPES[name]()


def stored(values: Any) -> RunConfig:
    """The configuration that a checkpoint stores, of any recipe.

    Args:
      values: its fields, as `dataclasses.asdict` gives them.

    Raises:
      ConfigError: fields or values that this version, or the recipe's file as it is
        now, does not know.
    """
    name = values.get("recipe") if isinstance(values, Mapping) else None
    own = isinstance(name, str) and ":" in name
    return from_dict(values, type(get(name)) if own else Config)


def of_decoder(config: RunConfig) -> Config:
    """The configuration, for a command that knows the project's decoders alone.

    Raises:
      ConfigError: it is that of a recipe of your own.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"--recipe={config.recipe}: this command needs a decoder of the catalog "
            f"({', '.join(RECIPES)})"
        )
    return config
