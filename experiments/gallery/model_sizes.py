"""BERT-large, GPT-2, Turing-NLG and GPT-3: parameters, memory and compute."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure

from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.gallery.published_decoders import (
    GB,
    language_model_of,
    num_parameters,
    plan,
)
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from meshpar.planner.flops import matmul_flops

_BILLION = 1e9


class Published(NamedTuple):
    """A model as its paper gives it.

    Attributes:
      vocab: size of the vocabulary.
      length: tokens of a sequence.
      depth: layers.
      embed: hidden size.
      heads: attention heads.
      billions: parameters, as printed.
      gigabytes: of its training state with Adam in mixed precision, as printed.
      relative: compute of a token over that of BERT-large, as printed.
      tokens: of its training, in billions; 0 if they are not known.
      flops: of its training, as printed; 0 if they are not known.
    """

    vocab: int
    length: int
    depth: int
    embed: int
    heads: int
    billions: float
    gigabytes: float
    relative: float
    tokens: float = 0
    flops: float = 0


BERT, GPT3 = "BERT-large", "GPT-3"
MODELS = {
    BERT: Published(
        30_522, 512, 24, 1024, 16, 0.34, 5.12, 1.0, tokens=250, flops=5.33e20
    ),
    "GPT-2": Published(50_257, 1024, 48, 1600, 25, 1.542, 24, 4.7),
    "Turing-NLG": Published(50_257, 1024, 78, 4256, 28, 17.2, 275, 54),
    GPT3: Published(
        50_257, 2048, 96, 12_288, 96, 175, 2800, 547, tokens=300, flops=3.14e23
    ),
}
"""{model: as printed}. Parameters: Devlin et al., 2019; Radford et al., 2019; Rosset,
2020; Brown et al., 2020, of whom also the tokens and FLOPs (table D.1). Gigabytes: 16
for each billion of parameters, of which GPT-2's stand in the ZeRO paper (section 3.1);
relative compute: the ratio of the parameters, with 0.32 billion for BERT-large."""


class Found(NamedTuple):
    """Computed numbers of a model.

    Attributes:
      billions: parameters.
      gigabytes: of the training state on one device, from its plan.
      flops: of the matmuls of a step for one token, counted in traces.
    """

    billions: float
    gigabytes: float
    flops: float


def decoder(model: Published, depth: int = 0) -> DecoderConfig:
    """A decoder of the model's sizes; BERT's has positions, and no types of tokens."""
    return DecoderConfig(
        vocab=model.vocab,
        length=model.length,
        depth=depth or model.depth,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.heads,
        mlp=4 * model.embed,
        **GPT2_KIND,
    )


def traced_flops(config: DecoderConfig) -> float:
    """FLOPs of the matmuls of loss and gradients for one token, in a trace."""
    model = language_model_of(config)
    tokens = jax.ShapeDtypeStruct((1, config.length), jnp.int32)
    params = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in model.params.items()
    }
    loss = lambda p, b: model.loss(p, b, None).loss  # noqa: E731
    batch = {"tokens": tokens, "targets": tokens}
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr
    return matmul_flops(jaxpr) / config.length


def written_flops(model: Published) -> float:
    """FLOPs of a token by formula: 6 N of its matmuls, 12 L S D of attention."""
    weights = model.depth * 12 * model.embed**2 + model.vocab * model.embed
    return 6 * weights + 12 * model.depth * model.length * model.embed


def written_parameters(model: Published) -> float:
    """Parameters by arithmetic: layers, both embeddings and the last norm."""
    layers = model.depth * (12 * model.embed**2 + 13 * model.embed)
    return layers + (model.vocab + model.length + 2) * model.embed


def compute(model: Published) -> Found:
    """A model's numbers: nothing of it is ever in memory."""
    config = decoder(model)
    state = sum(plan(config, "data=1").bytes_per_device().values())
    return Found(num_parameters(config) / _BILLION, state / GB, traced_flops(config))


