"""Adapter of FairScale 0.4.13, its last release: its classes without warnings, and the one file for private names."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from typing_extensions import override

from dstrat.errors import MisuseError

# FairScale's last release is of 2022: it imports what torch has deprecated since, and users cannot change that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
    from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
    from fairscale.nn.misc.flatten_params_wrapper import FlatParameter
    from fairscale.optim import OSS
    from fairscale.optim.grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Parameter

__all__ = [
    "FlatParameter",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "auto_wrap",
    "default_auto_wrap_policy",
    "enable_wrap",
    "expect_backward",
    "leave_deprecations_out",
    "original_shape",
    "rebind_scheduler",
]


def leave_deprecations_out() -> None:
    """Show no warnings of what FairScale calls in each step and torch has deprecated since its last release."""
    for message in (r"TypedStorage is deprecated", r".torch\.distributed\._\w+_base. is a private function"):
        warnings.filterwarnings("ignore", message)


def original_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape that a parameter had before FairScale has sharded it."""
    return tuple(getattr(parameter, "_orig_size", parameter.shape))


def expect_backward(model: ShardedDataParallel) -> None:
    """Let a model reduce the gradients of the next backward pass, as its forward does."""
    model._clear_counters()


class ShardedOptimizer(OSS):  # type: ignore[misc]  # FairScale has no types that mypy sees
    """FairScale's optimizer, which schedulers accept although they were made for another one.

    Its state dict has the entries of this rank's parameters only, without communication.
    """

    # A scheduler of torch marks the optimizer that it is made for, and warns if the one that it steps has no marks:
    # that its step was replaced, and that no step came before the scheduler's.
    _opt_called = True

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step the share of this rank, and send the parameters to the others."""
        return super().step(closure, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @override
    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return all groups, and the state of this rank's parameters."""
        numbers = self._param_to_index
        entries = {numbers[id(parameter)]: entry for parameter, entry in self.optim.state.items()}
        return {**Optimizer.state_dict(self), "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters, or of this rank's; others are dropped."""
        # A copy, as FairScale removes the entries of other ranks from what it gets.
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})

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


def rebind_scheduler(scheduler: Any, replaced: Mapping[int, Optimizer]) -> None:
    """Let a scheduler, and those in it, schedule other optimizers.

    Args:
        scheduler: One of torch's, or one that is built like them.
        replaced: The other optimizers, by the ``id`` of those that they replace.
    """
    for inner in getattr(scheduler, "_schedulers", ()):  # of torch's SequentialLR and ChainedScheduler
        rebind_scheduler(inner, replaced)
    plain = getattr(scheduler, "optimizer", None)
    if id(plain) in replaced:
        scheduler.optimizer = replaced[id(plain)]
