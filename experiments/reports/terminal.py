"""The console that tables are printed on."""

import rich.console


def wide_console() -> rich.console.Console:
    """A console that is 140 columns wide where the output is not a terminal."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    return console
