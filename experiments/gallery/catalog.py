"""The papers of the gallery, in the order of its page."""

from experiments.gallery import (
    bosen,
    communication_patterns,
    data_servers,
    decision_tree,
    deepspeed_inference,
    delay_compensation,
    experts,
    federated,
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
    large_batches,
    layer_dropping,
    legal_layouts,
    local_sgd,
    megatron,
    megatron_collectives,
    model_parallel,
    model_sizes,
    parameter_server,
    pipedream,
    pipeline_bubbles,
    poseidon,
    push_sum,
    roofline,
    sandblaster,
    scaling,
    staleness,
    synchronous_sgd,
    time_to_accuracy,
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
        synchronous_sgd,
        communication_patterns,
        roofline,
        time_to_accuracy,
        large_batches,
        model_sizes,
        zero_memory,
        zero_r,
        host_memory,
        geeps,
        gpipe,
        pipeline_bubbles,
        pipedream,
        megatron,
        megatron_collectives,
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
        push_sum,
        federated,
        staleness,
        delay_compensation,
        bosen,
        parameter_server,
        data_servers,
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
