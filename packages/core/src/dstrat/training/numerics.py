"""Settings of torch that hold during a run, and are put back at its end."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS has no deterministic algorithm: torch's note on reproducibility


@contextmanager
def numerics(*, deterministic: bool | Literal["warn"] | None, benchmark: bool | None) -> Iterator[None]:
    """In this context operations are deterministic, and cuDNN searches for its fastest algorithms, as asked.

    Args:
        deterministic: Whether an operation without a deterministic implementation is an error, or warns; None leaves
            torch's setting.
        benchmark: Whether cuDNN searches; None leaves torch's setting.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    had_benchmark = torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.backends.cudnn.benchmark = had_benchmark
