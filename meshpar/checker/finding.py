"""A finding: one thing of a step that costs bytes, memory or time without need."""

import dataclasses

from meshpar.units import readable_bytes

TRAFFIC, MEMORY, CALL = "traffic", "memory", "call"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is amiss in a step.

    Attributes:
      what: in words, with the name of the tensor where there is one.
      remedy: what to write instead.
      size: bytes of one device: on the wire per step, or in memory.
      of: what `size` is a part of: "traffic" or "memory"; "call" for what is no part of
        either, and is always reported.
      axes: mesh axes, outer to inner.
      line: "file:line" of the user's code; "" if the program does not tell.
      path: scopes around it, such as "Model/blocks_0/mlp".
      rule: name of the rule that found it.
    """

    what: str
    remedy: str
    size: float = 0.0
    of: str = TRAFFIC
    axes: tuple[str, ...] = ()
    line: str = ""
    path: str = ""
    rule: str = ""

    def __str__(self) -> str:
        unit = {TRAFFIC: " per step", MEMORY: " of memory", CALL: ""}[self.of]
        size = f"{readable_bytes(self.size)}{unit}" if self.size else ""
        axes = f"over {'*'.join(self.axes)}" if self.axes else ""
        head = ", ".join(filter(None, (size, axes, self.path)))
        lines = [f"[{self.rule}] {self.what}" + (f" ({head})" if head else "")]
        if self.line:
            lines.append(f"    at {self.line}")
        return "\n".join([*lines, f"    {self.remedy}"])
