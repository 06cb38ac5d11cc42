"""Public models, each for meshpar and for a plain loop of Flax and optax."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx, traverse_util
from jax.sharding import AxisType
from outside_models import (
    linen_gpt2,
    linen_lm1b,
    linen_mixer,
    linen_resnet,
    linen_wmt,
    nnx_bonsai,
    nnx_diffusion,
    nnx_explicit,
    nnx_gemma,
    nnx_peft,
    nnx_resnet,
    nnx_rnn,
    nnx_stacked,
    nnx_vit,
    plain_loop,
)

import meshpar


@dataclasses.dataclass(frozen=True)
class Public:
    """A public model.

    Attributes:
      model: the model for meshpar.
      start: () -> (parameters, other variables) for the plain loop, fresh from Flax.
      loss: (parameters, other variables, batch) -> (loss, other variables), in Flax
        alone.
      flat: (parameters, other variables) -> {path of the module: array}.
      make_batch: (seed, rows) -> a batch.
      axes: axes of the mesh of one device, all explicit, that the plain loop needs.
    """

    model: meshpar.Model
    start: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    flat: Callable[[Any, Any], dict[str, Any]]
    make_batch: Callable[[int, int], Any]
    axes: tuple[str, ...] = ()

    def train(self, optimizer, batches):
        """Losses, last parameters and other variables of the plain loop."""
        with contextlib.ExitStack() as stack:
            if self.axes:
                ones, types = (1,) * len(self.axes), (AxisType.Explicit,)
                mesh = jax.make_mesh(
                    ones, self.axes, types * len(ones), devices=jax.devices()[:1]
                )
                stack.enter_context(jax.set_mesh(mesh))
            return plain_loop.train(self.loss, *self.start(), optimizer, batches)


def scalar(result):
    """The loss of a loss function's result."""
    is_pair = isinstance(result, tuple) and not isinstance(result, meshpar.metrics.Mean)
    loss = result[0] if is_pair else result
    return loss.total / loss.weight if isinstance(loss, meshpar.metrics.Mean) else loss


def linen(module, file, *inputs, **options):
    """A Linen module with the loss of its file."""
    example = tuple(file.make_batch(0, 2)[name] for name in inputs)

    def start():
        boxed = jax.jit(module.init)(jax.random.key(0), *example)
        variables = dict(nn.meta.unbox(boxed))
        return variables.pop("params"), variables

    def loss(params, state, batch):
        new = dict(state)

        def apply(*args, mutable=()):
            variables = {"params": params, **state}
            output, changed = module.apply(variables, *args, mutable=list(state))
            new.update(changed)
            return (output, changed) if mutable else output

        return scalar(file.loss_fn(apply, batch)), new

    def flat(params, state):
        return traverse_util.flatten_dict({**params, **state}, sep="/")

    model = meshpar.from_linen(module, file.loss_fn, example, **options)
    return Public(model, start, loss, flat, file.make_batch)


def nnx_model(make, file, stack=None, **options):
    """An NNX module with the loss of its file, or as a LayerStack."""
    trained = options.get("trained", nnx.Param)

    with nnx.use_eager_sharding(False):
        graphdef, *variables = nnx.split(make(nnx.Rngs(0)), trained, ...)

    def loss(params, state, batch):
        module = nnx.merge(graphdef, params, state, copy=True)
        loss = scalar(file.loss_fn(module, batch))
        return loss, nnx.split(module, trained, ...)[2]

    def flat(params, state):
        leaves = nnx.to_flat_state(nnx.merge_state(params, state))
        return {
            "/".join(map(str, keys)): x.get_value()
            for keys, x in leaves
            if not isinstance(x, nnx.RngState)
        }

    model = meshpar.from_nnx(make, stack or file.loss_fn, **options)
    axes = getattr(file, "AXES", ())
    return Public(model, lambda: variables, loss, flat, file.make_batch, axes)


LM1B = ("inputs", "inputs_position", "inputs_segmentation")
GPT2 = ("input_ids", "attention_mask", "position_ids")
STACK = meshpar.LayerStack(
    stack="layers",
    embed=lambda model, batch: model.embed(batch["tokens"]),
    layer=lambda layer, x: layer(x),
    head_loss=lambda model, x, batch: nnx_stacked.masked_loss(model.logits(x), batch),
)


def lm1b(tied=False, **options):
    config = linen_lm1b.TransformerConfig(logits_via_embedding=tied)
    return linen(linen_lm1b.TransformerLM(config), linen_lm1b, *LM1B, **options)


def gemma(**options):
    def make(rngs):
        sharding = nnx_gemma.ShardingConfig.fsdp_tp_sharding()
        return nnx_gemma.Transformer(sharding, rngs=rngs)

    return nnx_model(make, nnx_gemma, **options)


def wmt(**options):
    return linen(linen_wmt.Transformer(), linen_wmt, "inputs", "targets", **options)


def gpt2():
    return linen(linen_gpt2.FlaxGPT2LMHeadModule(), linen_gpt2, *GPT2)


def mixer(**options):
    return linen(linen_mixer.MlpMixer(), linen_mixer, "image", **options)


def vit(norm=nnx.LayerNorm, **options):
    def make(rngs):
        return nnx_vit.VisionTransformer(norm=norm, rngs=rngs)

    return nnx_model(make, nnx_vit, **options)


def bonsai(**options):
    return nnx_model(lambda rngs: nnx_bonsai.Qwen3(rngs=rngs), nnx_bonsai, **options)


def explicit(**options):
    return nnx_model(lambda rngs: nnx_explicit.Net(rngs=rngs), nnx_explicit, **options)


def peft(**options):
    return nnx_model(nnx_peft.make, nnx_peft, trained=nnx.LoRAParam, **options)


def rnn(**options):
    return nnx_model(lambda rngs: nnx_rnn.LanguageModel(rngs=rngs), nnx_rnn, **options)


def stacked(stack=None):
    return nnx_model(lambda rngs: nnx_stacked.StackedLM(rngs=rngs), nnx_stacked, stack)


MODELS = {
    "lm1b": lambda: lm1b(layers="block_*"),
    "lm1b_tied": lambda: lm1b(tied=True),
    "wmt": lambda: wmt(layers="decoder/encoderdecoderblock_*"),
    "gpt2": gpt2,
    "mixer": lambda: mixer(layers="MixerBlock_*"),
    "vit": lambda: vit(layers="encoder.layers"),
    "gemma": lambda: gemma(layers="layers"),
    "gemma_jit": gemma,
    "vit_batch_norm": lambda: vit(nnx.BatchNorm),
    "bonsai": lambda: bonsai(layers="layers"),
    "bonsai_jit": bonsai,
    "explicit": lambda: explicit(layers="layers"),
    "explicit_jit": explicit,
    "peft": lambda: peft(layers="layers"),
    "peft_jit": peft,
    "diffusion": lambda: nnx_model(
        lambda rngs: nnx_diffusion.UNet(rngs=rngs), nnx_diffusion
    ),
    "rnn": lambda: rnn(layers="layers"),
    "stacked": lambda: stacked(STACK),
    "stacked_jit": stacked,
    "resnet": lambda: linen(linen_resnet.ResNet(), linen_resnet, "image"),
    "resnet_nnx": lambda: nnx_model(
        lambda rngs: nnx_resnet.ResNet(rngs=rngs), nnx_resnet
    ),
}
"""{name: makes the model}."""
