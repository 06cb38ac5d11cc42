"""The error of recipes, settings and everything that is made from them."""

from meshpar.errors import MeshparError


class ConfigError(MeshparError):
    """A recipe, key or value that does not exist or does not fit, with the remedy."""
