"""The papers of the gallery, in the order of its page."""

from experiments.gallery import (
    gradient_coding,
    gradient_diversity,
    hyperparameter_search,
    layer_dropping,
    scaling,
)
from experiments.gallery.paper import Paper
from experiments.recipes.errors import ConfigError
from meshpar.errors import nearest

PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER
    for module in (
        scaling,
        gradient_coding,
        gradient_diversity,
        hyperparameter_search,
        layer_dropping,
    )
}
"""{name: paper}."""


def get(name: str) -> Paper:
    """The paper of a name.

    Raises:
      ConfigError: there is none.
    """
    if name not in PAPERS:
        raise ConfigError(f"no paper {name!r}; {nearest(name, PAPERS)}")
    return PAPERS[name]
