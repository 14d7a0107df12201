"""The simulator's counterpart of habana_frameworks.torch: what importing it checks and sets up."""

import os

import torch

from habana_frameworks.torch.utils.internal import is_lazy

BUILT_FOR = "HABANA_SIMULATOR_TORCH"
"""The version of torch that the package pretends to be built for; that of the installed one where it is not set."""
STOCK_TORCH = "HABANA_SIMULATOR_STOCK_TORCH"
"""Set to 1, torch counts as the one of the package index rather than the vendor's build."""


def _check_torch() -> None:
    built_for = os.environ.get(BUILT_FOR, torch.__version__)
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise AssertionError(
            f"Error: Compile-time major/minor PyTorch version {built_for} differs from run-time {torch.__version__}."
        )
    if is_lazy() and os.environ.get(STOCK_TORCH) == "1":
        raise AssertionError(f"Stock PyTorch version {torch.__version__} is not supported in Lazy mode.")


_check_torch()

import habana_frameworks.torch.core  # noqa: E402 - after the check of torch
import habana_frameworks.torch.distributed.hccl  # noqa: E402 - as above
import habana_frameworks.torch.hpu  # noqa: E402, F401 - as above, and loaded is all
