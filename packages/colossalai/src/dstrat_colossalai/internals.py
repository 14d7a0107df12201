"""Colossal-AI's booster and plugins, imported without their warnings; written for Colossal-AI 0.5.0."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import TYPE_CHECKING, Any

# It imports bitsandbytes, which logs on the CPU that it found none of its kernels; nothing here uses them.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# It imports what torch and transformers have deprecated since, and users cannot change that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from colossalai.accelerator import set_accelerator
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
    from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
    from colossalai.interface import OptimizerWrapper
    from colossalai.nn.optimizer import CPUAdam, FusedAdam, HybridAdam

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = [
    "GEMINI_OPTIMIZERS",
    "Booster",
    "GeminiPlugin",
    "LowLevelZeroPlugin",
    "PlainDDPPlugin",
    "TorchFSDPPlugin",
    "check_reduced",
    "set_accelerator",
]

_DDP_ARGUMENTS = inspect.signature(TorchDDPPlugin).parameters

GEMINI_OPTIMIZERS = (HybridAdam, CPUAdam, FusedAdam)
"""Optimizers whose steps Gemini can take on chunks."""


def check_reduced(model: Any) -> None:
    """Raise RuntimeError unless the last backward pass of a boosted DistributedDataParallel has reduced all gradients.

    torch 2.9 to 2.13 have no public name for this check, which their DistributedDataParallel offers to wrappers.
    """
    model.module._check_reducer_finalized()  # noqa: SLF001


class PlainDDPPlugin(TorchDDPPlugin):  # type: ignore[misc]  # Colossal-AI has no types that mypy sees
    """Colossal-AI's plugin of DistributedDataParallel, which leaves layers of batch norm as they are.

    The original converts them in the user's module for good, to layers that cannot train on the CPU.
    """

    def configure(
        self,
        model: Module,
        optimizer: Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, ...]:
        """Return the wrapped module and optimizer, and the other arguments."""
        # Colossal-AI passes torch all of them, also those that torch has deprecated.
        changed = {name: value for name, value in self.ddp_kwargs.items() if value != _DDP_ARGUMENTS[name].default}
        wrapped = TorchDDPModel(model, **changed)
        if self.fp8_communication:
            from colossalai.quantization.fp8 import fp8_compress_ddp_grad_comm_hook_async

            wrapped.module.register_comm_hook(None, fp8_compress_ddp_grad_comm_hook_async)
        return wrapped, optimizer and OptimizerWrapper(optimizer), criterion, dataloader, lr_scheduler
