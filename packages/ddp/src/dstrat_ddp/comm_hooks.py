"""Communication hooks of DistributedDataParallel, by name or callable, and local SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.parallel.internals import new_connections
from dstrat.plugins.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer


Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
"""Communication hook, which DistributedDataParallel calls with a state for each bucket of gradients."""

_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_HOOKS = {
    "allreduce": "default_hooks.allreduce_hook",
    "batched_powerSGD": "powerSGD_hook.batched_powerSGD_hook",
    "bf16_compress": "default_hooks.bf16_compress_hook",
    "fp16_compress": "default_hooks.fp16_compress_hook",
    "noop": "debugging_hooks.noop_hook",
    "post_localSGD": "post_localSGD_hook.post_localSGD_hook",
    "powerSGD": "powerSGD_hook.powerSGD_hook",
    "quantization_perchannel": "quantization_hooks.quantization_perchannel_hook",
    "quantization_pertensor": "quantization_hooks.quantization_pertensor_hook",
}
_WRAPPERS = {
    "bf16_compress": "default_hooks.bf16_compress_wrapper",
    "fp16_compress": "default_hooks.fp16_compress_wrapper",
}
_GPU_ONLY = ("batched_powerSGD", "quantization_perchannel", "quantization_pertensor")
_HAVE_BF16 = ("cuda", "xpu")  # types of device on which torch accepts its own hook and wrapper in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class CommHook:
    """A communication hook of gradients with its state and its wrapper.

    Attributes:
        hook: Takes a state and a bucket, returns a future of the averaged gradients.
        state: The hook's state; None for the default, or if it has none.
        wrapper: Returns a hook that compresses the communication of another; None for no compression.
    """

    hook: Hook
    state: Any = None
    wrapper: Callable[[Hook], Hook] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling torch's PowerSGDState needs the process group, which opens after the processes have started.
        if _is_power_sgd(self.state):
            return _with_power_sgd, (self.hook, type(self.state), _slots(self.state), self.wrapper)
        return partial(CommHook, hook=self.hook, state=self.state, wrapper=self.wrapper), ()

    @property
    def is_local_sgd(self) -> bool:
        """Whether gradients are no longer averaged over all ranks from some step on, so that parameters must be."""
        return bool(self.hook is _torch(_HOOKS["post_localSGD"]))

    @property
    def is_noop(self) -> bool:
        """Whether each rank keeps its own gradients, as for measurements."""
        return bool(self.hook is _torch(_HOOKS["noop"]))

    @property
    def has_state(self) -> bool:
        """Whether the hook keeps something from step to step."""
        return self.state is not None or self._compresses_by_power_sgd

    @property
    def _compresses_by_power_sgd(self) -> bool:
        return self.hook in (_torch(_HOOKS["powerSGD"]), _torch(_HOOKS["batched_powerSGD"]))

    def sent_share(self, dtype: torch.dtype) -> float | None:
        """Return the share of the gradients' bytes that all ranks average; None where it depends on the state.

        Args:
            dtype: Dtype of the gradients.
        """
        if self.wrapper is not None:
            return None
        compressed = 2 / dtype.itemsize
        names = {"allreduce": 1.0, "bf16_compress": compressed, "fp16_compress": compressed, "noop": 0.0}
        return next((share for name, share in names.items() if self.hook is _torch(_HOOKS[name])), None)

    def register(self, model: Module, device: torch.device, *, is_one_of_several: bool) -> None:
        """Register the hook with a wrapped model.

        Args:
            model: The wrapped model.
            device: Device of its gradients.
            is_one_of_several: Whether the hook is registered with other models, too.

        Raises:
            RequestError: The hook does not run on this device.
            MisuseError: The model has no hooks.
        """
        register: Callable[[Any, Hook], None] | None = getattr(model, "register_comm_hook", None)
        if register is None:
            raise MisuseError(
                f"ddp_comm_hook needs a model with register_comm_hook, and configure_ddp made {type(model).__name__}"
            )
        hook: Hook = _for_device(self.hook, device)
        if self.wrapper is not None:
            wrap: Callable[[Hook], Hook] = _for_device(self.wrapper, device)
            hook = wrap(hook)
        state = self.state
        if state is None and self._compresses_by_power_sgd:
            state = _torch("powerSGD_hook.PowerSGDState")(process_group=None)  # these two have no default of their own
        elif is_one_of_several and (self.is_local_sgd or _is_power_sgd(state)):
            # Both count iterations of a model.  PowerSGD's has what was not sent of each bucket, too, and a bucket has
            # the same index in each model.
            slots = _slots(state)
            groups: dict[str, Any] = {name: slots.pop(name) for name in ("process_group", "subgroup") if name in slots}
            state = _from_slots(type(state), {**copy.deepcopy(slots), **groups})
        register(state, _acceptable(hook))


def comm_hook(hook: Hook | str | None, state: Any, wrapper: Callable[[Hook], Hook] | str | None) -> CommHook | None:
    """Return the requested hook; None for torch's averaging.

    Args:
        hook: A hook, or the name of one of torch's.
        state: Its state.
        wrapper: A wrapper of hooks, or the name of one of torch's.

    Raises:
        RequestError: No hook or wrapper has that name.
        ConflictError: A state or a wrapper without a hook, or a hook without the state that it needs.
    """
    if hook is None:
        for name, value in (("ddp_comm_state", state), ("ddp_comm_wrapper", wrapper)):
            if value is not None:
                raise ConflictError(f"{name} needs a ddp_comm_hook: pass that too, or leave it out")
        return None
    selected = CommHook(
        hook=_named("ddp_comm_hook", hook, _HOOKS),
        state=state,
        wrapper=None if wrapper is None else _named("ddp_comm_wrapper", wrapper, _WRAPPERS),
    )
    if selected.is_local_sgd and not isinstance(state, _torch("post_localSGD_hook.PostLocalSGDState")):
        raise ConflictError(
            f"ddp_comm_hook 'post_localSGD' got ddp_comm_state {state!r}, and must know when it starts: give "
            "ddp_comm_state=PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)"
        )
    return selected


def _is_power_sgd(state: Any) -> bool:
    return isinstance(state, _torch("powerSGD_hook.PowerSGDState"))


def _slots(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__slots__}


def _from_slots(state_type: type, slots: dict[str, Any]) -> Any:
    # Its __init__ would log, and __setstate__ of PowerSGD's look for the process group.
    state: Any = object.__new__(state_type)
    for name, value in slots.items():
        setattr(state, name, value)
    return state


def _with_power_sgd(
    hook: Hook, state_type: type, slots: dict[str, Any], wrapper: Callable[[Hook], Hook] | None
) -> CommHook:
    return CommHook(hook=hook, state=_from_slots(state_type, slots), wrapper=wrapper)


def _acceptable(hook: Hook) -> Hook:
    """Wrap a hook in a function with a name and without annotations: torch needs the one and refuses string ones."""

    def acceptable(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    acceptable.__annotations__ = {}
    acceptable.__name__ = acceptable.__qualname__ = getattr(hook, "__name__", type(hook).__name__)
    return acceptable


def _named(argument: str, value: Any, table: dict[str, str]) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str):
        raise MisuseError(f"{argument} {value!r} must be callable, or one of {', '.join(table)}")
    requested = value.lower().replace("_", "").removesuffix("hook").removesuffix("wrapper")
    for name, path in table.items():
        if name.lower().replace("_", "") == requested:
            return _torch(path)
    near = nearest(value, table)
    meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise RequestError(f"{argument} {value!r} is not one of {', '.join(table)}{meant}")


def _for_device(hook: Any, device: torch.device) -> Any:
    """Return a hook or wrapper, or its replacement on this device."""
    for name in _GPU_ONLY if device.type == "cpu" else ():
        if hook is _torch(_HOOKS[name]):
            possible = ", ".join(other for other in _HOOKS if other not in _GPU_ONLY)
            raise RequestError(f"ddp_comm_hook {name!r} runs on GPUs only; on the CPU these do: {possible}")
    replacements = {
        _torch(_HOOKS["bf16_compress"]): average_bf16,
        _torch(_WRAPPERS["bf16_compress"]): compress_bf16,
    }
    return hook if device.type in _HAVE_BF16 else replacements.get(hook, hook)


def _torch(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{_PACKAGE}.{module}"), name)


# Communication in bfloat16 on any device: torch's hook and wrapper need NCCL or XCCL


def average_bf16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket in bfloat16.

    Args:
        state: The processes to average over; None for all.
        bucket: The gradients of this rank.
    """
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size(state))
    future = dist.all_reduce(compressed, group=state, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def compress_bf16(hook: Hook) -> Hook:
    """Return a hook that calls another with gradients in bfloat16."""

    def compressing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: buffer.copy_(done.value()))

    return compressing


