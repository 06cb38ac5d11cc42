"""The identity of code: results and plans that other code made are old."""

import functools
import hashlib
import importlib.util
import pathlib

import jax


@functools.cache
def code_hash(*packages: str) -> str:
    """A hash of all Python files of some packages, and of the version of jax.

    Args:
      packages: their names.
    """
    digest = hashlib.sha256(jax.__version__.encode())
    for package in packages:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
