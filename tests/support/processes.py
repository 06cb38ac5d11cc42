"""The environment of processes that form one mesh."""

import os


def environment() -> dict[str, str]:
    """This environment with a token, as a launcher makes one for every run."""
    return os.environ | {"MESHPAR_TOKEN": "a token of the tests alone"}
