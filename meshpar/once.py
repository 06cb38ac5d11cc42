"""Results that are made once, and the errors of those that cannot be made."""

import collections
from collections.abc import Callable, Hashable
from typing import Any

from meshpar.errors import LayoutError


class Once:
    """Results by key; a LayoutError in place of one is raised each time."""

    def __init__(self, most: int | None = None):
        """Keeps nothing yet.

        Args:
          most: results that are kept, those used last; None for all.
        """
        self._most = most
        self._found: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of a key.

        Args:
          key: all that the result depends on.
          make: makes it.

        Raises:
          LayoutError: `make` raised it, now or before.
        """
        found = self._found
        if key not in found:
            try:
                found[key] = make()
            except LayoutError as error:
                found[key] = error
        found.move_to_end(key)
        made = found[key]
        if self._most is not None and len(found) > self._most:
            found.popitem(last=False)
        if isinstance(made, LayoutError):
            raise made.with_traceback(None)
        return made
