r"""Continues prompts with the weights of a run, or of a folder of transformers.

    python -m experiments.generate runs/book --prompt="def main" --tokens=200 \
        --layout="fsdp=2,tensor=4" --temperature=0.8 --top_p=0.95
    python -m experiments.generate runs/book --prompts=prompts.jsonl --out=out.jsonl \
        --batch_size=32

With files, the same command goes on after a kill with the prompts that have no text.
"""

import codecs
import dataclasses
import time
from collections.abc import Sequence

import jax
import rich.console
from absl import flags

import meshpar
from experiments.generation import prompt_files, speed
from experiments.generation.sources import Source, find_source, make_generator, streamed
from experiments.recipes.config import Config
from meshpar.arrays import Params
from meshpar.commands import command_line, outputs
from meshpar.commands.devices import start_devices
from meshpar.errors import ConfigError
from meshpar.multihost import agree
from meshpar.runs.config import check_setting
from meshpar.settings import Number

PROMPT = flags.DEFINE_string("prompt", None, "A text to continue.")
PROMPTS = flags.DEFINE_string(
    "prompts", None, 'A file with {"prompt": TEXT} in each line; goes with --out.'
)
OUT = flags.DEFINE_string("out", None, "File for the texts of --prompts.")
TOKENS = flags.DEFINE_integer("tokens", 200, "Most tokens to generate.")
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Divisor of the logits; 0 for the likeliest token."
)
TOP_K = flags.DEFINE_integer("top_k", 0, "Likeliest tokens to draw from; 0 for all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Share of probability to draw from.")
STOP = flags.DEFINE_multi_string(
    "stop", [], r"A text of one token that ends a text, such as '\n'; may repeat."
)
MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    0,
    "Most tokens that the model sees; the length that it trained with by default.",
)
STREAM_WEIGHTS = flags.DEFINE_bool(
    "stream_weights",
    False,
    "Keep the layers' weights in host memory and bring them layer by layer, as "
    "offload=parameters in the layout does.",
)
command_line.limit(TOKENS, Number(1, 2**24, "tokens"))
command_line.limit(MAX_LENGTH, Number(0, 2**24, "tokens", "0 for the model's"))


def _stop_ids(source: Source) -> list[int]:
    """The token ids that end a text."""
    ids = list(source.stop)
    for text in STOP.value:
        plain = codecs.decode(
            text.encode("latin-1", "backslashreplace"), "unicode_escape"
        )
        found = source.tokenizer.encode(plain)
        if len(found) != 1:
            raise ConfigError(
                f"--stop={text!r} is {len(found)} tokens of the model; give a text of "
                "one token"
            )
        ids += found
    return ids


def _check_flags() -> None:
    """Raises ConfigError for flags that do not go together."""
    if (PROMPT.value is None) == (PROMPTS.value is None):
        raise ConfigError("give one of --prompt=TEXT and --prompts=FILE")
    if (PROMPTS.value is None) != (OUT.value is None):
        raise ConfigError("--prompts=FILE and --out=FILE go together; give both")
    for flag in (command_line.BATCH_SIZE, command_line.SEED):
        if flag.value is not None:
            check_setting(flag.name, flag.value)
    if PROMPT.value == "":
        raise ConfigError("--prompt=: give a text of at least one character")
    if OUT.value is not None:
        outputs.check_file(OUT.value, "--out")


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Continues texts.

    Attributes:
      source: the model.
      generator: its programs.
      params: its weights.
      sampling: how tokens are drawn.
      stop: token ids that end a text.
      meter: of the speed.
      console: for notes.
    """

    source: Source
    generator: meshpar.generation.Generator
    params: Params
    sampling: meshpar.generation.Sampling
    stop: list[int]
    meter: speed.Meter
    console: rich.console.Console

    def texts(self, prompts: Sequence[str], first: int) -> list[dict]:
        """{"prompt", "text", "tokens"} of some prompts.

        Args:
          prompts: at most a batch.
          first: number of the first of them.
        """
        ids = [self.source.tokenizer.encode(prompt) for prompt in prompts]
        most = self.generator.max_length - 1
        for number, tokens in enumerate(ids, first):
            if len(tokens) > most:
                self.console.print(
                    f"prompt {number} has {len(tokens):,} tokens, and the model sees "
                    f"the last {most:,} of them"
                )
        began = time.monotonic()
        found = self.generator.generate(
            self.params,
            [tokens[-most:] for tokens in ids],
            TOKENS.value,
            self.sampling,
            stop=self.stop,
            sequence_ids=range(first, first + len(prompts)),
        )
        self.meter.add(sum(map(len, found)), began)
        return [
            dict(
                prompt=p, text=self.source.tokenizer.decode(tokens), tokens=len(tokens)
            )
            for p, tokens in zip(prompts, found, strict=True)
        ]

    def settings(self) -> str:
        """A hash of all settings that decide the texts, without the prompts."""
        sampling = dataclasses.asdict(self.sampling)
        own = [TOKENS.value, self.stop, self.generator.max_length]
        return prompt_files.settings_hash([self.source.name, sampling, *own])

    def write_file(self, prompts: Sequence[str]) -> None:
        """Continues all prompts of a file that have no text yet."""
        file = prompt_files.ResultFile(OUT.value, prompts, self.settings())
        done = agree.allgather_objects("texts", file.num_done)[0]
        if done:
            self.console.print(f"{OUT.value} holds {done} of {len(prompts)} texts")
        with speed.progress_bar(self.console) as bar:
            task = bar.add_task("", total=len(prompts), completed=done, speed=0.0)
            for first in range(done, len(prompts), self.generator.batch_size):
                batch = prompts[first : first + self.generator.batch_size]
                rows = self.texts(batch, first)
                if jax.process_index() == 0:
                    file.append(rows)
                rate = self.meter.tokens_per_second
                bar.update(task, advance=len(batch), speed=rate)


def main(arguments: Sequence[str]) -> int:
    """Generates, and returns the exit code."""
    if len(arguments) != 2:
        raise ConfigError("give one folder: python -m experiments.generate DIR")
    _check_flags()
    prompts = [PROMPT.value]
    if PROMPTS.value is not None:
        prompts = prompt_files.read_prompts(PROMPTS.value)
    try:
        sampling = meshpar.generation.Sampling(
            TEMPERATURE.value, TOP_K.value, TOP_P.value, command_line.SEED.value or 0
        )
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    source = find_source(
        arguments[1], command_line.LAYOUT.value, command_line.TOKENIZER.value
    )
    if STREAM_WEIGHTS.value:
        source = streamed(source)
    stop = _stop_ids(source)
    _, devices = start_devices(Config("generate", layout=str(source.layout)))
    generator = make_generator(
        source, devices, MAX_LENGTH.value, command_line.BATCH_SIZE.value or 0
    )
    console = rich.console.Console(
        highlight=False, soft_wrap=True, quiet=jax.process_index() > 0
    )
    params = source.load(generator)
    console.print(f"{source.name} under {source.layout}", markup=False)
    generator.compile()
    meter = speed.Meter()
    writer = _Writer(source, generator, params, sampling, stop, meter, console)
    if PROMPTS.value is None:
        console.print(prompts[0] + writer.texts(prompts, 0)[0]["text"], markup=False)
    else:
        writer.write_file(prompts)
    console.print(speed.summary(meter, generator), markup=False)
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        (
            command_line.LAYOUT,
            command_line.TOKENIZER,
            command_line.BATCH_SIZE,
            command_line.SEED,
            *command_line.OF_DEVICES,
        ),
        arguments=True,
    )
