"""ZeRO stage 3: parameters sharded at creation, and a check that ranks gather the same ones."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import swap_tensors

from dstrat.errors import MisuseError
from dstrat.parallel.layers import is_compiled
from dstrat.parallel.meta_device import reset_method
from dstrat.parallel.optimizer_checks import check_one_dtype
from dstrat_deepspeed import internals
from dstrat_deepspeed.nvme import free_buffers
from dstrat_deepspeed.runtime import environment
from dstrat_deepspeed.unused_parameters import is_same_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter

_logger = logging.getLogger(__name__)


@contextmanager
def sharded_creation(
    deepspeed: Any, config: dict[str, Any], remote_device: str | None, *, device_rank: int
) -> Iterator[None]:
    """Shard the parameters of each layer that is created in a ``with`` block, at the end of its constructor.

    Layers on the meta device follow one by one at the end of the block, with the values of their ``reset_parameters``.

    Args:
        deepspeed: The library.
        config: Its configuration.
        remote_device: Where the shards are; None for the device.
        device_rank: Index of the device in this process.
    """
    # DeepSpeed's context loses what the constructor of a parent does to parameters of its children, such as
    # MultiheadAttention to the bias of its output layer.  So a parameter is gathered when it is looked up again, and is
    # sharded at the end of the block with the values that it has on rank 0.
    init = _initialize(deepspeed, device_rank, config_dict_or_path=config, remote_device=remote_device)
    watch = _CreationWatch(init)
    wrapper = internals.compiled_wrapper()
    with init:
        internals.skip_class(wrapper)
        try:
            yield
            watch.stop()
            watch.shard_again()
            watch.shard_without_memory(init.local_device)
        except BaseException:
            # No collectives: other ranks may still be making layers.  They notice the failure when this rank's process
            # groups close, that is, when nothing refers to them.
            watch.stop()
            watch.release_groups()
            internals.release_groups(init)
            raise
        if not watch.layers and init.param_swapper is not None:
            free_buffers([init.param_swapper])


def shard(deepspeed: Any, module: Module, config: dict[str, Any], *, device_rank: int) -> None:
    """Shard the remaining parameters of a module one by one, with the values of rank 0; collective.

    Args:
        deepspeed: The library.
        module: The module.
        config: DeepSpeed's configuration.
        device_rank: Index of the device in this process.
    """
    # DeepSpeed's engine would do it too, but only after moving the full module to the device.
    sharded: Any = next((parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")), None)
    if sharded is not None:  # another zero.Init would remove the files of the parameters that are sharded already
        sharded.convert_to_zero_parameters(param_list=module.parameters())
        return
    group = internals.secondary_shard_group(deepspeed)
    _initialize(deepspeed, device_rank, module=module, config_dict_or_path=config, zero_param_parallel_group=group)


def _initialize(deepspeed: Any, device_rank: int, **options: Any) -> Any:
    """Return a ``zero.Init`` that computes on a device, whose index it takes from ``LOCAL_RANK``."""
    with environment({"LOCAL_RANK": str(device_rank)}):  # of devices=[2, 3] that would be 0 and 1
        return deepspeed.zero.Init(**options)


class _CreationWatch:
    """Layers that are sharded: their parameters are gathered on look-up, and sharded again at the end."""

    def __init__(self, init: Any) -> None:
        self.layers: list[Module] = []
        self._without_memory: list[Module] = []
        self._gathered: list[Any] = []
        self._shard = internals.replace_sharding(init, self._take)

    def _take(self, layer: Module) -> None:
        """Shard the layer's own parameters, not those of its children, and watch them."""
        if _on_meta(layer):
            self._without_memory.append(layer)
            return
        self._shard(layer)
        if layer._parameters:  # noqa: SLF001 - torch has no hook for the look-up of a parameter
            layer._parameters = _WatchedParameters(layer._parameters, self)  # noqa: SLF001 - the same
            self.layers.append(layer)

    def gather(self, parameter: Any) -> None:
        """Gather a parameter if it is sharded; collective."""
        if parameter is not None and internals.is_partitioned(parameter):
            parameter.all_gather(param_list=[parameter])
            self._gathered.append(parameter)

    def stop(self) -> None:
        """End the watch: look-ups no longer gather."""
        for layer in self.layers:
            if isinstance(layer._parameters, _WatchedParameters):  # noqa: SLF001 - as above
                layer._parameters = layer._parameters.plain()  # noqa: SLF001 - as above

    def release_groups(self) -> None:
        """Remove the parameters' references to the process group; they cannot be used any more."""
        for layer in self.layers:
            for parameter in layer.parameters(recurse=False):
                vars(parameter).pop("ds_process_group", None)

    def shard_again(self) -> None:
        """Shard the gathered parameters again, with the values of rank 0; collective."""
        for parameter in self._gathered:
            if not internals.is_partitioned(parameter):  # DeepSpeed's Module.apply has sharded it already
                dist.broadcast(parameter.data, 0, group=parameter.ds_process_group)
                parameter.partition(param_list=[parameter], has_been_updated=True)
        self._gathered.clear()

    @torch.no_grad()
    def shard_without_memory(self, device: torch.device) -> None:
        """Give memory and values to each layer that has none, and shard it before the next; collective."""
        for layer in self._without_memory:
            tensors = _on_meta(layer)
            if not tensors:  # an earlier layer shares them all
                continue
            reset = reset_method(layer, list(tensors))
            for tensor in tensors.values():
                memory = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                # The same object, which other layers may share.
                swap_tensors(tensor, nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory)
            for parameter in layer.parameters(recurse=False):
                self.gather(parameter)
            reset()
            self._shard(layer)
            self.layers.append(layer)
            self.shard_again()


