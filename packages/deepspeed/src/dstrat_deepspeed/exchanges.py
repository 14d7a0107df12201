"""Check that the ranks of stage 3 use the same parameters in a step."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import distributed

from dstrat.errors import MisuseError
from dstrat_deepspeed.agreement import is_same_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.nn import Module

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
