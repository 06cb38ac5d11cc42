"""GPT models of published tables, as plans and traces that compile nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import meshpar
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.arrays import abstract
from meshpar.layouts.plan import Plan
from meshpar.layouts.resolve import make_plan
from meshpar.lowering.layer_trace import TracedLayer, trace_layer
from meshpar.lowering.optimizer import make_optimizer

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Published:
    """A GPT model and the machines that trained it, as a table gives them.

    Attributes:
      billions: number of parameters in billions, as printed.
      heads: attention heads.
      embed: width of the residual stream (hidden size).
      depth: layers.
      tensor: tensor-parallel size.
      pipe: pipeline-parallel size.
      gpus: number of GPUs.
      batch: sequences of 2048 tokens in a batch.
      percent: achieved share of the GPUs' peak FLOP/s, as printed.
    """

    billions: float
    heads: int
    embed: int
    depth: int
    tensor: int
    pipe: int
    gpus: int
    batch: int
    percent: int

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.gpus // self.tensor // self.pipe


MEGATRON_2021 = (
    Published(1.7, 24, 2304, 24, 1, 1, 32, 512, 44),
    Published(3.6, 32, 3072, 30, 2, 1, 64, 512, 44),
    Published(7.5, 32, 4096, 36, 4, 1, 128, 512, 46),
    Published(18.4, 48, 6144, 40, 8, 1, 256, 1024, 43),
    Published(39.1, 64, 8192, 48, 8, 2, 512, 1536, 44),
    Published(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 45),
    Published(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 47),
    Published(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 50),
    Published(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 52),
    Published(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 52),
)
"""Table 1 of Narayanan et al., arXiv:2104.04473."""

VOCABULARY, LENGTH = 51_200, 2048


def decoder(published: Published, depth: int = 0) -> DecoderConfig:
    """The configuration of a published model, or of some of its layers."""
    return DecoderConfig(
        vocab=VOCABULARY,
        length=LENGTH,
        depth=depth or published.depth,
        embed=published.embed,
        heads=published.heads,
        kv_heads=published.heads,
        mlp=4 * published.embed,
        **GPT2_KIND,
    )


@functools.cache
def language_model_of(config: DecoderConfig) -> meshpar.Model:
    """The model of a decoder, which is made once."""
    return language_model(config)


def num_parameters(config: DecoderConfig) -> int:
    """Number of parameters of a decoder."""
    return sum(param.size for param in language_model_of(config).params.values())


def plan(config: DecoderConfig, layout: str) -> Plan:
    """The plan of Adam in float32 with bfloat16 compute; no device is needed."""
    model = language_model_of(config)
    params = abstract(model.params)
    keys = {path: model.keys_of(path) for path in params}
    optimizer = make_optimizer(optax.adam(1e-4), params, keys)
    parsed = meshpar.layouts.parse(layout)
    return make_plan(parsed, model.params, optimizer.abstract_state, jnp.bfloat16)


def traced_layer(config: DecoderConfig, layout: str, sequences: int) -> TracedLayer:
    """Bytes on one device of a layer that runs on some sequences of one microbatch.

    Args:
      config: the decoder; one layer is traced.
      layout: of at most as many devices as there are.
      sequences: rows of the batch on all devices.
    """
    resolved = plan(config, layout)
    mesh = meshpar.mesh.make_mesh(
        resolved.layout, jax.devices()[: resolved.layout.num_devices]
    )
    tokens = jax.ShapeDtypeStruct((sequences, config.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return trace_layer(language_model_of(config).layered, resolved, mesh, batch)
