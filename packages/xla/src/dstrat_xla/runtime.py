"""Adapter to torch_xla 2.9: all uses of its private names, and queries that must not start its runtime."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dstrat.errors import DeviceError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter

T = TypeVar("T")

PJRT_DEVICE = "PJRT_DEVICE"
_DEBUG = "PT_XLA_DEBUG"
_GOOGLE = "0x1ae0"  # as the PCI vendor of TPUs, and of Google's network cards

_log = logging.getLogger(__name__)


def torch_xla() -> Any:
    """Return the module torch_xla, which is imported on first use.

    Raises:
        DeviceError: It cannot be loaded.
    """
    root, handlers = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        module = importlib.import_module("torch_xla")
        importlib.import_module("torch_xla.runtime")
    except Exception as error:  # a library of another version may raise any error
        raise DeviceError(
            f"torch_xla cannot be loaded with torch {torch.__version__} ({type(error).__name__}: {error}): install "
            "versions that fit each other, such as: pip install 'torch==2.9.*' 'torch_xla==2.9.*'"
        ) from error
    finally:  # its import calls logging.basicConfig, whose handler would print all log lines twice
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
    return module


def xla_model() -> Any:
    """Return the module of collectives and the state of devices."""
    torch_xla()
    return importlib.import_module("torch_xla.core.xla_model")


def world_size() -> int:
    """Return the number of processes whose devices take part in collectives; this starts the runtime."""
    torch_xla()
    return int(importlib.import_module("torch_xla.runtime").world_size())


def pjrt_device(environ: Mapping[str, str] = os.environ) -> str:
    """Return the type of device that the runtime drives: ``"CPU"``, ``"TPU"``, ``"NEURON"`` ..."""
    if not environ.get(PJRT_DEVICE):
        torch_xla()  # its import selects one, and sets the variable
    return environ.get(PJRT_DEVICE, "CPU").partition("_")[0].upper()


def may_have_tpu() -> bool:
    """Return whether this machine may have a TPU, without importing torch_xla."""
    # Automatic choice asks on every machine, and importing torch_xla takes seconds.
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text(encoding="ascii").strip() == _GOOGLE for vendor in vendors)


def num_tpus() -> int:
    """Return the number of TPU devices of this machine, without starting the runtime."""
    if not may_have_tpu():
        return 0
    torch_xla()
    tpu = importlib.import_module("torch_xla._internal.tpu")
    return int(tpu.num_available_devices()) if tpu.num_available_chips() else 0


def num_devices() -> int:
    """Return the number of devices of this machine that the runtime drives, without starting it."""
    kind = pjrt_device()
    if kind == "TPU":
        return num_tpus()
    # In the parent of a job nothing may start the runtime: it would hold the devices that the ranks need.
    if kind == "CPU":
        return int(os.environ.get("CPU_NUM_DEVICES", "1"))
    if kind == "NEURON":
        torch_xla()
        return int(importlib.import_module("torch_xla._internal.neuron").num_local_processes())
    return len(torch_xla().devices())  # of other types nothing is known without starting it


def devices_per_process() -> int:
    """Return the number of devices that a process has where several share a machine, without starting the runtime."""
    if pjrt_device() != "TPU":
        return 1
    torch_xla()
    return int(importlib.import_module("torch_xla._internal.tpu").num_logical_cores_per_chip())


def start_in_rank(local_rank: int, num_processes: int) -> None:
    """Start the runtime in one of several processes of this machine, each with one device.

    Args:
        local_rank: Rank on this machine.
        num_processes: Processes on this machine.
    """
    torch_xla()
    importlib.import_module("torch_xla._internal.pjrt").initialize_multiprocess(local_rank, num_processes)


def check_autograd() -> None:
    """Check that torch computes gradients on XLA devices in this process.

    torch's autograd creates one thread for each device in the first backward pass, and none for later devices.

    Raises:
        DeviceError: A backward pass came before the runtime started.
    """
    try:
        torch.ones((), device="xla", requires_grad=True).backward()  # recorded, and dropped
    except RuntimeError as error:
        raise DeviceError(
            "torch cannot compute gradients on XLA devices in this process, as a backward pass ran before XLA's "
            "runtime started: call torch_xla.device() before the first backward pass, or train on XLA first"
        ) from error


def report_compilations() -> None:
    """Enable torch_xla's report of compilations and slow operations of this process, on stderr."""
    os.environ[_DEBUG] = "1"  # read when torch_xla is first imported, and at each cut


