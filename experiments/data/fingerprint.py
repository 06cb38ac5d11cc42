"""Fingerprints of data: hashes of all tokens, so that no change goes unseen.

The hash of a large file of token ids is kept in the user's cache folder, under the
file's path, size, times and inode: a restart does not read the file again for it.
"""

import contextlib
import hashlib
import itertools
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.data.files import Tokens, blocks
from experiments.data.steady_file import SteadyFile

WHOLE = "sha256-"
"""Begins fingerprints of all tokens; those of earlier versions cover a sample."""
CACHED_BYTES = 1 << 28
"""Size from which the hash of a file is kept."""


def of_all_tokens(
    vocab: int, parts: Sequence[Tokens], file: SteadyFile | None = None
) -> str:
    """Fingerprint of the vocabulary, the sizes of the parts and all of their tokens.

    It does not depend on the integer type in which the tokens are stored.

    Args:
      vocab: number of token ids.
      parts: the parts of the stream of tokens in order, integer [tokens] each.
      file: the file that holds the whole stream, if it is one.
    """
    large = file is not None and file.size >= CACHED_BYTES
    cache = _cache_file(file) if large else None
    digest = ""
    if cache is not None:
        with contextlib.suppress(OSError):
            digest = cache.read_text()
    if len(digest) != hashlib.sha256().digest_size * 2:
        digest = _digest(parts)
        if cache is not None:
            _keep(cache, digest)
    sizes = [len(tokens) for tokens in parts]
    text = f"{vocab} {sizes} {digest}"
    return WHOLE + hashlib.sha256(text.encode()).hexdigest()[:32]


def of_a_sample(vocab: int, parts: Sequence[Tokens]) -> str:
    """Fingerprint of earlier versions: sizes, vocabulary and about 65,536 tokens.

    Args:
      vocab: number of token ids.
      parts: the parts of the stream of tokens in order, integer [tokens] each.
    """
    digest = hashlib.sha256(f"{vocab}".encode())
    for tokens in parts:
        stride = max(1, len(tokens) // 65536)
        digest.update(f"{len(tokens)}".encode())
        some = [tokens[i : i + 1] for i in range(0, len(tokens), stride)]
        digest.update(np.concatenate(some, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def _digest(parts: Sequence[Tokens]) -> str:
    digest = hashlib.sha256()
    for block in itertools.chain.from_iterable(map(blocks, parts)):
        digest.update(np.ascontiguousarray(block, "<u4"))
    return digest.hexdigest()


def _cache_file(file: SteadyFile) -> pathlib.Path:
    """The path at which a file's hash is kept; another one after the file changes."""
    stat = file.status
    times = stat.st_mtime_ns, stat.st_ctime_ns
    key = file.path.resolve(), stat.st_size, *times, stat.st_ino, stat.st_dev
    name = hashlib.sha256(str(key).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
    return pathlib.Path(base) / "meshpar" / "tokens" / name


def _keep(cache: pathlib.Path, digest: str) -> None:
    """Stores a hash; without a place for it, it is computed anew by the next start."""
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(digest)
        os.replace(partial, cache)
