"""Adapter to poptorch 3: its import, its options, and its changes of a module.

Written after graphcore/poptorch (python/__init__.py, python/_poplar_executor.py, python/options.py) of version 3.3.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import DeviceError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

_MOST_IPUS = 4096  # more than a machine has: ends the search where the answer is always yes
_SDK = (
    "dstrat needs torch 2.9 or later, and Graphcore's releases of poptorch load with torch 2.0.1 or older alone, so "
    "that it takes a build of poptorch's source for this torch, and the enable scripts of the Poplar SDK sourced"
)


def poptorch() -> Any:
    """Return the module poptorch, which is imported on first use.

    Raises:
        DeviceError: It is not there, or does not fit this torch.
    """
    try:
        return importlib.import_module("poptorch")
    except ModuleNotFoundError as error:
        if error.name != "poptorch":
            raise DeviceError(f"poptorch cannot be imported ({error}): {_SDK}") from error
        raise DeviceError(f"poptorch is not installed: {_SDK}") from error
    except Exception as error:  # it asserts the version of torch, and loads libraries of the SDK
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(f"poptorch cannot be loaded with torch {torch.__version__} ({reason}): {_SDK}") from error


def num_ipus() -> int:
    """Return the number of IPUs that one process can reserve; poptorch only answers whether a number is available."""
    module, count = poptorch(), 0
    while count < _MOST_IPUS and module.ipuHardwareIsAvailable(max(1, 2 * count)):
        count = max(1, 2 * count)
    return count


def make_options(*, replicas: int, iterations: int, accumulation: int) -> Any:
    """Return options with a result for each batch, and with random numbers seeded from torch's seed."""
    module = poptorch()
    options = module.Options()
    options.replicationFactor(replicas)
    options.deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(module.OutputMode.All)  # training would return the last batch of a call only
    seed, state = torch.initial_seed() % 2**31, torch.get_rng_state()
    options.randomSeed(seed)  # which seeds torch too
    torch.set_rng_state(state)
    if hasattr(options, "relaxOptimizerAttributesChecks"):
        options.relaxOptimizerAttributesChecks(True)  # a scheduler's initial_lr is no mistake
    return options


def output_mode(options: Any) -> str:
    """Return the output mode of options: ``"All"``, ``"Final"`` ..."""
    modes = poptorch().OutputMode
    return "Default" if options.defaultOutputMode() else str(modes(options.output_mode).name)


def check_acquired(error: Exception, num_devices: int) -> None:
    """Raise DeviceError if an error of poptorch says that it could not reserve IPUs."""
    text = str(error)
    if "acquire" in text.lower():
        raise DeviceError(
            f"poptorch could not reserve its IPUs ({text.strip()}): {num_devices} are requested; another program may "
            "use them (gc-monitor shows which), or a model that is divided into blocks needs several for each replica: "
            "give training_opts and inference_opts with a smaller replicationFactor"
        ) from error


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor of torch's own class with the same memory; poptorch changes the classes of parameters."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
        return tensor.detach().as_subclass(torch.Tensor)


def classes_of(module: Module) -> list[tuple[Tensor, type]]:
    """Return the parameters and buffers of a module, each with its class."""
    return [(tensor, type(tensor)) for tensor in (*module.parameters(), *module.buffers())]


def restore_classes(tensors: list[tuple[Tensor, type]]) -> None:
    """Restore the classes that ``trainingModel`` changes; ``destroy`` does so only for models that have run."""
    for tensor, cls in tensors:
        if type(tensor) is not cls:
            tensor.__class__ = cls  # as poptorch has set it


@contextmanager
def acquiring(num_devices: int) -> Iterator[None]:
    """Explain errors about IPUs that are in use, and about losses other than the returned one."""
    try:
        yield
    except RuntimeError as error:  # the base of poptorch.Error
        if "Multiple independent losses" in str(error):
            raise MisuseError(
                "training_step computes one of torch's losses beside the one that it returns, and poptorch takes each "
                "for a final loss: log such a value from plain operations, as (a - b).abs().mean() rather than "
                "l1_loss(a, b)"
            ) from error
        check_acquired(error, num_devices)
        raise
