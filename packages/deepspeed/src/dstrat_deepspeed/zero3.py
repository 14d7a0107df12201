"""ZeRO stage 3: parameters sharded from their creation on, and a check that ranks exchange the same ones."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from dstrat.errors import MisuseError
from dstrat_deepspeed import internals
from dstrat_deepspeed.nvme import free_buffers
from dstrat_deepspeed.unused_parameters import is_same_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.nn import Module, Parameter

_logger = logging.getLogger(__name__)


@contextmanager
def sharded_creation(deepspeed: Any, config: dict[str, Any], remote_device: str | None) -> Iterator[None]:
    """Shard the parameters of each layer that is created in a ``with`` block, at the end of its constructor.

    DeepSpeed's own context loses what the constructor of a parent does to parameters of its children, such as
    ``MultiheadAttention`` to the bias of its output layer.  Here a parameter that is looked up again is gathered, stays
    so until the end of the block, and is sharded with the values that it has on rank 0 then.
    """
    init: Any = deepspeed.zero.Init(config_dict_or_path=config, remote_device=remote_device)
    watch = _CreationWatch()
    internals.after_each_layer(init, watch.begin)
    with init:
        try:
            yield
        except BaseException:  # other ranks may still be making layers: nothing communicates, and nothing holds a group
            watch.stop()
            watch.release_groups()
            internals.release_groups(init)
            raise
        watch.stop()
        watch.shard_again()
        if not watch.layers and init.param_swapper is not None:
            free_buffers([init.param_swapper])


def shard(deepspeed: Any, module: Module, config: dict[str, Any]) -> None:
    """Shard the parameters of a module that are not yet, one after the other, with the values of rank 0; collective."""
    # DeepSpeed's engine does the same, but moves the whole module to the device first.
    sharded: Any = next((parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")), None)
    if sharded is not None:  # the others join them: another context would remove the files that these are in
        sharded.convert_to_zero_parameters(param_list=module.parameters())
        return
    group = internals.secondary_shard_group(deepspeed)
    deepspeed.zero.Init(module=module, config_dict_or_path=config, zero_param_parallel_group=group)


class _CreationWatch:
    """Gathers parameters of finished layers when they are looked up, and shards them at the end."""

    def __init__(self) -> None:
        self.layers: list[Module] = []
        self._gathered: list[Any] = []

    def begin(self, layer: Module) -> None:
        """Watch over the parameters of a layer itself, not of its children."""
        if layer._parameters:  # noqa: SLF001 - torch has no other hook for the look-up of a parameter
            layer._parameters = _WatchedParameters(layer._parameters, self)  # noqa: SLF001 - the same
            self.layers.append(layer)

    def gather(self, parameter: Any) -> None:
        """Gather a parameter that is sharded; collective."""
        if parameter is not None and internals.is_partitioned(parameter):
            parameter.all_gather(param_list=[parameter])
            self._gathered.append(parameter)

    def stop(self) -> None:
        """Leave the layers as they are."""
        for layer in self.layers:
            layer._parameters = layer._parameters.plain()  # type: ignore[attr-defined]  # noqa: SLF001 - set in begin

    def release_groups(self) -> None:
        """Take the process group out of the parameters, which cannot be used any more."""
        for layer in self.layers:
            for parameter in layer.parameters(recurse=False):
                vars(parameter).pop("ds_process_group", None)

    def shard_again(self) -> None:
        """Shard the parameters that were gathered, with the values of rank 0; collective."""
        for parameter in self._gathered:
            if not internals.is_partitioned(parameter):  # as apply() leaves it
                dist.broadcast(parameter.data, 0, group=parameter.ds_process_group)
                parameter.partition(param_list=[parameter], has_been_updated=True)


class _WatchedParameters(dict[str, "Parameter | None"]):
    """The parameters of a layer, which are gathered when they are looked up."""

    def __init__(self, parameters: dict[str, Parameter | None], watch: _CreationWatch) -> None:
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
        self.values()
        return super().items()

    def values(self) -> Any:
        for parameter in super().values():
            self._watch.gather(parameter)
        return super().values()


# Layers whose training would not give what one device gives, and those that come too late


def check_layers(module: Module, *, stage: int, world_size: int) -> None:
    """Refuse embeddings with sparse gradients, and those that change their own weights for the rank's batch alone.

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


