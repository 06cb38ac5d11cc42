"""Ranges of paths and addresses, which only commands take."""

import dataclasses
import re
from typing import Any

from meshpar.settings import Range


@dataclasses.dataclass(frozen=True)
class Address(Range):
    """Addresses host:port; "" for none."""

    in_words = "host:port, with a port below 65,536"

    def allows(self, value: Any) -> bool:
        """As `Range.allows`."""
        match = re.fullmatch(r"\S+:([0-9]{1,5})", value)
        return not value or bool(match and int(match.group(1)) < 2**16)
