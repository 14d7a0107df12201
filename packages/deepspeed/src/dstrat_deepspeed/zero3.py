"""ZeRO stage 3: shards of parameters, from their creation on."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode

from dstrat.errors import MisuseError
from dstrat_deepspeed.groups import is_same_on_all_ranks, release_groups
from dstrat_deepspeed.nvme import free_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module, Parameter


@contextmanager
def sharded_creation(deepspeed: Any, config: dict[str, Any], remote_device: str | None) -> Iterator[None]:
    """Shard the parameters of each layer that is created in a ``with`` block, at the end of its constructor.

    DeepSpeed's own context loses what the constructor of a parent does to parameters of its children, such as
    ``MultiheadAttention`` to the bias of its output layer.  Here a parameter that is asked for again is gathered, stays
    so until the end of the block, and is sharded with the values that it has on rank 0 then.

    Args:
        deepspeed: The library.
        config: DeepSpeed's configuration, as far as it says how parameters are sharded.
        remote_device: Where shards are kept, None is the device.
    """
    init: Any = deepspeed.zero.Init(config_dict_or_path=config, remote_device=remote_device)
    watch = _Watch()
    shard_layer = init._post_init_method  # noqa: SLF001 - called at the end of each constructor, and there is no other hook

    def shard_and_watch(layer: Module) -> None:
        shard_layer(layer)
        watch.begin(layer)

    init._post_init_method = shard_and_watch  # noqa: SLF001 - the same
    with init:
        try:
            yield
        except BaseException:  # other ranks may still be making layers: nothing communicates, and nothing holds a group
            watch.stop()
            watch.release_groups()
            release_groups(init)
            raise
        watch.stop()
        watch.shard_again()
        if not watch.has_seen_any and init.param_swapper is not None:
            free_buffers([init.param_swapper])


def shard(deepspeed: Any, module: Module, config: dict[str, Any]) -> None:
    """Shard the parameters of a module that are not yet, one after the other, with the values of rank 0; collective.

    DeepSpeed's engine does the same, but moves the whole module to the device first.  Where parameters are sharded
    already, the others join them: another context would remove the files that these are in.

    Args:
        deepspeed: The library.
        module: The user's.
        config: DeepSpeed's configuration.
    """
    sharded: Any = next((parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")), None)
    if sharded is not None:
        sharded.convert_to_zero_parameters(param_list=module.parameters())
        return
    group = deepspeed.utils.groups._get_zero_param_intra_parallel_group()  # noqa: SLF001 - of ZeRO++, from the creation of layers; DeepSpeed makes no second one
    deepspeed.zero.Init(module=module, config_dict_or_path=config, zero_param_parallel_group=group)


class _Watch:
    """Gathers parameters of finished layers when they are asked for, and shards them at the end."""

    def __init__(self) -> None:
        self._layers: list[Module] = []
        self._gathered: list[Any] = []

    def begin(self, layer: Module) -> None:
        """Watch over the parameters of a layer itself, not of its children."""
        if layer._parameters:  # noqa: SLF001 - torch has no other hook for the look-up of a parameter
            layer._parameters = _WatchedParameters(layer._parameters, self)  # noqa: SLF001 - the same
            self._layers.append(layer)

    @property
    def has_seen_any(self) -> bool:
        """Whether layers with parameters have been made."""
        return bool(self._layers)

    def gather(self, parameter: Any) -> None:
        """Gather a parameter that is sharded; collective."""
        if parameter is not None and _is_partitioned(parameter):
            parameter.all_gather(param_list=[parameter])
            self._gathered.append(parameter)

    def stop(self) -> None:
        """Leave the layers as they are."""
        for layer in self._layers:
            layer._parameters = layer._parameters.plain()  # type: ignore[attr-defined]  # noqa: SLF001 - set in begin

    def release_groups(self) -> None:
        """Take the process group out of the parameters, which cannot be used any more."""
        for layer in self._layers:
            for parameter in layer.parameters(recurse=False):
                vars(parameter).pop("ds_process_group", None)

    def shard_again(self) -> None:
        """Shard what was gathered, with the values of rank 0; collective."""
        for parameter in self._gathered:
            if not _is_partitioned(parameter):  # as apply() leaves it
                dist.broadcast(parameter.data, 0, group=parameter.ds_process_group)
                parameter.partition(param_list=[parameter], has_been_updated=True)


class _WatchedParameters(dict[str, "Parameter | None"]):
    """The parameters of a layer, which are gathered when they are looked up."""

    def __init__(self, parameters: dict[str, Parameter | None], watch: _Watch) -> None:
        super().__init__(parameters)
        self._watch = watch

    def plain(self) -> dict[str, Parameter | None]:
        """Return them in a dict that does nothing more."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Parameter | None:
        parameter = super().__getitem__(name)
        self._watch.gather(parameter)
        return parameter

    def items(self) -> Any:
        for parameter in super().values():
            self._watch.gather(parameter)
        return super().items()

    def values(self) -> Any:
        for parameter in super().values():
            self._watch.gather(parameter)
        return super().values()


def _is_partitioned(parameter: Any) -> bool:
    status: Any = import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
    return getattr(parameter, "ds_status", None) is status.NOT_AVAILABLE


# Layers whose training would not give what one device gives, and those that come too late.


_logger = logging.getLogger(__name__)


def check_layers(module: Module, *, stage: int, world_size: int) -> None:
    """Refuse embeddings with sparse gradients, and those that change their own weights for the rank's own batch alone.

    Raises:
        MisuseError: There is an embedding with ``sparse=True`` and a stage that shards the optimizer, or with
            ``max_norm`` and several ranks or stage 3.
    """
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


