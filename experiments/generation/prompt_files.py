"""Files of prompts, and files of their texts that a kill leaves whole.

Both have a JSON object in each line. A prompt is {"prompt": TEXT}; the result in the
same line of the other file is {"prompt": TEXT, "text": TEXT, "tokens": N, "settings":
HASH}. What was written before a kill is kept, but for half a line.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from meshpar.errors import ConfigError, shown


def read_prompts(path: str) -> list[str]:
    """The prompts of a file.

    Raises:
      ConfigError: no such file, no prompt, or a line that is none.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts={path} cannot be read: {shown(str(error))}; give a text file "
            'with {"prompt": TEXT} in each line'
        ) from error
    prompts = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise ConfigError(
                f"--prompts={path}, line {number}: {shown(line)!r} is no prompt; write "
                '{"prompt": TEXT}'
            )
        prompts.append(row["prompt"])
    if not prompts:
        raise ConfigError(f"--prompts={path} is empty; give at least one prompt")
    return prompts


def settings_hash(settings: Any) -> str:
    """A short text that is equal for equal settings.

    Args:
      settings: anything that JSON can hold.
    """
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _row(line: str) -> dict[str, Any] | None:
    """The object in a line; None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class ResultFile:
    """The texts of a file of prompts.

    Attributes:
      num_done: number of prompts whose texts the file holds.
    """

    def __init__(self, path: str, prompts: Sequence[str], settings: str):
        """Reads the results of an earlier command; changes nothing yet.

        Args:
          path: the file; it may be missing.
          prompts: all prompts.
          settings: from `settings_hash`.

        Raises:
          ConfigError: the file holds texts of other prompts or settings.
        """
        self._path, self._settings = pathlib.Path(path), settings
        content = self._path.read_bytes() if self._path.exists() else b""
        whole, _, half = content.rpartition(b"\n")
        self._size = len(content) - len(half)
        lines = whole.decode("utf-8", "replace").split("\n") if whole else []
        for number, line in enumerate(lines):
            row = _row(line) or {}
            if number >= len(prompts) or row.get("prompt") != prompts[number]:
                raise ConfigError(
                    f"--out={path}, line {number + 1} is not the text of prompt "
                    f"{number + 1}: it belongs to other prompts; choose another --out"
                )
            if row.get("settings") != settings:
                raise ConfigError(
                    f"--out={path}, line {number + 1} was generated with other weights "
                    "or flags; use those, or choose another --out"
                )
        self.num_done = len(lines)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the next texts, so that a kill after the call keeps them.

        Args:
          rows: {"prompt", "text", "tokens"} of each.
        """
        lines = (json.dumps({**row, "settings": self._settings}) for row in rows)
        text = "".join(f"{line}\n" for line in lines).encode()
        with self._path.open("ab") as file:
            file.truncate(self._size)  # Half a line of a command that was killed.
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(text)
        self.num_done += len(rows)
