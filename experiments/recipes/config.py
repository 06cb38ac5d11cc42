"""Configuration of a decoder's run, from which its model, optimizer and data follow."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import jax
import numpy as np
import optax

import meshpar
from experiments.data import Corpus, DataConfig, load, padded_unevenly, unigram_loss
from experiments.data.files import TOKEN_SUFFIXES
from experiments.models import linen_decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.language_model import language_model
from experiments.recipes.optimizers import (
    OptimizerConfig,
    learning_rates,
    make_optimizer,
)
from experiments.recipes.sampling import sample
from experiments.recipes.token_data import TokenData, check_vocabulary
from meshpar.arrays import Params
from meshpar.errors import ConfigError
from meshpar.islands.mode import GRADIENTS
from meshpar.layouts.axes import DATA, FSDP, TENSOR
from meshpar.runs import programs
from meshpar.runs.config import NEUTRAL, OF_MODEL, RunConfig, settings_of
from meshpar.runs.modes import ISLANDS
from meshpar.runs.run import Run
from meshpar.settings import Choice, Number

_NEUTRAL = {
    *("sample_tokens", "model.loss_block"),
    *("data.path", "data.tokenizer", "data.field"),
}
"""Fields that change no step; the fingerprint of the data compares its content."""
_TRAINING_ONLY = {"model.dropout", "model.init_std"}
"""Fields of the model that change its training, but no evaluation of its weights."""


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """The whole configuration of a decoder's run.

    Attributes:
      framework: API of Flax in which the decoder is written, "nnx" or "linen".
      model: the decoder; vocab=0 takes the vocabulary of the data.
      optimizer: the optimizer.
      data: the data.
      sample_tokens: tokens of the text that the model writes at the end of the run; 0
        for none.
    """

    framework: Annotated[str, Choice(("nnx", "linen"))] = "nnx"
    model: DecoderConfig = DecoderConfig(vocab=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    sample_tokens: Annotated[int, Number(0, 2**20, "tokens", "0 for no sample")] = 200

    FORMER_NAMES: ClassVar[Mapping[tuple[type, str], str]] = {
        (DecoderConfig, "loss_chunk"): "loss_block",
    }

    def prepared(self) -> tuple[Self, Run]:
        """Makes the run; the data are read only if the vocabulary is theirs.

        Raises:
          MeshparError: data, model or optimizer that do not fit.
        """
        if self.model.vocab:
            return self, self.run()
        corpus = load(self.data)
        config = self.fitted(corpus)
        return config, config.run(corpus)

    def fitted(self, corpus: Corpus) -> Self:
        """The configuration with the vocabulary of the data, if it leaves it at 0.

        Raises:
          ConfigError: its vocabulary is too small for the data.
        """
        if self.model.vocab == 0:
            model = dataclasses.replace(self.model, vocab=corpus.vocab)
            return dataclasses.replace(self, model=model)
        check_vocabulary(corpus, self.model.vocab)
        return self

    def run(self, corpus: Corpus | None = None) -> Run:
        """The model, optimizer and data of the configuration, with a known vocabulary.

        Args:
          corpus: the data; read when they are needed if it is None.
        """
        model, rates = self.make_model(), learning_rates(self.optimizer, self.steps)
        length = self.model.length
        tokens = TokenData(self.data, length, self.model.vocab, corpus)
        return Run(
            model,
            make_optimizer(self.optimizer, self.steps, model),
            tokens,
            evaluation=tokens,
            clip_norm=self.optimizer.clip_norm or None,
            learning_rate=rates,
            units=("tokens", length),
            length=length,
            flops=self.model.flops_per_token() * length,
            baseline=("unigram floor", lambda: unigram_loss(tokens.corpus)),
            depends_on_microbatches=self.model.depends_on_microbatches,
            padded=padded_unevenly,
            sample=self._sampler(tokens) if self.sample_tokens else None,
            identity={"length": length, **self.data.tokenizer_identity},
        )

    def _sampler(self, tokens: TokenData) -> Any:
        """(program, parameters) -> the beginning of the held-out text, continued."""

        def text(program: meshpar.TrainProgram, params: Params) -> str:
            prompt = np.asarray(tokens.corpus.held_out[: self.model.length // 2])
            ids = sample(
                program,
                params,
                prompt.tolist(),
                self.sample_tokens,
                length=self.model.length,
                seed=self.seed,
            )
            return tokens.corpus.decode(ids)

        return text

    def make_model(self) -> meshpar.Model:
        """The decoder with next-token cross-entropy.

        Raises:
          MeshparError: framework=linen with a decoder that only NNX supports.
        """
        if self.framework == "linen":
            if self.data.pack:
                raise ConfigError(
                    "data.pack=True: the Linen decoder takes no packed documents; use "
                    "framework=nnx"
                )
            return linen_decoder.language_model(self.model)
        return language_model(self.model)

    def abstract_batch(self, weighted: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """The global batch, [batch, length].

        Args:
          weighted: whether batches hold the weight of every token.
        """
        tokens = TokenData(self.data, self.model.length, self.model.vocab)
        batch = tokens.abstract_batch(self.batch_size)
        if weighted:
            shape = batch["tokens"].shape
            batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
        return batch

    def make_program(
        self,
        layout: meshpar.Layout,
        devices: Sequence[jax.Device],
        weighted: bool = False,
        optimizer: optax.GradientTransformation | optax.MultiSteps | None = None,
    ) -> meshpar.TrainProgram:
        """Lowers the run under a layout; its vocabulary must be known.

        Args:
          layout: the layout.
          devices: as many devices as the layout fills.
          weighted: whether batches hold the weight of every token.
          optimizer: in place of the configured one.

        Raises:
          MeshparError: a model, layout or mode that do not fit.
        """
        batch = self.abstract_batch(weighted)
        run = self.run()
        return programs.make_program(self, run, layout, devices, batch, optimizer)

    def default_layout(self, num_devices: int) -> str:
        """A layout that fills the devices with tensor=2, fsdp=2 and the rest data.

        An axis gets 2 devices only while the number that is left is even.
        """
        sizes, left = {TENSOR: 1, FSDP: 1}, num_devices
        for axis in sizes:
            if left % 2 == 0:
                sizes[axis], left = 2, left // 2
        sizes = {DATA: left, FSDP: sizes[FSDP], TENSOR: sizes[TENSOR]}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items())

    def kind_of_change(self, key: str) -> str:
        if key in _NEUTRAL:
            return NEUTRAL
        if key.startswith("model.") and key not in _TRAINING_ONLY:
            return OF_MODEL
        return super().kind_of_change(key)

    @property
    def decides_samples(self) -> frozenset[str]:
        return super().decides_samples | {"data.held_out", "model.length"}

    @property
    def unread(self) -> dict[str, str]:
        found = {}
        if not self.model.router_bias:
            found["optimizer.router_bias_rate"] = "model.router_bias=False"
        if pathlib.Path(self.data.path).suffix not in TOKEN_SUFFIXES:
            found["data.separator"] = "data that is no file of token ids"
        algorithm = self.islands.algorithm
        if self.optimizer_mode == ISLANDS and algorithm in GRADIENTS:
            names = (x.name for x in dataclasses.fields(self.optimizer))
            keys = (f"optimizer.{name}" for name in names if name != "clip_norm")
            why = f"islands.algorithm={algorithm}, whose optimizer is the store's"
            found |= dict.fromkeys(keys, why)
        return super().unread | found

    @property
    def plan_facts(self) -> dict[str, Any]:
        names = "framework", "model", "optimizer", "compute_dtype", "batch_size"
        fields = dataclasses.asdict(self)
        facts = {name: fields[name] for name in names}
        return facts | {"data.pack": self.data.pack}


SETTINGS = settings_of(Config)
"""{key of `--set`: what its field says} of decoders."""
