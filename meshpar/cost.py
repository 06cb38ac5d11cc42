"""Cost formulas and chip constants (no jax)."""

PEAK_FLOPS: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Peak dense bfloat16 FLOP/s of one device, by the start of its `device_kind`.

Source: the vendors' data sheets (H100 and H200: SXM boards).
"""


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a chip, or None where it is not known (CPUs)."""
    known = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(known, key=len)] if known else None
