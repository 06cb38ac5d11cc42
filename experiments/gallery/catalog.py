"""The papers of the gallery, in the order of its page."""

from experiments.gallery import (
    decision_tree,
    deepspeed_inference,
    experts,
    flexflow,
    galvatron,
    geeps,
    gossip,
    gpipe,
    gradient_coding,
    gradient_diversity,
    hogwild,
    host_memory,
    hyperparameter_search,
    layer_dropping,
    legal_layouts,
    local_sgd,
    megatron,
    model_parallel,
    parameter_server,
    pipedream,
    pipeline_bubbles,
    poseidon,
    sandblaster,
    scaling,
    staleness,
    unsupervised,
    zero_memory,
    zero_r,
)
from experiments.gallery.paper import Paper
from meshpar.errors import ConfigError, nearest

PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER
    for module in (
        scaling,
        zero_memory,
        zero_r,
        host_memory,
        geeps,
        gpipe,
        pipeline_bubbles,
        pipedream,
        megatron,
        model_parallel,
        experts,
        deepspeed_inference,
        galvatron,
        decision_tree,
        flexflow,
        legal_layouts,
        poseidon,
        local_sgd,
        gossip,
        staleness,
        parameter_server,
        sandblaster,
        hogwild,
        gradient_coding,
        gradient_diversity,
        layer_dropping,
        unsupervised,
        hyperparameter_search,
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
