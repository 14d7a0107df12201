"""Checks of a module: shapes, dtypes and optimizers that can be sharded, and the same use on all ranks."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in_objects
from dstrat.parallel.optimizer_checks import find_coupling, how_division_fails
from dstrat.parallel.shards import local_tensor
from dstrat_fsdp import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer


_logger = logging.getLogger(__name__)


def refuse_copy(_memo: Any) -> Any:
    """Raise an error for a ``deepcopy`` of a module that is sharded."""
    raise MisuseError(
        "a module cannot be copied while it is sharded: for an average of its weights (EMA) take EMAWeightAveraging of "
        "dstrat.callbacks, or in a loop of yours keep [p.detach().clone() for p in module.parameters()], which are the "
        "shards of this rank; for other copies, copy it before it is set up"
    )


_GRADIENTS_IN_STEP = (
    "a step computes gradients within its forward pass (torch.autograd.grad, as for forces or gradient penalties), "
    "which frees blocks that the backward pass of the loss needs again: call torch.autograd.grad in the forward of a "
    "layer, not in the step, and shard that layer as one block, for a class Net with auto_wrap_policy={Net}; the class "
    "of the trained module itself gathers all parameters for a full step, and the step may compute gradients"
)


class OutputGuard:
    """Prepares the outputs of a block for the backward pass.

    Those that are views of other tensors are copied: torch gathers a block for its backward pass by a hook on its
    outputs, and an in-place operation on a view drops that hook.  Tensors in the attributes of an object, such as a
    distribution, get that hook here, as torch looks in collections only.  A backward pass that is differentiated itself
    (``create_graph=True``) is refused, as torch frees what it has saved of the block, and then reads that.

    Args:
        block: A block that is not sharded yet.
        name: Its name in the user's module, for the log.
    """

    def __init__(self, block: Module, name: str) -> None:
        self._name = name
        self._has_logged = False
        self._handle = block.register_forward_hook(untraced(self._after_forward))

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _after_forward(self, block: Any, _args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():  # there is no backward pass to gather for
            return output
        for tensor in tensors_in_objects(output):
            if tensor.grad_fn is not None and self._has_computed(block, tensor):
                tensor.register_hook(_refuse_graph)
                internals.gather_for_gradient(block, tensor)
                _SOURCES[tensor] = block, internals.version_of(tensor)
        return apply_to_tensors(output, self._prepare)

    def _has_computed(self, block: Module, tensor: Tensor) -> bool:
        """Return whether a block has computed a tensor in its output, or changed it in place, itself or by one in it.

        An object may pass from block to block with the tensors of all of them, such as a cache.
        """
        source, version = _SOURCES.get(tensor, (None, None))
        if version != internals.version_of(tensor):
            return True
        return source is not block and any(source is layer for layer in block.modules())

    def _prepare(self, tensor: Tensor) -> Tensor:
        tensor = self._copy_view(tensor)
        if tensor.grad_fn is not None:  # a leaf, such as a parameter, would get another hook in each step
            tensor.register_hook(_refuse_graph)
        return tensor

    def _copy_view(self, tensor: Tensor) -> Tensor:
        if not (internals.is_view(tensor) and tensor.requires_grad):
            return tensor
        # Not tensor.clone(): a subclass's own may read attributes, which the results of torch's operations lack.
        copied = torch.Tensor.clone(tensor)
        if internals.is_view(copied):  # torch makes the subclass by a view, and warns of in-place operations itself
            return tensor
        if not self._has_logged:
            self._has_logged = True
            _logger.info(
                "block %r returns a view, which is copied in each step; returning a new tensor saves that", self._name
            )
        return copied


# The block that has returned a tensor in an object, and the tensor's version then.
_SOURCES = WeakTensorKeyDictionary()


def _refuse_graph(_gradient: Tensor) -> None:
    """Raise an error in a backward pass that is differentiated itself."""
    if torch.is_grad_enabled():
        raise MisuseError(_GRADIENTS_IN_STEP)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that the compiler leaves alone where the block, or a layer around it, is compiled."""
    untraced: Callable[..., Any] = torch.compiler.disable(hook)
    return untraced


