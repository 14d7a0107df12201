"""DeepSpeed's engine around a module and its optimizer."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from dstrat.errors import MisuseError
from dstrat_deepspeed import internals
from dstrat_deepspeed.config import without_boundaries
from dstrat_deepspeed.nvme import free_state_buffers, parameters_in_files, release_unused
from dstrat_deepspeed.unused_parameters import UnusedGradients, unused_gradients
from dstrat_deepspeed.user_module import empty_parameters_allowed
from dstrat_deepspeed.zero3 import CollectiveCheck, collective_check, explaining_missing_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer


_logger = logging.getLogger(__name__)


class Engine:
    """Steps, gradients and updates of DeepSpeed's engine.

    Args:
        deepspeed: The library.
        steps: The module that the engine wraps.
        optimizer: The user's; None is that of the configuration, or an engine for evaluation if that has none.
        config: DeepSpeed's configuration.
        is_manual: Whether the module uses manual optimization: it computes gradients within its steps.
        device_rank: Index of the device in this process.

    Attributes:
        optimizer: The optimizer that DeepSpeed wraps; None in an evaluation.
        skipped_steps: Number of optimizer steps that were skipped because of a non-finite gradient.
    """

    def __init__(
        self,
        deepspeed: Any,
        steps: StepModule,
        optimizer: Optimizer | None,
        config: dict[str, Any],
        *,
        is_manual: bool,
        device_rank: int,
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
        with internals.without_first_step():
            self.engine, *_ = deepspeed.initialize(
                # Otherwise the local rank would be the index of the device, also of devices=[2, 3].
                args=Namespace(device_rank=device_rank),
                model=steps,
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
            )
        # It reads the module's state dict too, and writes the shards of stage 3 to files of their own.
        self.engine.save_checkpoint = empty_parameters_allowed()(self.engine.save_checkpoint)
        self._in_files = parameters_in_files(steps)
        self._unused = UnusedGradients(None)
        self._collective_check: CollectiveCheck | None = None
        self.optimizer: Optimizer | None = self.engine.basic_optimizer
        self._all_groups: list[dict[str, Any]] | None = None
        if self.optimizer is not None:
            self._adapt_optimizer(self.optimizer, self.engine.optimizer)
            # DeepSpeed drops groups without parameters.  Schedulers and checkpoints have a value for each group.
            if optimizer is not None and len(groups) > len(self.optimizer.param_groups):
                self._used_groups, self._all_groups = self.optimizer.param_groups, groups
                self.optimizer.param_groups = groups

    def _adapt_optimizer(self, optimizer: Any, wrapped: Any) -> None:
        optimizer.zero_grad = self._zero_grad  # torch's would clear shards, not the gradients of the module
        self._is_sharded = wrapped is not optimizer
        if self._is_sharded:
            internals.keep_optimizer(optimizer, wrapped)
            optimizer.add_param_group = _raise_for_new_group  # ZeRO shards once, when it wraps the optimizer
        self._unused = unused_gradients(wrapped, sends_in_step=self._is_manual)
        self._collective_check = collective_check(wrapped, self._steps)
        internals.share_memory(wrapped)
        internals.correct_by_step(optimizer)
        internals.set_clipping(self.engine, 0.0)  # the Trainer's hooks clip, through clip()
        self.set_boundary(is_boundary=True)

    @contextmanager
    def without_empty_groups(self) -> Iterator[None]:
        """Remove groups without parameters from the optimizer in a ``with`` block, as DeepSpeed expects it."""
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
        release_unused(self._in_files)
        if self._is_manual and not self._has_begun:
            self._has_begun = True
            self._has_gradients |= self._has_parameters_gradients  # a checkpoint may have brought some
        run = self._steps if self._is_manual else self.engine
        with explaining_missing_values(self._steps):
            return run(step, *args, **kwargs)

    def evaluate(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation step."""
        release_unused(self._in_files)
        with explaining_missing_values(self._steps):
            return self._steps(step, *args, **kwargs)

    def backward(self, loss: Tensor, compute: Callable[[Tensor], None] | None = None) -> None:
        """Compute the gradients of a scalar loss, by a function of the scaled loss instead of ``Tensor.backward``."""
        self._has_gradients = True
        self._expects_more = not (self._is_manual or self.engine.is_gradient_accumulation_boundary())
        if self._is_manual:
            internals.prepare_manual_backward(self.engine, loss)
        replaced: AbstractContextManager[Any] = nullcontext()
        if compute is not None:
            # engine.backward scales the loss, and works before and after the call: there is no hook at the call itself.
            replaced = internals.ReplacedMethod(Tensor.backward, lambda scaled, **_: compute(scaled))
        with explaining_missing_values(self._steps), self.without_empty_groups(), replaced:
            # A view: of the tensor that a step returned, stage 0 divides the gradient by gradient_accumulation_steps,
            # and the last group of an epoch may have fewer batches.
            self.engine.backward(loss.view_as(loss), scale_wrt_gas=False)
        if self._collective_check is not None:
            self._collective_check.compare()
        self._unused.after_backward()

    def expect_gradients(self) -> None:
        """Expect a step with the gradients of a checkpoint."""
        self._has_gradients = True
        self._expects_more = not self._is_manual

    def set_boundary(self, *, is_boundary: bool) -> None:
        """Set whether the next backward pass is the last one before the step."""
        if self.engine.managed_gradient_accumulation():  # not with manual optimization
            self.engine.set_gradient_accumulation_boundary(is_boundary)

    def _zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature
        """Clear the gradients of the module and of the optimizer's wrapper."""
        if not self._has_gradients:  # a step clears them itself
            return
        with self.without_empty_groups():
            self.engine.zero_grad()
            if self._is_sharded:
                internals.forget_partial_gradients(self.engine.optimizer)
        self._unused.forget()
        self._has_gradients = False

    # Updates

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients, after the last backward pass of a step."""
        if self._is_manual and self.engine.zero_optimization_stage() > 0:  # no pass is known to be the last one
            internals.scale_partial_gradients(self.engine.optimizer, factor)
            return
        self._reduce_pending()
        internals.scale_gradients(self.engine.optimizer, self._trained, factor)

    def _reduce_pending(self) -> None:
        """Reduce gradients that the last backward pass would have reduced: the last batch had no loss."""
        if self._expects_more and self.engine.zero_optimization_stage() in (1, 2):
            self.engine.allreduce_gradients()
        self._expects_more = False

    def clip(self, clip_val: float) -> None:
        """Clip gradients by their global norm: sharded ones in the next step, others now."""
        if self._is_sharded:
            internals.set_clipping(self.engine, clip_val)
        else:
            self._norm = torch.nn.utils.clip_grad_norm_(self._steps.parameters(), clip_val)

    def step(self) -> None:
        """Apply the gradients, and clear them; a step with non-finite gradients is skipped and logged.

        Without a backward pass nothing changes, as with an optimizer of torch.

        Raises:
            MisuseError: Gradients were computed without :meth:`backward`, so that ranks have not averaged them.
        """
        if not self._has_gradients and self._lacks_gradients():
            return
        engine = self.engine
        release_unused(self._in_files)
        self._unused.before_step()
        self._reduce_pending()
        with explaining_missing_values(self._steps), self.without_empty_groups():
            engine.step()
        self._has_gradients = False
        if self._is_sharded:
            self._norm = engine.get_global_grad_norm()
            internals.set_clipping(engine, 0.0)  # for the next step the hooks may not clip
        if not engine.was_step_applied():
            self.skipped_steps += 1
            if engine.global_rank == 0:  # all ranks skip the same steps
                _logger.warning("step skipped: a gradient is not finite (%d until now)", self.skipped_steps)

    def _lacks_gradients(self) -> bool:
        """Return whether there are no gradients to apply, after no call of :meth:`backward`."""
        if not self._has_parameters_gradients:
            return True
        if self.engine.zero_optimization_stage() == 1:
            return False  # stage 1 reduces in the step, whichever way gradients were computed
        raise MisuseError(
            "gradients were computed in another way than by self.manual_backward(loss), such as by loss.backward(), "
            "so that they are not averaged over the ranks: call self.manual_backward(loss)"
        )

    @property
    def _has_parameters_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._trained)

    # Gradients

    def grad_norm(self) -> float:
        """Return the norm of all gradients before clipping: the current ones, or those of the last step; collective.

        Raises:
            MisuseError: There has been no step, or DeepSpeed has not computed its norm.
        """
        parameters = list(self._steps.parameters())
        if self._has_gradients and not self._is_sharded:
            return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self._has_gradients:
            gradients = (self.full_grad(parameter) for parameter in parameters if parameter.requires_grad)
            return math.sqrt(sum(float(grad.float().square().sum()) for grad in gradients if grad is not None))
        if self._norm is None:
            raise MisuseError(
                "the norm of the last gradients is not known: stage 0 computes none without clipping; ask for it "
                "between the backward pass and the step, such as in on_before_optimizer_step"
            )
        return float(self._norm)

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, between the backward pass and the step; collective."""
        gradient: Tensor | None = import_module("deepspeed.utils").safe_get_full_grad(parameter)
        return gradient

    # The end

    def close(self) -> None:
        """Free the engine with its process groups and its hooks on the module."""
        wrapped = self.engine.optimizer
        try:
            with self.without_empty_groups():
                self.engine.destroy()
        finally:
            vars(self.engine).pop("save_checkpoint", None)
            internals.release_groups(self.engine)
            free_state_buffers(wrapped)
            if self.optimizer is not None:
                for replaced in ("zero_grad", "add_param_group"):
                    self.optimizer.__dict__.pop(replaced, None)


def _raise_for_new_group(param_group: dict[str, Any]) -> None:
    raise MisuseError(
        f"add_param_group got a group of {len(list(param_group['params']))} parameters after the training has begun, "
        "which ZeRO cannot shard any more: let configure_optimizers return all groups, and set the learning rate of "
        "one that comes later to 0 until then"
    )


class StepModule(Module):
    """A module with the user's parameters and layers, whose forward runs a step of the user's module in a context.

    DeepSpeed hooks into ``forward``, and a training calls ``training_step``.
    """

    def __init__(self, module: Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        # Not as a submodule: that would prefix the names of parameters, also in DeepSpeed's own checkpoints.
        self.__dict__.update(_user_module=module, _step_context=context)
        for content in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[content] = getattr(module, content)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return bool(self.__dict__["_user_module"].training) if "_user_module" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the mode: it is set on the user's module."""

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step method of the user's module."""
        with self.__dict__["_step_context"]():
            return step(*args, **kwargs)