def _on_meta(layer: Module) -> dict[str, Tensor]:
    """Return a layer's own tensors on the meta device by name, without a look-up that would gather others."""
    parameters: Any = dict.items(layer._parameters)  # noqa: SLF001 - as in _take
    tensors = {**dict(parameters), **dict(layer.named_buffers(recurse=False))}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_meta}


class _WatchedParameters(dict[str, "Parameter | None"]):
    """The parameters of a layer, which are gathered when they are looked up."""

    def __init__(self, parameters: dict[str, Parameter | None], watch: _CreationWatch) -> None:
        super().__init__(parameters)
        self._watch = watch

    def plain(self) -> dict[str, Parameter | None]:
        """Return a plain dict of the parameters."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Parameter | None:
        parameter = super().__getitem__(name)
        self._watch.gather(parameter)
        return parameter

    def items(self) -> Any:
        self.values()
        return super().items()

    def values(self) -> Any:
        for parameter in super().values():
            self._watch.gather(parameter)
        return super().values()


# Layers that stage 3 cannot train as one device does, and parameters that it does not know


def check_layers(module: Module, *, stage: int, world_size: int) -> None:
    """Raise a MisuseError for a module that the stage cannot train.

    It has complex parameters, trained parameters of two dtypes, one without elements, embeddings with sparse gradients,
    or weights that each batch scales (``max_norm``).
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise MisuseError(
                f"parameter {name!r} has the dtype {parameter.dtype}, and DeepSpeed has no complex gradients: make it "
                "of real numbers, torch.view_as_real(...), and use torch.view_as_complex of it in forward; or choose "
                "strategy='ddp'"
            )
        if stage == 3 and not getattr(parameter, "ds_numel", parameter.numel()):
            raise MisuseError(
                f"parameter {name!r} has no elements, which stage 3 of ZeRO cannot gather: make it a buffer, or choose "
                "stage 2"
            )
    if stage > 0:
        check_one_dtype(module, f"stage {stage} of ZeRO")
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.sparse and layer.weight.requires_grad and stage > 0:
            raise MisuseError(
                f"the embedding {name!r} has sparse=True, and stage {stage} of ZeRO has no sparse gradients: leave "
                "sparse=True out, or choose stage 0"
            )
        if layer.max_norm is not None and (stage == 3 or world_size > 1):
            raise MisuseError(
                f"{name} is an {type(layer).__name__} with max_norm={layer.max_norm!r}, which scales its weight in "
                "each forward: ranks would do so for their own batches only, and stage 3 of ZeRO drops it; leave "
                "max_norm out, and scale what the layer returns"
            )


def store_by_rows(module: Module) -> None:
    """Copy parameters with other strides, such as transposed ones, to contiguous memory."""
    # DeepSpeed flattens parameters in the order of their memory, and reads that as row-major.
    strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
    for name in strided:
        parameter = module.get_parameter(name)
        parameter.data = parameter.data.contiguous()
    if strided:
        _logger.info(
            "%s, which had strides of their own, are stored row by row, as DeepSpeed wants", ", ".join(strided)
        )