# Restrictions of torch's ``fully_shard``


def check_split_shapes(module: Module) -> None:
    """Check that each parameter of split layers has a dimension to shard.

    Raises:
        MisuseError: One is a scalar.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and isinstance(parameter, DTensor):
            raise MisuseError(
                f"parameter {name!r} is a scalar in a layer that is split over ranks, which cannot be sharded too: "
                "give it the shape (1,)"
            )


def check_same_use(module: Module, blocks: Sequence[str], mesh: DeviceMesh, number: int) -> None:
    """Check that ranks have computed the same blocks in the same order, and have the same gradients; collective.

    A block is gathered by all ranks of its shards together, and gradients of it are reduced in one message: if a rank
    computes another one, as its data decides, each gets a part of the other's, without an error.

    Args:
        module: The sharded module, with reduced gradients.
        blocks: Names of the blocks that this rank has computed, in their order.
        mesh: The ranks over which parameters are sharded, and reduced.
        number: Number of the step, from 1.

    Raises:
        MisuseError: They have not; on all ranks of the mesh.
    """
    trained = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    digest = crc32(repr((blocks, trained)).encode())
    bounds = torch.tensor([digest, -digest], device=internals.device_of(mesh))
    for dimension in range(mesh.ndim):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.get_group(dimension))
    highest, lowest = bounds.tolist()
    if highest == -lowest:
        return
    raise MisuseError(
        f"in step {number} ranks have computed other blocks, or the same ones in another order, or have gradients of "
        f"other parameters ({_difference(blocks, trained, mesh)}): their shards would be mixed up. Let each rank "
        "compute all of them, and multiply by zero what does not count, or use a strategy with whole weights, such as "
        "'ddp_find_unused_parameters_true'"
    )


def _difference(blocks: Sequence[str], trained: Sequence[str], mesh: DeviceMesh) -> str:
    """Return what one of the ranks of a mesh has used and another one has not, in words; collective."""
    of_ranks = [(list(blocks), list(trained))]
    for dimension in range(mesh.ndim):
        gathered: list[Any] = [None] * mesh.size(dimension)
        dist.all_gather_object(gathered, of_ranks, mesh.get_group(dimension))
        of_ranks = [one for ranks in gathered for one in ranks]
    for index in range(2):
        names = dict.fromkeys(name for one in of_ranks for name in one[index])
        for name in names:
            count = sum(name in one[index] for one in of_ranks)
            if count < len(of_ranks):
                return f"{name!r} on {count} of {len(of_ranks)} ranks"
    return f"this one has computed {', '.join(map(repr, blocks))}"


@torch.no_grad()
def check_replicas(module: Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh, number: int) -> None:
    """Check that the ranks of split layers have the same gradients of all other parameters; collective.

    A rank that computes such a parameter's gradient from its part of the features has a summand of it.  That is not
    known before, as split layers give plain tensors to the layers between them.  Ranks that draw other random numbers
    in a layer, such as for dropout, have other gradients from some step on.

    Args:
        module: The sharded module, with reduced gradients.
        mesh: The ranks over which parameters that are not split are sharded.
        tensor_mesh: The ranks over which layers are split.
        number: Number of the step, from 1.

    Raises:
        MisuseError: A gradient differs; on all ranks of both meshes.
    """
    replicas = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and isinstance(parameter, DTensor) and parameter.device_mesh == mesh
    }
    if not replicas:
        return
    # Without a gradient zeros, so that all ranks send as many numbers.
    shards = [torch.zeros(1, device=p.device) if p.grad is None else local_tensor(p.grad) for p in replicas.values()]
    sums = torch.stack([shard.sum(dtype=torch.float32) for shard in shards])
    norms = torch.stack([torch.linalg.vector_norm(shard.float()) for shard in shards])
    bounds = torch.stack([sums, -sums, norms])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, tensor_mesh.get_group())
    highest, lowest, norms = bounds[0], -bounds[1], bounds[2]
    # Replicas differ by rounding where a kernel adds up in any order; a gradient that is nothing else is small.
    differs = (highest - lowest > 0.01 * norms.clamp(min=0.1 * norms.max())).float()
    for dimension in range(mesh.ndim):  # ranks with other shards raise the same error
        dist.all_reduce(differs, dist.ReduceOp.MAX, mesh.get_group(dimension))
    for name, is_different in zip(replicas, differs.tolist(), strict=True):
        if is_different and number > 1:
            raise MisuseError(
                f"the gradient of parameter {name!r} differs in step {number} between the {tensor_mesh.size()} ranks "
                "that share a batch: they have drawn other random numbers in a layer, such as for dropout, as some of "
                "them had drawn more before, such as in a hook of rank 0. Let that draw from a generator of its own"
            )
        if is_different:
            raise MisuseError(
                f"the gradient of parameter {name!r} differs between the {tensor_mesh.size()} ranks that share a "
                "batch, and so would its replicas: it is used where each rank has a part of the features. Use it on "
                "whole features, outside of the split layers, or let DTensors sum its gradient: "
                "DTensor.from_local(parameter, mesh, [Replicate()]).to_local(grad_placements=[Partial()]) in the "
                "forward, with the mesh of parallelize_module"
            )


def check_hooks(module: Module, strategy: str) -> None:
    """Check that no parameter that is going to be sharded has hooks on its gradient, which its shard would not have.

    Args:
        module: The module to be trained, which may have sharded some layers itself.
        strategy: Name of the strategy.

    Raises:
        MisuseError: One has.
    """
    in_units = {id(p) for unit in module.modules() if isinstance(unit, FSDPModule) for p in unit.parameters()}
    for name, parameter in module.named_parameters():
        # Of shards, torch calls those of one kind.
        if internals.has_gradient_hooks(parameter, after_accumulation=id(parameter) not in in_units):
            raise MisuseError(
                f"parameter {name!r} has a hook on its gradient (register_hook), and {strategy} computes gradients of "
                "shards, for which it is not called: change gradients in on_before_optimizer_step, which has this "
                "rank's shards, or choose a strategy that does not shard parameters, such as 'ddp'"
            )


def check_gradients(module: Module, strategy: str) -> None:
    """Check that no layer has sparse gradients, and that each trained parameter has elements.

    Args:
        module: The module to be trained.
        strategy: Name of the strategy.

    Raises:
        MisuseError: An embedding has sparse gradients, or a parameter has no elements.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.numel():
            raise MisuseError(
                f"parameter {name!r} has no elements, and {strategy} cannot reduce its gradient: freeze it, make it a "
                "buffer, or choose a strategy that does not shard parameters"
            )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise MisuseError(
                f"the embedding {name!r} has sparse=True, and {strategy} has no sparse gradients: leave "
                "sparse=True out, or choose a strategy that does not shard parameters"
            )


