"""Peak speed of common GPUs in floating-point operations per second."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_TERA: Mapping[str, Mapping[str, float]] = {
    "H200 NVL": {},  # slower than the H200 below, by how much is not checked
    "H200": {"16": 989.4, "tf32": 494.7, "32": 66.9},
    "H100 PCIe": {"16": 756, "tf32": 378, "32": 51},
    "H100 NVL": {},  # likewise
    "H100": {"16": 989.4, "tf32": 494.7, "32": 66.9},
    "A100": {"16": 312, "tf32": 156, "32": 19.5},
    "A40": {"16": 149.7, "tf32": 74.8, "32": 37.4},
    "A10": {"16": 125, "tf32": 62.5, "32": 31.2},
    "L40S": {"16": 362, "tf32": 183, "32": 91.6},
    "L4": {"16": 121, "tf32": 60, "32": 30.3},
    "V100-SXM2": {"float16": 125, "32": 15.7},
    "V100-PCIE": {"float16": 112, "32": 14},
    "T4": {"float16": 65, "32": 8.1},
    "RTX 3090": {"16": 71, "tf32": 35.6, "32": 35.6},
}


def peak_flops(device_name: str, dtype: torch.dtype, *, allows_tf32: bool) -> float | None:
    """Return the most operations per second that a GPU can do in matrix products, None where it is not in the table.

    The figures are those of dense matrices in NVIDIA's data sheets (which print the doubled ones for sparse matrices
    since the A100; the RTX 3090's are from the whitepaper of Ampere GA102, with accumulation in float32), and of the
    full clock: a card that is limited in power does not reach them.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: In which matrix products are computed: float16, bfloat16 or float32.
        allows_tf32: Whether torch may compute those of float32 in TensorFloat-32.
    """
    speeds = next((speeds for part, speeds in _TERA.items() if _names(device_name, part)), {})
    for kind in _kinds(str(dtype).removeprefix("torch."), allows_tf32=allows_tf32):
        if kind in speeds:
            return speeds[kind] * 1e12
    return None


def _kinds(dtype: str, *, allows_tf32: bool) -> list[str]:
    """Return the columns that serve a dtype, the fastest first."""
    if dtype == "float32":
        return ["tf32", "32"] if allows_tf32 else ["32"]
    return [dtype, "16"] if dtype in ("float16", "bfloat16") else []


def _names(device_name: str, part: str) -> bool:
    """Return whether a device is of a model: an A10G is no A10, an RTX 3090 Ti no RTX 3090, a MIG slice no H100."""
    name, part = f" {device_name.lower()} ", f" {part.lower()}"
    if part.startswith(" rtx"):
        return name.endswith(f"{part} ")
    return " mig " not in name and (f"{part} " in name or f"{part}-" in name)
