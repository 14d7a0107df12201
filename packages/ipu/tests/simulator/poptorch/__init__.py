"""A simulator of Graphcore's poptorch on the CPU, as strict as the hardware; see packages/ipu/tests/simulator.

The API is that of graphcore/poptorch, python/__init__.py (3.3).  ``POPTORCH_SIMULATED_IPUS`` is the number of IPUs.
"""

from __future__ import annotations

import copy

from . import optim
from .dataloader import DataLoader
from .errors import Error, poptorch_error
from .executor import PoplarExecutor
from .hardware import counts, num_ipus
from .ops import BeginBlock, Block, identity_loss, isRunningOnIpu
from .options import (
    AutoStage,
    ConnectionType,
    Options,
    OutputMode,
    PipelinedExecution,
    ReductionType,
    ShardedExecution,
    Stage,
)

__all__ = [
    "AutoStage",
    "BeginBlock",
    "Block",
    "ConnectionType",
    "DataLoader",
    "Error",
    "Options",
    "OutputMode",
    "PipelinedExecution",
    "PoplarExecutor",
    "ReductionType",
    "ShardedExecution",
    "Stage",
    "counts",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "optim",
    "setLogLevel",
    "trainingModel",
]
__version__ = "3.3.0+simulator"


def trainingModel(model, options=None, optimizer=None):
    """Wrap a model that returns its loss; the optimizer steps inside of each call."""
    if isinstance(model, PoplarExecutor):
        model = model.model
    if hasattr(type(model), "_simulated_parent"):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. "
            "Call model.destroy() on the model to unwrap before wrapping again."
        )
    return PoplarExecutor(copy.copy(model), options, training=True, optimizer=optimizer, user_model=model)


def inferenceModel(model, options=None):
    """Wrap a shallow copy of a model, which shares its parameters with the original."""
    if isinstance(model, PoplarExecutor):
        model = model.model
    return PoplarExecutor(copy.copy(model), options, training=False)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether there are so many IPUs, in use or not."""
    from .hardware import num_ipus as present

    return num_ipus <= present()


def ipuHardwareVersion() -> int:
    """Return the generation of the IPUs."""
    if num_ipus() == 0:
        raise poptorch_error("No IPU hardware available")
    return 2


def setLogLevel(level) -> None:
    """Accept a level; the simulator logs nothing."""