def lay_out(module: Module) -> None:
    """Give parameters that are stored in another order, such as transposed ones, memory in the order of rows.

    DeepSpeed flattens them as they are stored, and sends them so.
    """
    changed = []
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
            changed.append(name)
    if changed:
        _logger.info(
            "%s, which had strides of their own, are stored row by row, as DeepSpeed wants", ", ".join(changed)
        )


@contextmanager
def naming_new_parameters(module: Module) -> Iterator[None]:
    """Say which parameters stage 3 does not know, where it misses the attributes that it gives to others."""
    try:
        yield
    except AttributeError as error:
        if "'Parameter' object has no attribute 'ds_" not in str(error):
            raise
        names = [name for name, parameter in module.named_parameters() if not hasattr(parameter, "ds_id")]
        raise MisuseError(
            f"{', '.join(names) or 'a parameter'} came to the module after the training had begun, and stage 3 of ZeRO "
            "has not sharded it: make layers before fit, or in configure_model"
        ) from error


# Parameters without a dimension, such as CLIP's ``logit_scale``, which DeepSpeed cannot send to other ranks.


class ScalarsAsBytes(TorchFunctionMode):
    """A context in which a tensor without a dimension can be viewed as bytes, as others can."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:
            return args[0].view(1).view(torch.uint8)
        return function(*args, **(kwargs or {}))


# Check that the ranks of stage 3 use the same parameters in a step.


_GATHER = "_PartitionedParameterCoordinator__all_gather_params_"  # which DeepSpeed keeps private
_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"  # the same
_VERBS = {False: "gathers", True: "reduces gradients of"}
_MOST = 10_000
_MOST_NAMES = 4


class Exchanges:
    """The parameters that stage 3 gathers, and whose gradients it reduces, which have to be the same on all ranks.

    Where they are not, a rank gets parts of other parameters, or another one's gradients.  Each exchange of the first
    pass is compared before it begins, which also finds those of different sizes; after that all those of a pass are
    compared at its end, where stage 3 waits for the GPU anyway, and before the weights change.

    Args:
        optimizer: What DeepSpeed has made of the user's optimizer.
        module: Has the parameters.
    """

    def __init__(self, optimizer: Any, module: Module) -> None:
        self._optimizer = optimizer
        self._module = module
        self._is_first_pass = True
        self._noted: list[tuple[int, ...]] = []
        self._earlier = 0
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._gather, self._reduce = getattr(coordinator, _GATHER), getattr(optimizer, _REDUCE)
        setattr(coordinator, _GATHER, self._note_and_gather)
        setattr(optimizer, _REDUCE, self._note_and_reduce)

    def compare(self) -> None:
        """Compare what was exchanged since the last call; collective.

        Raises:
            MisuseError: It was not the same on all ranks.
        """
        self._compare((self._earlier, *self._noted))
        self._noted.clear()
        self._is_first_pass = False

    def _note_and_gather(self, params: Any, *arguments: Any, **options: Any) -> None:
        params = list(params)
        self._note(False, [parameter for parameter in params if parameter.ds_status.name == "NOT_AVAILABLE"])
        self._gather(params, *arguments, **options)

    def _note_and_reduce(self, communication_data_type: torch.dtype) -> None:
        self._note(True, self._optimizer.ipg_buckets[communication_data_type].params)
        self._reduce(communication_data_type)

    def _note(self, is_reduced: bool, parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        if len(self._noted) == _MOST:  # a long evaluation
            self._earlier = hash((self._earlier, *self._noted))
            self._noted.clear()
        self._noted.append((is_reduced, *sorted(parameter.ds_id for parameter in parameters)))
        if self._is_first_pass:
            self._compare((len(self._noted), self._noted[-1]))

    def _compare(self, values: tuple[Any, ...]) -> None:
        group, device = self._optimizer.dp_process_group, self._optimizer.fp16_groups[0][0].device
        if is_same_on_all_ranks(values, group, device):
            return
        noted: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(noted, self._noted, group=group)
        raise MisuseError(
            f"all ranks have to use the same parameters in the same order with stage 3 of ZeRO, and {self._told(noted)}"
            ": let each rank run all layers in one order, with 0 * layer(x).sum() in its loss for those that it does "
            "not need, or choose stage 2 (strategy='deepspeed_stage_2'), where ranks may differ"
        )

    def _told(self, noted: list[list[tuple[int, ...]]]) -> str:
        """Return where a rank first differs from rank 0."""
        for rank, others in enumerate(noted):
            for own, other in zip_longest(noted[0], others, fillvalue=()):
                if own != other:
                    return f"rank 0 {self._described(own, other)} while rank {rank} {self._described(other, own)}"
        return "they have not in an evaluation"

    def _described(self, exchange: tuple[int, ...], other: tuple[int, ...]) -> str:
        """Return what is exchanged, of exchanges of one kind only what another one has not."""
        if not exchange:
            return "is at the end of its pass"
        is_reduced, *numbers = exchange
        if other and other[0] == is_reduced:
            numbers = [number for number in numbers if number not in other[1:]]
        known = {getattr(parameter, "ds_id", None): name for name, parameter in self._module.named_parameters()}
        names = [known.get(number, "a parameter") for number in numbers] or ["nothing else"]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"{_VERBS[bool(is_reduced)]} {', '.join(names[:_MOST_NAMES])}{more}"


def exchanges_of(optimizer: Any, module: Module) -> Exchanges | None:
    """Return what watches over the exchanges of stage 3; None with the other stages, and where there is one rank."""
    if not hasattr(optimizer, "parameter_offload") or distributed.get_world_size(optimizer.dp_process_group) == 1:
        return None
    return Exchanges(optimizer, module)
