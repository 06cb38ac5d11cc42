"""The papers of the gallery, in the order of its page."""

from experiments.gallery import (
    experts,
    gossip,
    gpipe,
    legal_layouts,
    local_sgd,
    megatron,
    model_parallel,
    pipeline_bubbles,
    poseidon,
    scaling,
    staleness,
    unsupervised,
    zero_memory,
)
from experiments.gallery.paper import Paper
from experiments.recipes.errors import ConfigError
from meshpar.errors import nearest

PAPERS: dict[str, Paper] = {
    paper.name: paper
    for paper in (
        scaling.PAPER,
        zero_memory.PAPER,
        gpipe.PAPER,
        pipeline_bubbles.PAPER,
        megatron.PAPER,
        local_sgd.PAPER,
        staleness.PAPER,
        gossip.PAPER,
        experts.PAPER,
        legal_layouts.PAPER,
        poseidon.PAPER,
        model_parallel.PAPER,
        unsupervised.PAPER,
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
