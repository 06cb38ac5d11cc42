"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Any

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows a live line on a terminal, or prints a line every 10 seconds."""

    def __init__(self, steps: int, start: int, shown: bool, unit: str = "samples"):
        """Prepares the display.

        Args:
          steps: number of the last step.
          start: number of steps done before.
          shown: False on all processes but the first.
          unit: what the speed counts, in the plural.
        """
        self._steps, self._start, self._shown = steps, start, shown
        self._unit = unit
        import rich.console

        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._live: Any = None
        self._began = self._printed = time.monotonic()

    def __enter__(self):
        if self._shown and self._console.is_terminal:
            import rich.progress

            columns = (
                *("step", rich.progress.MofNCompleteColumn()),
                *(rich.progress.BarColumn(None), "loss {task.fields[loss]:.4f}"),
                *(f"{{task.fields[speed]:,.0f}} {self._unit}/s", "left"),
                rich.progress.TimeRemainingColumn(),
            )
            self._live = rich.progress.Progress(*columns, console=self._console)
            self._task = self._live.add_task(
                "", total=self._steps, completed=self._start, loss=float("nan"), speed=0
            )
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Prints text above the progress line."""
        if self._shown:
            self._console.print(text, markup=False)

    def update(self, step: int, loss: float, speed: float) -> None:
        """Shows a finished step: its loss, and the speed in units per second."""
        if self._live:
            self._live.update(self._task, completed=step, loss=loss, speed=speed)
            return
        now = time.monotonic()
        first = step == self._start + 1
        if first or step == self._steps or now - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = now
            done = step - self._start
            left = (now - self._began) / done * (self._steps - step)
            self.say(
                f"step {step}/{self._steps}  loss {loss:.4f}  "
                f"{speed:,.0f} {self._unit}/s  {left:.0f} s left"
            )