def send(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of host tensors on a device; the transfer begins now, not when a graph needs them."""
    return list(xla_model().send_cpu_data_to_device(tensors, device)) if tensors else []


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on the host, those of XLA devices by one transfer."""
    on_device, native = [tensor for tensor in tensors if tensor.device.type == "xla"], torch_xla()._XLAC
    if on_device:
        # Computes recorded tensors now and keeps them, or the next graph would compute them again.
        native._xla_sync_multi(on_device, devices=[], wait=False, sync_xla_data=True)  # as xm.save does
    copies = iter(native._xla_get_cpu_tensors(on_device) if on_device else ())
    return [next(copies) if tensor.device.type == "xla" else tensor.cpu() for tensor in tensors]


def state_on_host(state: T) -> T:
    """Return a nested state with its tensors on the host, copied from the device in one transfer."""
    tensors = {id(tensor): tensor for tensor in tensors_in(state)}
    copies = dict(zip(tensors, fetch([tensor.detach() for tensor in tensors.values()]), strict=True))
    return apply_to_tensors(state, lambda tensor: copies[id(tensor)])  # type: ignore[no-any-return]  # of the same types


def cut() -> None:
    """Run the recorded operations on the device, without waiting for them."""
    torch_xla().sync()


def settle() -> None:
    """Run the recorded operations on the device, and wait for them, without an effect on random numbers.

    A cut begins another sequence of random numbers, so reading the state with it would change the training.
    """
    native = torch_xla()._XLAC  # it has no other name
    native._xla_sync_live_tensors(native._xla_get_default_device(), [], wait=True)


# Modules that torch_xla's first FullyShardedDataParallel has wrapped

FSDP_PREFIXES = ("_fsdp_wrapped_module.", "_fpw_module.")
"""What the wrappers of a layer put before the names of its parameters."""


def take_shards(wrapper: Any) -> Iterator[tuple[Module, str, Parameter, torch.Size]]:
    """Remove the shards from a wrapper's own parameters; yield the layer, name, shard and full size of each."""
    for (_, layer, name), shard in zip(wrapper.full_param_infos, wrapper.sharded_params, strict=True):
        wrapper._parameters.pop(shard._name)  # a flat name that torch_xla has made
        yield layer, name, shard, shard._orig_size  # the shard is flat, and padded


def remove_patches(layer: Module) -> None:
    """Remove the methods that torch_xla's wrapper and activation checkpointing have set on a layer itself."""
    for patch in (
        "_nn_linear_forward_original",
        "_xla_checkpointed_forward_original",
        "_xla_checkpointed_forward_no_kwargs",
    ):
        if layer.__dict__.pop(patch, None) is not None:
            layer.__dict__.pop("forward", None)  # torch_xla's, in front of the class's


# SPMD mode: one process with a virtual device for all devices


def check_spmd(count: int) -> None:
    """Check that a mesh of a number of devices is possible, without starting the runtime.

    Raises:
        DeviceError: The runtime has another number of devices.
    """
    is_cpu = pjrt_device() == "CPU"
    if is_cpu and "CPU_NUM_DEVICES" not in os.environ and not is_started():
        return  # start_spmd makes as many
    present = len(torch_xla().real_devices()) if is_started() else num_devices()
    if present != count:
        hint = "set CPU_NUM_DEVICES before the program starts" if is_cpu else "hide devices with TPU_VISIBLE_CHIPS"
        raise DeviceError(
            f"strategy 'xla_spmd' drives all {present} devices of XLA's runtime, and devices={count} is "
            f"requested: choose devices={present}, or {hint}"
        )


def start_spmd(count: int) -> None:
    """Start the runtime in SPMD mode; on the CPU with that number of virtual devices."""
    module = torch_xla()
    xla_runtime = importlib.import_module("torch_xla.runtime")
    if pjrt_device() == "CPU" and not is_started():
        os.environ["CPU_NUM_DEVICES"] = str(count)  # read when the runtime starts
    if not xla_runtime.is_spmd():
        with warnings.catch_warnings():  # it warns about existing tensors, which are replicated
            warnings.simplefilter("ignore")
            xla_runtime.use_spmd()
    xla_runtime.global_runtime_device_count()  # starts the runtime, which must be before the first backward pass
    module.device()
    check_spmd(count)


def is_started() -> bool:
    """Return whether the runtime has started, after which the number of its devices is fixed."""
    return bool(torch_xla()._XLAC._xla_runtime_is_initialized())  # it has no other name


def sharding_of(tensor: Tensor) -> str:
    """Return XLA's text of a tensor's sharding over the mesh; empty if it has none."""
    return str(torch_xla()._XLAC._get_xla_sharding_spec(tensor))


def shard_like(tensor: Tensor, model: Tensor) -> None:
    """Shard a tensor over the mesh like another one of the same shape."""
    library = torch_xla()._XLAC
    if sharding_of(tensor) != sharding_of(model):
        # torch_xla refuses to mark a tensor that has another sharding.
        library._xla_clear_sharding(tensor)
        library._xla_mark_sharding(tensor, library._get_xla_op_sharding(model))


def keep_together(tensors: list[Tensor]) -> None:
    """Prevent the compiler from moving operations across the point where all tensors are computed."""
    xla_model().optimization_barrier_(tensors)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, joined from its shards if it is sharded over the mesh.

    Its method ``cpu`` would compile a program for each sharded tensor, which gathers it on a device.
    """
    if tensor.device.type != "xla" or not sharding_of(tensor).startswith("{devices"):  # replicated, or not marked
        return tensor.cpu()
    settle()  # shards can be read of computed tensors only
    library = torch_xla()._XLAC  # it has no other name
    shards = library._get_local_shards([tensor])[0]
    replicas = library._get_local_shard_replica_and_indices([tensor])[0]
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (replica, indices) in zip(shards, replicas, strict=True):
        if replica == 0:  # others have the same values
            full[tuple(indices)] = shard[
                tuple(slice(0, dimension.stop - dimension.start) for dimension in indices)
            ]  # unpadded
    return full
