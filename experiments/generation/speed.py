"""Tokens per second, beside what the memory's bandwidth allows."""

import dataclasses
import time

import rich.console
import rich.progress

import meshpar
from meshpar.generation.floor import floor


@dataclasses.dataclass
class Meter:
    """Counts generated tokens and the seconds that they took.

    Attributes:
      tokens: so far.
      seconds: so far.
    """

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, since: float) -> None:
        """Adds tokens that were generated since a time of `time.monotonic`."""
        self.tokens += tokens
        self.seconds += time.monotonic() - since

    @property
    def tokens_per_second(self) -> float:
        """The mean so far."""
        return self.tokens / max(self.seconds, 1e-9)


def summary(meter: Meter, generator: meshpar.generation.Generator) -> str:
    """One line: the speed, and the share of what is possible."""
    text = (
        f"{meter.tokens:,} tokens in {meter.seconds:.1f} s: "
        f"{meter.tokens_per_second:,.1f} tokens/s"
    )
    least = floor(generator.programs)
    if least is None:
        return f"{text} (the bandwidth of this device is not known)"
    limit = generator.batch_size / least.seconds
    share = meter.tokens_per_second / limit
    return f"{text}; the time to {least.why} allows {limit:,.1f} ({share:.0%})"


def progress_bar(console: rich.console.Console) -> rich.progress.Progress:
    """A bar of prompts with the speed; nothing where there is no terminal."""
    return rich.progress.Progress(
        "prompts",
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(None),
        "{task.fields[speed]:,.0f} tokens/s  left",
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