def check_dtypes(units: Sequence[FSDPModule], module: Module) -> None:
    """Check that the trained parameters of each unit have the same dtype.

    Args:
        units: The units of the module.
        module: The sharded module, for the names.

    Raises:
        MisuseError: Dtypes of a unit differ.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for unit in units:
        first = None
        for param in internals.fsdp_params([unit]):
            shard = param.sharded_param
            if not shard.requires_grad:
                continue
            first = shard if first is None else first
            if shard.dtype != first.dtype:
                raise MisuseError(
                    f"parameters {names[id(first)]!r} of {first.dtype} and {names[id(shard)]!r} of {shard.dtype} are "
                    "gathered together, which takes one dtype: convert one of them, or shard the layer by itself "
                    "(auto_wrap_policy, or fully_shard in configure_model)"
                )


def check_steps_shards(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Check that optimizers give the same results with sharded parameters; collective.

    Args:
        optimizers: Optimizers of a sharded module.
        strategy: Name of the strategy.

    Raises:
        MisuseError: One needs full parameters, or operations that torch does not have for shards.
    """
    for optimizer in optimizers:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        sharded = next((p for p in parameters if isinstance(p, DTensor) and p.dim()), None)
        if sharded is None or getattr(optimizer, "steps_shards", False):
            continue
        if isinstance(optimizer, torch.optim.LBFGS):  # in whose step ranks would wait
            reason = _reason_of_class(optimizer)
        else:
            reason = how_division_fails(optimizer, sharded.device, partial(_sharded_as, sharded))
        if reason is not None:
            raise _sharded_step_error(optimizer, strategy, reason)


