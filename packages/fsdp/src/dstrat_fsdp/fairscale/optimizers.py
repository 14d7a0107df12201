"""Optimizers whose state FairScale shards over the ranks (OSS), made of the user's own."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grad_value_

from dstrat.errors import CheckpointError, MisuseError
from dstrat.interfaces.fitting import groups_misfit

with warnings.catch_warnings():  # FairScale is older than what torch deprecates
    warnings.simplefilter("ignore")
    from fairscale.optim import OSS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from dstrat.interfaces.optimization import SchedulerConfig
    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import Strategy


class ShardedOptimizer(OSS):  # type: ignore[misc]  # FairScale has no types that mypy sees
    """FairScale's optimizer, which schedulers accept although they were made for another one."""

    _opt_called = True  # schedulers warn otherwise that no step came before theirs

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step the share of this rank, and send the parameters to the others."""
        return super().step(closure, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 - as above

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made.

        Raises:
            MisuseError: It has been made, and the gradients of the group would not be shared by the ranks.
        """
        if not self.in_super_constructor:
            raise MisuseError(
                f"add_param_group got a group of {len(list(param_group['params']))} parameters after the training has "
                "begun, which FairScale's ShardedDataParallel does not follow: let configure_optimizers return all "
                "groups, and set the learning rate of one that comes later to 0 until then"
            )
        super().add_param_group(param_group)


def sharded_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> list[Optimizer]:
    """Return sharded optimizers in the place of plain ones, to which the schedulers then belong.

    Args:
        optimizers: Not stepped yet.
        schedulers: Of these optimizers.
    """
    replaced: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        # The groups stay the same objects, so that what schedulers have changed in them holds.
        replaced[id(optimizer)] = ShardedOptimizer(optimizer.param_groups, type(optimizer), **_arguments(optimizer))
    for config in schedulers:
        _rebind(config.scheduler, replaced)
    return list(replaced.values())


def clip(optimizer: Any, largest: float, algorithm: ClipAlgorithm) -> None:
    """Clip the gradients of a sharded optimizer, of which each rank has its share; collective."""
    if algorithm == "norm":
        optimizer.clip_grad_norm(largest)
    else:
        clip_grad_value_([parameter for group in optimizer.param_groups for parameter in group["params"]], largest)


def whole_state(optimizer: Any, strategy: Strategy) -> dict[str, Any]:
    """Return the whole state on rank 0, and an empty dict on the others; collective."""
    optimizer.consolidate_state_dict(recipient_rank=0)
    state: dict[str, Any] = optimizer.state_dict() if strategy.is_global_zero else {}
    return state


def gather_everywhere(optimizer: Any) -> None:
    """Let the ``state_dict`` of a sharded optimizer be whole on every rank; collective."""
    optimizer.consolidate_state_dict(recipient_rank=-1)


def load_whole_state(optimizer: Any, state: Mapping[str, Any], strategy: Strategy) -> None:
    """Load the whole state of rank 0; each rank keeps its share; collective.

    Raises:
        CheckpointError: It is the state of other parameters.
    """
    told = strategy.broadcast(dict(state))
    groups, saved = ([group["params"] for group in side] for side in (optimizer.param_groups, told["param_groups"]))
    found = groups_misfit(optimizer, groups, saved)
    if found is not None:
        raise CheckpointError(found)
    optimizer.load_state_dict({**told, "state": dict(told["state"])})  # FairScale empties what is not its own


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults that are arguments of the optimizer's class; torch's AdamW has others, also in its groups."""
    parameters = inspect.signature(type(optimizer)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in optimizer.defaults.items() if takes_all or name in parameters}


def _rebind(scheduler: Any, replaced: Mapping[int, Optimizer]) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _rebind(inner, replaced)
    plain = getattr(scheduler, "optimizer", None)
    if id(plain) in replaced:
        scheduler.optimizer = replaced[id(plain)]
