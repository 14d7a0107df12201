"""Training by one process on a mesh of XLA devices (SPMD)."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import DeviceError, MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.tied_parameters import keep_ties
from dstrat_xla import runtime
from dstrat_xla.lazy import LazySteps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Components, TrainerLike

DATA = "data"
FSDP = "fsdp"


class XLASPMDStrategy(LazySteps, SingleDeviceStrategy):
    """Training by one process that drives all devices of XLA's runtime, as a mesh.

    The module computes with full tensors on one virtual device, and annotations define which dimensions of a tensor are
    sharded over which axes of the mesh.  From these the compiler partitions the graph of a step and adds the
    collectives, so losses are those of one device with the same batches: ``batch_size`` is that of all devices.

    Axes have names.  Batches are sharded over ``"data"`` and ``"fsdp"`` along their first dimension, and parameters,
    with their gradients and optimizer state, over ``"fsdp"`` along their longest (torch_xla's FSDPv2).  Over other axes
    only tensors that ``annotate`` marks are sharded, as for tensor parallelism::

        def annotate(module, mesh):
            for block in module.blocks:
                xs.mark_sharding(block.up.weight, mesh, ("tensor", None))
                xs.mark_sharding(block.down.weight, mesh, (None, "tensor"))

        XLASPMDStrategy(mesh_shape={"data": -1, "tensor": 2}, annotate=annotate)

    SPMD is a mode of the process, which torch_xla cannot leave: other XLA strategies that the process runs afterwards
    replicate their work over all devices.

    Args:
        accelerator: The hardware.
        parallel_devices: All devices of the runtime; the mesh cannot leave any out.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        mesh_shape: Sizes of the axes by their names, the slowest links first; -1 follows from the others.  None is
            ``{"data": -1}``.
        annotate: Called with the module, whose parameters are on the device, and torch_xla's mesh; marks parameters
            with ``torch_xla.distributed.spmd.mark_sharding``.  Those that it leaves alone are treated as without it.
        auto_wrap_policy: Classes of layers, or a function of a module: with an axis ``"fsdp"``, the layers whose
            output is divided as batches are, and whose gradients are reduced when their backward pass is done.  None
            leaves both to the compiler.
        debug: Whether torch_xla reports compilations and slow operations (``PT_XLA_DEBUG``).

    Raises:
        RequestError: The shape of the mesh is none.
    """

    drives_several_devices = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        mesh_shape: Mapping[str, int] | None = None,
        annotate: Callable[[Module, Any], None] | None = None,
        auto_wrap_policy: Collection[type[Module]] | Callable[[Module], bool] | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__(None, accelerator, checkpoint_io, precision_plugin)
        self.add_components(parallel_devices=parallel_devices)
        self.mesh_shape = _checked_shape({DATA: -1} if mesh_shape is None else mesh_shape)
        self.annotate = annotate
        self.auto_wrap_policy = auto_wrap_policy if callable(auto_wrap_policy) else tuple(auto_wrap_policy or ())
        self.debug = debug
        self._mesh: Any = None
        self._hooks: list[RemovableHandle] = []

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        count = len(self._present(self.components.parallel_devices, "devices"))
        self._sizes(count)
        runtime.check_spmd(count)

    @property
    def device_mesh(self) -> Any:
        """torch_xla's mesh of all devices, in a run."""
        if self._mesh is None:
            raise MisuseError(f"{type(self).__name__} has no mesh yet: it is there from configure_model on")
        return self._mesh

    def _sizes(self, num_devices: int) -> dict[str, int]:
        """Return the size of each axis for a number of devices."""
        fixed = math.prod(size for size in self.mesh_shape.values() if size != -1)
        sizes = {name: num_devices // fixed if size == -1 else size for name, size in self.mesh_shape.items()}
        if math.prod(sizes.values()) != num_devices:
            raise DeviceError(
                f"mesh_shape {dict(self.mesh_shape)!r} does not fit {num_devices} devices, of which none can be left "
                "out: let the product of its sizes be that number, or one of them -1"
            )
        return sizes

    # The life cycle

    def setup_environment(self) -> None:
        if self.debug:
            runtime.report_compilations()
        devices = self._present(self.components.parallel_devices, "devices")
        runtime.start_spmd(len(devices))  # before the accelerator starts the runtime, with the devices that it has then
        super().setup_environment()
        sizes = self._sizes(len(devices))
        spmd = _spmd()
        self._mesh = spmd.Mesh(list(range(len(devices))), tuple(sizes.values()), tuple(sizes))
        spmd.set_global_mesh(self._mesh)  # for modules that annotate their activations

    def wrap_model(self, trainer: TrainerLike) -> None:
        super().wrap_model(trainer)
        if self.annotate is not None:
            self.annotate(self.module, self.device_mesh)
        if self.device_mesh.shape().get(FSDP, 1) > 1:
            for parameter in self.module.parameters():
                self._shard(parameter)
            policy = self.auto_wrap_policy
            is_block: Any = policy if callable(policy) else lambda layer: isinstance(layer, policy)
            # As torch_xla's FSDPv2 does with the modules that it wraps.
            self._hooks = [
                layer.register_forward_hook(self._divide_output) for layer in self.module.modules() if is_block(layer)
            ]
        self.mark_step()

    def _shard(self, parameter: Tensor) -> None:
        """Shard a parameter over the axis ``"fsdp"``, along the longest dimension that divides evenly, if any does."""
        size = self.device_mesh.shape()[FSDP]
        shape = list(parameter.shape)
        if runtime.sharding_of(parameter) or not shape or max(shape) < size:
            return
        # A dimension that does not divide is padded by XLA; it is taken where no other does.
        divided = max(range(len(shape)), key=lambda dim: (shape[dim] % size == 0, shape[dim]))
        spec = tuple(FSDP if dim == divided else None for dim in range(len(shape)))
        _spmd().mark_sharding(parameter, self.device_mesh, spec)

    def _divide_output(self, layer: Module, inputs: Any, output: Any) -> None:
        """Shard a layer's output, and make its gradients be reduced before those of the previous layer are computed."""
        apply_to_tensors(output, self._divide)

        def end_backward(gradient: Tensor) -> None:
            gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
            runtime.keep_together([gradient, *gradients])

        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(end_backward)

    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._module is not None and self._mesh is not None:
            self.mark_step()
            with keep_ties(self._module):
                # Not cpu(): see runtime.on_host.
                self._module._apply(self.to_host)  # noqa: SLF001 - what Module.cpu calls
        super().teardown()
        if self._mesh is not None:
            _spmd().set_global_mesh(None)
            self._mesh = None

    # Batches

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return apply_to_tensors(batch, self._divide)

    def _divide(self, tensor: Tensor) -> Tensor:
        """Shard a tensor along its first dimension over the axes that split batches; return the same tensor."""
        axes = tuple(name for name in (DATA, FSDP) if self.device_mesh.shape().get(name, 1) > 1)
        if axes and tensor.dim() and tensor.device.type == "xla" and not runtime.sharding_of(tensor):
            _spmd().mark_sharding(tensor, self.device_mesh, (axes, *(None,) * (tensor.dim() - 1)))
        return tensor

    # State: full tensors on the host; loading creates the same shards again

    def to_host(self, tensor: Tensor) -> Tensor:
        return runtime.on_host(tensor)

    def _on_host(self, state: dict[str, Any]) -> dict[str, Any]:
        runtime.settle()
        return dict(apply_to_tensors(state, self.to_host))

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_sharded_optimizer_state(optimizer, state)
        _shard_like_parameters(optimizer)


def _spmd() -> Any:
    return importlib.import_module("torch_xla.distributed.spmd")


def _shard_like_parameters(optimizer: Optimizer) -> None:
    """Shard the state of each parameter like the parameter, as the compiler does when it creates the state."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device:
                runtime.shard_like(value, parameter)


def _checked_shape(shape: Mapping[str, int]) -> dict[str, int]:
    sizes = dict(shape)
    are_sizes = all(isinstance(size, int) and (size == -1 or size > 0) for size in sizes.values())
    if not sizes or not are_sizes or list(sizes.values()).count(-1) > 1 or not all(isinstance(n, str) for n in sizes):
        raise RequestError(
            f"mesh_shape {sizes!r} is not possible: give sizes of axes by their names, of which one may be -1, such as "
            "{'data': -1, 'fsdp': 4}"
        )
    return sizes