def check_optimizer_classes(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Check that optimizers are none of torch's that need full parameters, before there are ranks.

    Raises:
        MisuseError: One is.
    """
    for optimizer in optimizers:
        reason = None if getattr(optimizer, "steps_shards", False) else _reason_of_class(optimizer)
        if reason is not None:
            raise _sharded_step_error(optimizer, strategy, reason)


def _reason_of_class(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it joins all of them in one vector"
    if isinstance(optimizer, torch.optim.Muon):
        return "it multiplies whole matrices"
    return None


def _sharded_step_error(optimizer: Optimizer, strategy: str, reason: str) -> MisuseError:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Muon):
        other = "dstrat.Muon"
    elif find_coupling(optimizer) is None:
        other = f"dstrat.GatheredOptimizer({name}, ...), which steps full parameters"
    else:
        other = "another optimizer, such as torch.optim.AdamW"
    return MisuseError(
        f"{name} cannot step parameters as {strategy} shards them ({reason}): take {other}"
        ", or a strategy that does not shard parameters"
    )


def _sharded_as(sharded: DTensor, tensor: Tensor) -> list[Tensor]:
    """Return a matrix that all ranks have as a DTensor, sharded by rows over the same mesh dimensions; collective."""
    placements = [placement if placement.is_replicate() else Shard(0) for placement in sharded.placements]
    return [distribute_tensor(tensor.clone(), sharded.device_mesh, placements)]


@contextmanager
def explain_shards() -> Iterator[None]:
    """Replace torch's errors for computing with sharded or freed parameters by ones that name the cause.

    Raises:
        MisuseError: The ``with`` block computed with sharded or freed parameters.
    """
    try:
        yield
    except RuntimeError as error:
        if "setStorage" in str(error) and "storage of size 0" in str(error):
            raise MisuseError(
                f"{_GRADIENTS_IN_STEP}. Or the loss depends on a tensor that a block keeps (self.features = x) and "
                f"does not return, so that the block is not gathered for its gradient: return it. Torch says: {error}"
            ) from error
        if "appears to not have been used in the graph" in str(error):
            raise MisuseError(
                "a step computes gradients of tensors that its forward pass did not use. If they are parameters of the "
                "module (MAML), blocks have computed with gathered copies of them: compute the gradients in the "
                "forward of a layer that contains the block, and shard that layer as one block, for a class Net, which "
                f"may be that of the trained module, with auto_wrap_policy={{Net}}. Torch says: {error}"
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        if "nll_loss_backward" in str(error):
            raise MisuseError(
                "a loss was computed in torch's loss_parallel(), and its backward pass is outside of that context: "
                "define backward(self, loss) in the module, which calls loss.backward() within it. Torch says: "
                f"{error}"
            ) from error
        raise MisuseError(
            "a step computes with the parameters of a block outside of the block's forward, where they are sharded (a "
            "norm of self.parameters() in the loss, another method of the block than forward, block.forward(x) in "
            "place of block(x)): compute that in a forward, or choose other blocks with auto_wrap_policy. An "
            "input that zeros_like has made of a parameter, or new_zeros in its shape, is sharded too: make it by "
            f"torch.zeros(..., device=parameter.device). Torch says: {error}"
        ) from error
