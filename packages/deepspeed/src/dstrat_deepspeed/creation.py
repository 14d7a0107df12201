"""Sharding the parameters of a module: as soon as a layer has made them, or one after the other later."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dstrat_deepspeed.ending import release_groups
from dstrat_deepspeed.nvme import free_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

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
