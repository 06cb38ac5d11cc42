"""The console that tables are printed on."""

import rich.console


def plain_console() -> rich.console.Console:
    """A console that prints texts as they are: layouts hold brackets, too."""
    return rich.console.Console(highlight=False, markup=False, emoji=False)


def wide_console() -> rich.console.Console:
    """A plain console that is 140 columns wide where the output is not a terminal."""
    console = plain_console()
    if not console.is_terminal:
        console.width = 140
    return console