def store_by_rows(module: Module) -> None:
    """Give parameters that are stored in another order, such as transposed ones, memory in the order of rows."""
    # DeepSpeed flattens parameters as they are stored, and sends them so.
    strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
    for name in strided:
        parameter = module.get_parameter(name)
        parameter.data = parameter.data.contiguous()
    if strided:
        _logger.info(
            "%s, which had strides of their own, are stored row by row, as DeepSpeed wants", ", ".join(strided)
        )


@contextmanager
def naming_new_parameters(module: Module) -> Iterator[None]:
    """Name the parameters that stage 3 does not know, where it misses the attributes that it gives to others."""
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


# The same parameters on all ranks

_VERBS = {False: "gathers", True: "reduces gradients of"}
_MAX_EXCHANGES = 10_000
_MAX_NAMES = 4


class CollectiveCheck:
    """A check that all ranks of stage 3 gather the same parameters, and reduce gradients of the same, in one order.

    Where they do not, a rank gets shards of other parameters, or another one's gradients.  Each exchange of the first
    pass is compared before it begins, which also finds those of different sizes; after that all those of a pass are
    compared at its end, where stage 3 waits for the GPU anyway, and before the weights change.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
        module: Has the parameters.
    """

    def __init__(self, optimizer: Any, module: Module) -> None:
        self._optimizer = optimizer
        self._module = module
        self._is_first_pass = True
        self._exchanges: list[tuple[int, ...]] = []
        self._earlier = 0  # a hash of those that were not kept
        internals.observe_exchanges(
            optimizer, lambda parameters: self._note(False, parameters), lambda parameters: self._note(True, parameters)
        )

    def compare(self) -> None:
        """Compare the exchanges since the last call; collective.

        Raises:
            MisuseError: They were not the same on all ranks.
        """
        self._compare((self._earlier, *self._exchanges))
        self._exchanges.clear()
        self._is_first_pass = False

    def _note(self, is_reduced: bool, parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        if len(self._exchanges) == _MAX_EXCHANGES:  # a long evaluation
            self._earlier = hash((self._earlier, *self._exchanges))
            self._exchanges.clear()
        self._exchanges.append((is_reduced, *sorted(parameter.ds_id for parameter in parameters)))
        if self._is_first_pass:
            self._compare((len(self._exchanges), self._exchanges[-1]))

    def _compare(self, values: tuple[Any, ...]) -> None:
        group, device = self._optimizer.dp_process_group, self._optimizer.fp16_groups[0][0].device
        if is_same_on_all_ranks(values, group, device):
            return
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, self._exchanges, group=group)
        raise MisuseError(
            "all ranks have to use the same parameters in the same order with stage 3 of ZeRO, and "
            f"{self._difference(by_rank)}: let each rank run all layers in one order, with 0 * layer(x).sum() in its "
            "loss for those that it does not need, or choose stage 2 (strategy='deepspeed_stage_2'), where ranks may "
            "differ"
        )

    def _difference(self, by_rank: list[list[tuple[int, ...]]]) -> str:
        """Return the first difference of a rank from rank 0, in words."""
        for rank, exchanges in enumerate(by_rank):
            for first, other in zip_longest(by_rank[0], exchanges, fillvalue=()):
                if first != other:
                    return f"rank 0 {self._describe(first, other)} while rank {rank} {self._describe(other, first)}"
        return "they have not in an evaluation"

    def _describe(self, exchange: tuple[int, ...], other: tuple[int, ...]) -> str:
        """Return an exchange in words; of two of one kind only the parameters that the other one lacks."""
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
    """Return the check of stage 3's exchanges; None with the other stages, and where there is one rank."""
    if not hasattr(optimizer, "parameter_offload") or dist.get_world_size(optimizer.dp_process_group) == 1:
        return None
    return CollectiveCheck(optimizer, module)