# Periodic averaging of parameters (post-local SGD)


def check_averaging_period(period: int | None, hook: CommHook | None) -> None:
    """Check that parameters are averaged if and only if gradients are not.

    Raises:
        ConflictError: There is a period without local SGD, or local SGD without a period.
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
    """Averages the parameters of each optimizer over all ranks, periodically.

    The algorithm is post-local SGD (https://arxiv.org/abs/1808.07217).

    Args:
        period: Number of an optimizer's steps between two averagings.
        state: The ``PostLocalSGDState``; without a subgroup, it gets the ranks of this machine.
        ranks_per_machine: Number of ranks on each machine.
    """

    def __init__(self, period: int, state: Any, ranks_per_machine: int) -> None:
        self._period = period
        self._state = state
        self._averagers: dict[int, PeriodicModelAverager] = {}
        self._owns_subgroup = state.post_local_gradient_allreduce and state.subgroup is None
        if self._owns_subgroup:
            # torch would create subgroups by the number of CUDA devices, which fails if there is none.
            with new_connections():
                state.subgroup, _ = dist.new_subgroups(ranks_per_machine)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, and average its parameters after each period."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._averager(optimizer).average_parameters(iter(parameters))

    def average_now(self, parameters: Iterable[Parameter]) -> None:
        """Average parameters at the end of a training, which may come between two averagings; collective."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        group: Any = self._state.process_group  # None is that of all ranks
        average_parameters(iter(parameters), group)

    def close(self) -> None:
        """Drop the subgroup that was created here, as it ends with the process group."""
        if self._owns_subgroup:
            self._state.subgroup = None

    def _averager(self, optimizer: Optimizer) -> PeriodicModelAverager:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        # One for each optimizer: an averager counts calls, and all optimizers may step in one iteration.
        if id(optimizer) not in self._averagers:
            self._averagers[id(optimizer)] = PeriodicModelAverager(
                self._period, self._state.start_localSGD_iter, self._state.process_group
            )
        return self._averagers[id(optimizer)]
