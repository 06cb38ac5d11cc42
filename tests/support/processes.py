"""The environment of processes that form one mesh."""

import os


def environment() -> dict[str, str]:
    """This environment without the compilation cache.

    Process 0 alone writes to the cache. Started again it would find its programs there
    and wait in a collective, for longer than that allows, until the others compiled.
    """
    return os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}
