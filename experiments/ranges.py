"""Ranges of paths and addresses, which only commands take."""

import dataclasses
import re
from typing import Any

from meshpar.settings import Range


@dataclasses.dataclass(frozen=True)
class Path(Range):
    """Paths that Linux can hold; commands that open them find out if they exist."""

    longest: int = 4095
    longest_name: int = 255

    @property
    def in_words(self) -> str:
        """As `Range.in_words`."""
        return (
            f"a path of at most {self.longest:,} bytes, each name of it of at most "
            f"{self.longest_name}"
        )

    def allows(self, value: Any) -> bool:
        """As `Range.allows`."""
        if not isinstance(value, str) or "\0" in value:
            return False
        path = value.encode("utf-8", "surrogateescape")
        names = map(len, path.split(b"/"))
        return len(path) <= self.longest and max(names) <= self.longest_name


@dataclasses.dataclass(frozen=True)
class Address(Range):
    """Addresses host:port; "" for none."""

    in_words = "host:port, with a port below 65,536"

    def allows(self, value: Any) -> bool:
        """As `Range.allows`."""
        match = re.fullmatch(r"\S+:([0-9]{1,5})", value)
        return not value or bool(match and int(match.group(1)) < 2**16)