def claims_of(found: dict[str, Found]) -> list[Claim]:
    """Whether the numbers are those that are printed, and those of arithmetic."""
    base = found[BERT].flops
    relative = {name: one.flops / base for name, one in found.items()}
    trained = {
        name: 1e9 * model.tokens * found[name].flops
        for name, model in MODELS.items()
        if model.tokens
    }

    def near(key: str, values: dict[str, float], share: float) -> bool:
        printed = {name: getattr(model, key) for name, model in MODELS.items()}
        return all(abs(x / printed[name] - 1) < share for name, x in values.items())

    def said(key: str) -> str:
        return ", ".join(f"{getattr(model, key):g}" for model in MODELS.values())

    billions = {name: one.billions for name, one in found.items()}
    gigabytes = {name: one.gigabytes for name, one in found.items()}
    off = max(
        max(
            abs(one.billions * _BILLION / written_parameters(MODELS[name]) - 1),
            abs(one.flops / written_flops(MODELS[name]) - 1),
        )
        for name, one in found.items()
    )
    return [
        Claim(
            "billions of parameters, within 2%",
            said("billions"),
            ", ".join(f"{x:.3f}" for x in billions.values()),
            near("billions", billions, 0.02),
        ),
        Claim(
            "GB of training state with Adam in mixed precision, from plans, within 5%",
            said("gigabytes") + ": 16 bytes a parameter",
            ", ".join(f"{x:.2f}" for x in gigabytes.values()),
            near("gigabytes", gigabytes, 0.05),
        ),
        Claim(
            "compute of a token over BERT-large's, from traces, within 10%",
            said("relative"),
            ", ".join(f"{x:.1f}" for x in relative.values()),
            near("relative", relative, 0.1),
        ),
        Claim(
            f"FLOPs of training {' and '.join(trained)}, within 5%",
            ", ".join(f"{m.flops:.2e}" for m in MODELS.values() if m.flops)
            + " (Brown et al., table D.1)",
            ", ".join(f"{x:.2e}" for x in trained.values()),
            near("flops", trained, 0.05),
        ),
        Claim(
            "parameters and traced FLOPs are those of arithmetic, to 1e-6",
            "L (12 D^2 + 13 D) + (V + S + 2) D; 6 N + 12 L S D",
            f"{off:.1e} off",
            off < 1e-6,
        ),
    ]


def _run(setting: Setting) -> Result:
    found = {}
    for index, (name, model) in enumerate(MODELS.items()):
        setting.progress(name, index / len(MODELS))
        found[name] = compute(model)
    base = found[BERT].flops
    rows = [
        (
            name,
            f"{one.billions:.3f}",
            f"{one.gigabytes:,.1f}",
            f"{one.flops / 1e9:,.2f}",
            f"{one.flops / base:.1f}",
        )
        for name, one in found.items()
    ]
    return Result(
        ("model", "parameters, B", "state, GB", "GFLOPs a token", "relative compute"),
        tuple(rows),
        tuple(claims_of(found)),
        {name: one._asdict() for name, one in found.items()},
        functools.partial(_draw, found),
    )


def _draw(found: dict[str, Found], figure: matplotlib.figure.Figure) -> None:
    left, right = figure.subplots(1, 2)
    names, base = list(found), found[BERT].flops
    left.bar(names, [one.gigabytes for one in found.values()])
    left.axhline(80, color="black", linestyle=":", label="memory of an A100")
    left.set(yscale="log", ylabel="GB of training state")
    left.legend(fontsize=8)
    right.bar(names, [one.flops / base for one in found.values()], color="C1")
    right.set(yscale="log", ylabel="compute of a token over BERT-large's")
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8, rotation=20)


PAPER = Paper(
    name="model_sizes",
    title="Sizes of BERT-large, GPT-2, Turing-NLG and GPT-3",
    source="Devlin et al., arXiv:1810.04805; Radford et al., 2019; Rosset, 2020; Brown "
    "et al., arXiv:2005.14165, table D.1; Rajbhandari et al., arXiv:1910.02054",
    shows="training state on one device and compute of a token, from plans and traces",
    run=_run,
)