@contextmanager
def explaining_missing_values(module: Module) -> Iterator[None]:
    """Explain errors of torch and DeepSpeed about parameters without shards, or without values."""
    try:
        yield
    except AttributeError as error:  # DeepSpeed reads ds_... attributes without a check
        if "'Tensor' object has no attribute 'ds_" in str(error):
            raise MisuseError(
                "a layer was called with other tensors as its parameters (torch.func.functional_call), where stage 3 "
                "of ZeRO gathers its own: choose stage 2"
            ) from error
        compiled = [name for name, layer in module.named_modules() if is_compiled(layer)]
        if compiled and "object has no attribute '_in_forward'" in str(error):
            raise MisuseError(
                f"{', '.join(compiled)} was compiled by torch.compile(layer) after the training had begun, in a "
                "wrapper that stage 3 of ZeRO does not know: compile it in place, layer.compile(), or compile layers "
                "before fit or in configure_model"
            ) from error
        if "'Parameter' object has no attribute 'ds_" not in str(error):
            raise
        names = [name for name, parameter in module.named_parameters() if not hasattr(parameter, "ds_id")]
        raise MisuseError(
            f"{', '.join(names) or 'a parameter'} came to the module after the training had begun, and stage 3 of ZeRO "
            "has not sharded it: make layers before fit, or in configure_model"
        ) from error
    except RuntimeError as error:
        if "got [0] but expected shape" not in str(error):
            raise
        raise MisuseError(
            "the loss has a term of parameters themselves, such as parameter.norm(), outside of the forward of their "
            "layer, where stage 3 of ZeRO has no values: compute it in the forward of the layer, let the optimizer "
            "have weight_decay, or choose stage 2"
        ) from error


# Collectives for the same parameters on all ranks

_VERBS = {False: "gathers", True: "reduces gradients of"}
_MAX_EXCHANGES = 10_000
_MAX_NAMES = 4


class CollectiveCheck:
    """A check that all ranks of stage 3 gather and reduce the same parameters in the same order.

    Otherwise a rank would get shards, or gradients, of other parameters without an error.  Each exchange of the first
    pass is compared before it begins, since exchanges of different sizes would hang or crash.  Later the exchanges of
    a pass are compared at its end, before the weights change, where stage 3 waits for the GPU anyway.
    """

    def __init__(self, optimizer: Any, module: Module) -> None:
        self._optimizer = optimizer
        self._module = module
        self._is_first_pass = True
        # An evaluation has no backward pass, after which the exchanges are compared and forgotten.
        self._exchanges: deque[tuple[int, ...]] = deque(maxlen=_MAX_EXCHANGES)
        internals.observe_gathers(optimizer, lambda parameters: self._note(False, parameters))
        internals.observe_reductions(optimizer, lambda parameters: self._note(True, parameters))

    def compare(self) -> None:
        """Raise a MisuseError if the exchanges since the last call were not the same on all ranks; collective."""
        self._compare(tuple(self._exchanges))
        self._exchanges.clear()
        self._is_first_pass = False

    def _note(self, is_reduced: bool, parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        self._exchanges.append((is_reduced, *sorted(parameter.ds_id for parameter in parameters)))
        if self._is_first_pass:
            self._compare((len(self._exchanges), self._exchanges[-1]))

    def _compare(self, values: tuple[Any, ...]) -> None:
        group, device = self._optimizer.dp_process_group, self._optimizer.fp16_groups[0][0].device
        if is_same_on_all_ranks(values, group, device):
            return
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, list(self._exchanges), group=group)
        raise MisuseError(
            "all ranks have to use the same parameters in the same order with stage 3 of ZeRO, and "
            f"{self._difference(by_rank)}: let each rank run all layers in one order, with 0 * layer(x).sum() in its "
            "loss for those that it does not need, or choose stage 2 (strategy='deepspeed_stage_2'), where ranks may "
            "differ"
        )

    def _difference(self, by_rank: list[list[tuple[int, ...]]]) -> str:
        """Describe the first difference of a rank from rank 0."""
        rank, first, other = next(
            (rank, first, other)
            for rank, exchanges in enumerate(by_rank)
            for first, other in zip_longest(by_rank[0], exchanges, fillvalue=())
            if first != other
        )
        return f"rank 0 {self._describe(first, other)} while rank {rank} {self._describe(other, first)}"

    def _describe(self, exchange: tuple[int, ...], other: tuple[int, ...]) -> str:
        """Describe an exchange; if the other one is of the same kind, only with the parameters that the other lacks."""
        if not exchange:
            return "is at the end of its pass"
        is_reduced, *ids = exchange
        if other and other[0] == is_reduced:
            ids = [number for number in ids if number not in other[1:]]
        known = {getattr(parameter, "ds_id", None): name for name, parameter in self._module.named_parameters()}
        names = [known.get(number, "a parameter") for number in ids] or ["nothing else"]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"{_VERBS[bool(is_reduced)]} {', '.join(names[:_MAX_NAMES])}{more}"


def collective_check(optimizer: Any, module: Module) -> CollectiveCheck | None:
    """Return the check of stage 3's exchanges; None for other stages, and for one rank."""
    if not hasattr(optimizer, "parameter_offload") or dist.get_world_size(optimizer.dp_process_group) == 1:
        return None
    return CollectiveCheck(optimizer, module)
