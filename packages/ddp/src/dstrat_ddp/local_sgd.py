"""Averaging parameters now and then, where gradients are no longer averaged over all ranks (post-local SGD)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dstrat.errors import ConflictError, RequestError

if TYPE_CHECKING:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.optim import Optimizer

    from dstrat_ddp.comm_hooks import CommHook


def check_averaging_period(period: int | None, hook: CommHook | None) -> None:
    """Raise an error unless parameters are averaged exactly where gradients are not.

    Raises:
        ConflictError: There is a period and no local SGD, or the other way round.
        RequestError: The period is not a number of steps.
    """
    is_local_sgd = hook is not None and hook.is_local_sgd
    if period is None:
        if is_local_sgd:
            raise ConflictError(
                "ddp_comm_hook 'post_localSGD' lets the ranks drift apart: give model_averaging_period, "
                "the steps between two averagings of their parameters"
            )
        return
    if not is_local_sgd:
        raise ConflictError(
            f"model_averaging_period={period!r} averages parameters where gradients are not averaged: "
            "it needs ddp_comm_hook='post_localSGD'"
        )
    if not isinstance(period, int) or period < 1:
        raise RequestError(f"model_averaging_period {period!r} must be a number of steps, at least 1")


class ParameterAveraging:
    """Averages the parameters of each optimizer over all ranks, every so many of its steps.

    The algorithm is post-local SGD (https://arxiv.org/abs/1808.07217).

    Args:
        period: Number of an optimizer's steps between two averagings.
        state: The ``PostLocalSGDState``; where it lacks a subgroup, it gets the ranks of this machine.
        ranks_per_machine: How many there are.
    """

    def __init__(self, period: int, state: Any, ranks_per_machine: int) -> None:
        self._period = period
        self._state = state
        self._averagers: dict[int, PeriodicModelAverager] = {}
        self._made_subgroup = state.post_local_gradient_allreduce and state.subgroup is None
        if self._made_subgroup:
            # torch makes one of its own by the number of CUDA devices, which fails where there is none.
            state.subgroup, _ = dist.new_subgroups(ranks_per_machine)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, and average its parameters when it is time."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._averager(optimizer).average_parameters(iter(parameters))

    def close(self) -> None:
        """Forget the group that was made here: it ends with the process group."""
        if self._made_subgroup:
            self._state.subgroup = None

    def _averager(self, optimizer: Optimizer) -> PeriodicModelAverager:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        # One for each: an averager counts calls, and all optimizers step in one iteration.
        if id(optimizer) not in self._averagers:
            self._averagers[id(optimizer)] = PeriodicModelAverager(
                self._period, self._state.start_localSGD_iter, self._state.process_group
            )
        return self._averagers[id(optimizer)]
