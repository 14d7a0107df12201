"""DeepSpeed's engine around a module and its optimizer."""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from dstrat.errors import MisuseError
from dstrat_deepspeed.config import without_boundaries
from dstrat_deepspeed.gradient_order import UnusedGradients, unused_gradients
from dstrat_deepspeed.groups import release_groups
from dstrat_deepspeed.nvme import free_buffers_of_state, release_unused, with_files
from dstrat_deepspeed.optimizers import keep, without_first_step
from dstrat_deepspeed.weight_changes import share_memory
from dstrat_deepspeed.zero3 import Exchanges, exchanges_of, naming_new_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer


_logger = logging.getLogger(__name__)


class Engine:
    """What a strategy does with DeepSpeed's engine.

    Args:
        deepspeed: The library.
        steps: What the engine wraps.
        optimizer: The user's; None leaves it to the configuration, and evaluates only where that has none.
        config: DeepSpeed's configuration.
        is_manual: Whether the module computes gradients within its steps.

    Attributes:
        engine: DeepSpeed's own.
        skipped_steps: Number of optimizer steps that were not applied, as a gradient was not finite.
    """

    def __init__(
        self,
        deepspeed: Any,
        steps: StepModule,
        optimizer: Optimizer | None,
        config: dict[str, Any],
        *,
        is_manual: bool,
    ) -> None:
        self.skipped_steps = 0
        self._steps = steps
        self._is_manual = is_manual
        self._has_begun = False
        self._has_gradients = False
        self._expects_more = False
        self._norm: float | Tensor | None = None
        groups = [{"params": steps.parameters()}] if optimizer is None else list(optimizer.param_groups)
        self._trained = [parameter for group in groups for parameter in group["params"]]
        if is_manual:
            config = without_boundaries(config)
        with without_first_step():
            self.engine, *_ = deepspeed.initialize(
                model=steps, optimizer=optimizer, config=config, dist_init_required=False
            )
        self._with_files = with_files(steps)
        self._unused: UnusedGradients | None = None
        self._exchanges: Exchanges | None = None
        self.optimizer: Optimizer | None = self.engine.basic_optimizer
        self._all_groups: list[dict[str, Any]] | None = None
        if self.optimizer is not None:
            self.optimizer.zero_grad = self._zero_grad  # it has shards of parameters now
            self._is_sharded = self.engine.optimizer is not self.optimizer
            if self._is_sharded:
                keep(self.optimizer, self.engine.optimizer)
                self.optimizer.add_param_group = _refuse_group
            self._unused = unused_gradients(self.engine.optimizer, sends_in_step=is_manual)
            self._exchanges = exchanges_of(self.engine.optimizer, steps)
            share_memory(self.engine.optimizer)
            if optimizer is not None and len(groups) > len(self.optimizer.param_groups):
                self._used_groups, self._all_groups = self.optimizer.param_groups, groups
                self.optimizer.param_groups = groups
            self._set_clipping(0.0)
            self.set_boundary(is_boundary=True)

    @contextmanager
    def without_empty_groups(self) -> Iterator[None]:
        """Let DeepSpeed see the optimizer as it has made it: without groups that have no parameters.

        At other times the optimizer has all groups of the user, as schedulers have a learning rate for each of them.
        """
        optimizer: Any = self.optimizer
        if self._all_groups is None or optimizer.param_groups is not self._all_groups:
            yield
            return
        optimizer.param_groups = self._used_groups
        try:
            yield
        finally:
            optimizer.param_groups = self._all_groups

    # Steps

    def train(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        release_unused(self._with_files)
        if self._is_manual and not self._has_begun:
            self._has_begun = True
            self._has_gradients |= self._has_parameters_gradients  # those of a checkpoint
        run = self._steps if self._is_manual else self.engine
        with naming_new_parameters(self._steps):
            return run(step, *args, **kwargs)

    def evaluate(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step without gradients, for which parameters are gathered."""
        release_unused(self._with_files)
        with naming_new_parameters(self._steps):
            return self._steps(step, *args, **kwargs)

    def backward(self, loss: Tensor, compute: Callable[[Tensor], None] | None = None) -> None:
        """Compute gradients of a loss (a scalar tensor).

        Args:
            loss: What ``training_step`` returned, or a part of it.
            compute: Computes gradients of the (scaled) loss in another way than by ``loss.backward()``.
        """
        self._has_gradients = True
        self._expects_more = not (self._is_manual or self.engine.is_gradient_accumulation_boundary())
        if self._is_manual:
            self._prepare_manual_backward(loss)
        with self.without_empty_groups(), nullcontext() if compute is None else ReplacedBackward(compute):
            # not the tensor that a step returned, whose gradient stage 0 divides by the batches of a whole group
            self.engine.backward(loss.view_as(loss), scale_wrt_gas=False)
        if self._exchanges is not None:
            self._exchanges.compare()
        if self._unused is not None:
            self._unused.after_backward()

    def _prepare_manual_backward(self, loss: Tensor) -> None:
        """Do what DeepSpeed's forward does for a backward pass that comes after it: this one comes within."""
        engine = self.engine
        if hasattr(engine.optimizer, "clear_backward_seen_flag"):
            engine.optimizer.clear_backward_seen_flag()
        import_module("deepspeed.runtime.utils").register_output_backward_hooks(loss, engine._backward_prologue)  # noqa: SLF001 - as its forward does

    def has_put_back(self) -> None:
        """Take note of gradients that came from a checkpoint."""
        self._has_gradients = True
        self._expects_more = not self._is_manual

    def set_boundary(self, *, is_boundary: bool) -> None:
        """Say whether the next backward pass is the last one before the step; manual optimization need not know."""
        if self.engine.managed_gradient_accumulation():
            self.engine.set_gradient_accumulation_boundary(is_boundary)

    def _zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature
        """Clear the module's gradients, which a step has done already."""
        if self._has_gradients:
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        with self.without_empty_groups():
            self._clear()
        if self._unused is not None:
            self._unused.forget()
        self._has_gradients = False

    def _clear(self) -> None:
        optimizer = self.engine.optimizer
        self.engine.zero_grad()
        if self._is_sharded:
            optimizer.zero_grad()
            for partial in ("averaged_gradients", "all_grad_tensors"):
                for group in getattr(optimizer, partial, {}):
                    getattr(optimizer, partial)[group] = None

    # Updates

    def clip(self, clip_val: float) -> None:
        """Clip by the norm of all gradients together, in the next step."""
        if self._is_sharded:
            self._set_clipping(clip_val)
        else:
            self._norm = torch.nn.utils.clip_grad_norm_(self._steps.parameters(), clip_val)

    def _set_clipping(self, clip_val: float) -> None:
        self.engine._config.gradient_clipping = clip_val if self._is_sharded else 0.0  # noqa: SLF001 - it is per step here
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = clip_val

    def step(self) -> None:
        """Apply the gradients, and clear them; a step whose gradients are not finite is left out, and logged.

        Where no backward pass was made, nothing changes, as with an optimizer of torch.

        Raises:
            MisuseError: A backward pass was made without :meth:`backward`, so that its gradients are incomplete.
        """
        if not self._has_gradients and self._lacks_gradients():
            return
        engine = self.engine
        release_unused(self._with_files)
        if self._unused is not None:
            self._unused.before_step()
        if self._expects_more and engine.zero_optimization_stage() in (1, 2):
            engine.allreduce_gradients()  # as a last backward pass does, which a batch without a loss has not made
        self._expects_more = False
        with naming_new_parameters(self._steps), self.without_empty_groups():
            engine.step()
        self._has_gradients = False
        if self._is_sharded:
            self._norm = engine.get_global_grad_norm()
            self._set_clipping(0.0)
        if not engine.was_step_applied():
            self.skipped_steps += 1
            if engine.global_rank == 0:  # all of them skip it
                _logger.warning("step skipped: a gradient is not finite (%d until now)", self.skipped_steps)

    def _lacks_gradients(self) -> bool:
        """Return whether there are none, where :meth:`backward` has not been called."""
        if not self._has_parameters_gradients:
            return True
        if self.engine.zero_optimization_stage() == 1:
            return False  # it reduces what is there
        raise MisuseError(
            "gradients were computed in another way than by self.manual_backward(loss), such as by loss.backward(), "
            "so that they are not averaged over the ranks: call self.manual_backward(loss)"
        )

    @property
    def _has_parameters_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._trained)

    # Gradients

    def grad_norm(self) -> float:
        """Return the norm of all gradients together, before clipping: of those that wait for a step, or the last ones.

        Raises:
            MisuseError: There has been no step, or its norm is not known.
        """
        if self._has_gradients and not self._is_sharded:
            gradients = [parameter.grad for parameter in self._steps.parameters() if parameter.grad is not None]
            return float(torch.nn.utils.get_total_norm(gradients))
        if self._has_gradients:
            return math.sqrt(sum(float(self._squared_norm(p)) for p in self._steps.parameters() if p.requires_grad))
        if self._norm is None:
            raise MisuseError(
                "the norm of the last gradients is not known: stage 0 computes none without clipping; ask for it "
                "between the backward pass and the step, such as in on_before_optimizer_step"
            )
        return float(self._norm)

    def _squared_norm(self, parameter: Any) -> Tensor | float:
        gradient = self.full_grad(parameter)
        return 0.0 if gradient is None else gradient.float().square().sum()

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter, between the backward pass and the step; collective."""
        gradient: Tensor | None = import_module("deepspeed.utils").safe_get_full_grad(parameter)
        return gradient

    # The end

    def close(self) -> None:
        """Free the engine, its process groups, and what it has hooked to the module."""
        sharded = self.engine.optimizer
        try:
            with self.without_empty_groups():
                self.engine.destroy()
        finally:
            release_groups(self.engine)
            free_buffers_of_state(sharded)
            if self.optimizer is not None:
                for replaced in ("zero_grad", "add_param_group"):
                    self.optimizer.__dict__.pop(replaced, None)


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise MisuseError(
        f"add_param_group got a group of {len(list(param_group['params']))} parameters after the training has begun, "
        "which ZeRO cannot shard any more: let configure_optimizers return all groups, and set the learning rate of "
        "one that comes later to 0 until then"
    )


# Computing gradients in the module's own way within DeepSpeed's ``engine.backward``.


class ReplacedBackward(TorchFunctionMode):
    """A context in which another function takes the place of a tensor's ``backward``.

    DeepSpeed's engine scales the loss, calls its ``backward``, and does more before and after that, so that the call
    cannot be made elsewhere.

    Args:
        compute: Called with the tensor; what it calls itself is not replaced.
    """

    def __init__(self, compute: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.backward:
            return self._compute(args[0])
        return function(*args, **(kwargs or {}))


# The module that DeepSpeed wraps, so that a step of the user's module is its forward.


class StepModule(Module):
    """A module whose forward runs a step of the user's module, and whose parts are those of the user's module.

    DeepSpeed does its work around ``forward``, and a training calls ``training_step``.  Parameters have the names that
    they have in the user's module, also in checkpoints of DeepSpeed's own.

    Args:
        module: The user's module.
        context: Returns the context that each step runs in.
    """

    def __init__(self, module: Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.__dict__.update(_user_module=module, _step_context=context)
        for parts in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[parts] = getattr(module, parts)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return bool(self.__dict__["_user_module"].training) if "_user_module" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        """Leave the mode as it is, which is set on the user's module."""

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step, which is a method of the user's module."""
        with self.__dict__["_step_context"]():
            return step(*args, **kwargs)
