"""Offload: parts of training that live in host memory and visit the device in chunks.

    optimizer     optimizer state, and the layers' master weights if the loss computes
                  with copies of them in another dtype; the copies stay on the device
    parameters    weights of the layers, each layer's on the device only for its uses
    activations   what the layers save for their backward pass

Source: Ren et al., ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al., ZeRO-Infinity,
  arXiv:2104.07857 (parameters and activations).
"""

from meshpar.errors import LayoutError, nearest, shown

NONE = "none"
OPTIMIZER, PARAMETERS, ACTIVATIONS = "optimizer", "parameters", "activations"

OFFLOADS = (OPTIMIZER, PARAMETERS, ACTIVATIONS)
"""Values of `offload=`, beside "none"; several are joined by "+", in this order."""


def canonical_offload(text: str) -> str:
    """The value of `offload=` with its parts in the order of `OFFLOADS`.

    Args:
      text: such as "optimizer+activations", or "none".

    Raises:
      LayoutError: a part that does not exist or is given twice.
    """
    if text == NONE:
        return text
    parts = text.split("+")
    for part in parts:
        if part not in OFFLOADS:
            known = nearest(shown(part), (NONE, *OFFLOADS))
            raise LayoutError(
                f"offload={shown(text)}: {shown(part)!r} ({known}); join several by +"
            )
        if parts.count(part) > 1:
            raise LayoutError(f"offload={text} gives {part} twice; give it once")
    return "+".join(part for part in OFFLOADS if part in parts)


def offloaded_parts(text: str) -> frozenset[str]:
    """The parts that a canonical value of `offload=` names."""
    return frozenset(() if text == NONE else text.split("+"))
