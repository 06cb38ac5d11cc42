"""All recipes by name (`--recipe`), and those of files of your own."""

from collections.abc import Callable

from experiments.recipes import mixtures, published, small
from experiments.recipes.config import Config
from meshpar.errors import ConfigError
from meshpar.runs.catalog import Catalog
from meshpar.runs.config import RunConfig

RECIPES: dict[str, Callable[[], Config]] = {
    **small.RECIPES,
    **published.RECIPES,
    **mixtures.RECIPES,
}


CATALOG = Catalog(RECIPES, Config, "bytes-llama")
"""The recipes as commands know them."""

get, stored = CATALOG.get, CATALOG.stored


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
