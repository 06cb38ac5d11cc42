"""The console script: `meshpar COMMAND RECIPE --flags`.

    meshpar run my_run.py:gpt --layout=auto
    meshpar verify my_run.py:gpt --layout="fsdp=4,tensor=2"
    meshpar explain my_run.py:gpt --layout=fsdp=8 --topology=v5e:2x4
    meshpar plan my_run.py:gpt --topology=v5p:4x4x4 --batch_size=512
    meshpar checkpoint runs/my_run.gpt --can_resume=fsdp=4 --recipe=my_run.py:gpt
    meshpar score runs/my_run.gpt --recipe=my_run.py:gpt
    meshpar goodput runs/my_run.gpt
    meshpar check my_step.py:make_step --topology=v5e:4x4

A recipe is FILE.py:FUNCTION or MODULE:FUNCTION, and the function returns a
`meshpar.Run`, or for `check` any jax step and its arguments. `meshpar COMMAND --help`
lists the flags of a command, `meshpar run RECIPE --list_settings` the keys of --set.
"""

import gc
import importlib
import sys

from meshpar.errors import nearest

COMMANDS = (
    "run",
    "verify",
    "explain",
    "plan",
    "checkpoint",
    "score",
    "goodput",
    "check",
)
_FOLDERS = ("checkpoint", "score", "goodput")
"""Commands whose word is a folder and no recipe."""


def main() -> None:
    """Starts a command, with the recipe that is written behind its name."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(__doc__)
        sys.exit(0)
    if name not in COMMANDS:
        print(
            f"error: no command {name!r} ({nearest(name, COMMANDS)})", file=sys.stderr
        )
        sys.exit(2)
    if name == "run":
        gc.disable()  # Imports make objects that stay; `Startup` ends this.
    if words and not words[0].startswith("-") and name not in _FOLDERS:
        words[0] = f"--recipe={words[0]}"
    sys.argv = [f"meshpar {name}", *words]
    try:
        command = importlib.import_module(f"meshpar.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("meshpar"):
            raise
        print(
            f"error: the commands need {error.name}; install them with "
            "the extra: meshpar[commands]",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.modules["__main__"].__doc__ = command.__doc__
    command.start()


if __name__ == "__main__":
    main()
