"""Layouts in which a run goes on when some of its processes do not come back."""

import dataclasses
from collections.abc import Callable

from meshpar.errors import ConfigError, MeshparError
from meshpar.layouts import grammar
from meshpar.layouts.axes import BATCH_AXES, ways_of
from meshpar.layouts.layout import DEFAULTS, Layout
from meshpar.layouts.layout import parse as parse_layout

FLAG = "--fallback_layouts"


@dataclasses.dataclass(frozen=True)
class Fallbacks:
    """Layouts by the number of processes that they fill.

    Attributes:
      layouts: {number of processes: layout}, the layout of the whole run first.
    """

    layouts: dict[int, Layout]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of processes that are below the number of the whole run."""
        return tuple(self.layouts)[1:]

    def check(self, lower: Callable[[Layout], object], most: int) -> None:
        """Lowers every layout, so that none fails when it is needed.

        Args:
          lower: lowers a layout and raises MeshparError if it does not fit.
          most: the most devices that a layout may fill now.

        Raises:
          ConfigError: a layout does not fit the model or the batch.
        """
        for layout in self.layouts.values():
            if layout.num_devices < most:
                try:
                    lower(layout)
                except MeshparError as error:
                    raise ConfigError(f'{FLAG}, "{layout}": {error}') from error


def parse(text: str, whole: Layout, num_processes: int) -> Fallbacks:
    """Reads the layouts for fewer processes.

    A layout without microbatches gets so many that no device holds more of a batch at
    once than under the layout of the whole run: the gradients are accumulated.

    Args:
      text: layout strings, split by semicolons; "" for none.
      whole: the layout of the whole run.
      num_processes: number of processes of the whole run.

    Raises:
      ConfigError: a layout fills no whole number of processes, or not fewer than there
        are, or as many as another one.
      LayoutError: a layout string that cannot be read.
    """
    layouts = {num_processes: whole}
    for words in filter(None, map(str.strip, text.split(";"))):
        layout = parse_layout(words)
        number, rest = divmod(layout.num_devices * num_processes, whole.num_devices)
        if rest or not 0 < number < num_processes:
            raise ConfigError(
                f'{FLAG}, "{words}": it fills {layout.num_devices} of the '
                f"{whole.num_devices} devices; each of the {num_processes} processes "
                f"has {whole.num_devices // num_processes}, so fill a multiple of that "
                "below all"
            )
        if number in layouts:
            raise ConfigError(
                f'{FLAG}, "{words}": "{layouts[number]}" fills {number} processes, '
                "too; keep one of the two"
            )
        if layout.replica != whole.replica:
            raise ConfigError(
                f'{FLAG}, "{words}": replica={layout.replica}, but the run has '
                f"{whole.replica} replicas that train apart; keep their number"
            )
        layouts[number] = _accumulating(layout, words, whole)
    return Fallbacks(layouts)


def _accumulating(layout: Layout, words: str, whole: Layout) -> Layout:
    """The layout with microbatches of at most as many rows as `whole` has."""
    if "microbatches" in grammar.read_items(words, DEFAULTS):
        return layout
    ways, before = (ways_of(BATCH_AXES, x.sizes) for x in (layout, whole))
    microbatches = whole.microbatches * max(1, -(-before // ways))
    return dataclasses.replace(layout, microbatches=microbatches)
