"""Optimization methods of a module, and norms of its gradients."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError, RequestError
from dstrat.training.module.trainer_access import TrainerAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and the total norm; collective if the strategy shards gradients.

    For use in ``on_before_optimizer_step``: ``self.log_dict(grad_norm(self, norm_type=2))``.  Where ranks have
    different parameters, such as the stages of a pipeline, each rank returns the norms of all, with 0 for a parameter
    that has no gradient.

    Args:
        module: Has the parameters.
        norm_type: The p of the p-norm; ``"inf"`` is the largest value.
        group_separator: Separator between ``grad_2.0_norm`` and the parameter's name.

    Raises:
        RequestError: The p is not a positive number.
        MisuseError: Only other ranks have some of the parameters, and the module is not the one that the Trainer fits.
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:  # NaN too
        raise RequestError(f"grad_norm(norm_type={norm_type!r}): give a number above 0, or 'inf' for the largest value")
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    by_name = {
        name: _full_tensor(torch.linalg.vector_norm(gradient.detach(), order)) for name, gradient in gradients.items()
    }
    if any(parameter.is_meta for parameter in module.parameters()):
        trainer = module._trainer if isinstance(module, TrainerAccess) else None  # noqa: SLF001 - of the same class
        if trainer is None or trainer.strategy.module is not module:
            raise MisuseError(
                f"grad_norm got a {type(module).__name__} with parameters that only other ranks have, such as those of "
                "other stages: give it the module that the Trainer fits; in a hand-written loop, clip_gradients of the "
                "strategy returns the norm"
            )
        by_name = trainer.strategy.share_gradient_norms(by_name)
    norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in by_name.items()}
    if norms:
        device = next(iter(norms.values())).device
        # The p-norm of all elements is the p-norm of the parameters' p-norms.
        stacked = torch.stack([norm.to(device) for norm in norms.values()])
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(stacked, order)
    return norms


def _full_tensor(norm: Tensor) -> Tensor:
    """Return a norm as a plain tensor; the norm of a sharded gradient is a DTensor of partial results."""
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return full


class OptimizationMethods(TrainerAccess):
    """Optimizer methods of a :class:`~dstrat.training.module.train_module.TrainModule`.

    Attributes:
        automatic_optimization: Whether the Trainer computes gradients of the loss and steps the optimizer.  A module
            that sets it to False calls :meth:`manual_backward` and the ``step`` of its :meth:`optimizers` itself::

                def training_step(self, batch, batch_idx):
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()
    """

    automatic_optimization: bool = True
    _was_trainable: dict[Parameter, bool] | None = None

    def configure_optimizers(self) -> Any:
        """Return one or several optimizers, with or without schedulers.

        Returns:
            An optimizer, a list of optimizers, a pair of lists (optimizers, schedulers), or a dict with
            ``"optimizer"`` and, if wanted, ``"lr_scheduler"``, which is a scheduler or a dict of the attributes of
            :class:`~dstrat.interfaces.optimizers.SchedulerConfig`.
        """
        raise MisuseError(
            f"{type(self).__name__} has no configure_optimizers: define it and return an optimizer, "
            "such as torch.optim.AdamW(self.parameters())"
        )

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of several.

        In manual optimization each is a :class:`~dstrat.training.loops.manual_optimization.ManualOptimizer`.
        """
        manual = self.trainer.fit_loop.manual_optimization
        optimizers = self.trainer.optimizers if manual is None else manual.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of several, or None without one."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    # Steps of automatic optimization, which a module may override

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of the loss, which the precision may have scaled."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Run the closure, which computes the gradients, and step the optimizer."""
        self.trainer.strategy.optimizer_step(_unwrap(optimizer), optimizer_closure, self)  # type: ignore[arg-type]  # a Module

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: ClipAlgorithm
    ) -> None:
        """Clip the unscaled gradients of an optimizer."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler, with its monitored value if it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # Methods for the steps of a module

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
    ) -> None:
        """Clip the gradients of an optimizer to a norm or a value.

        Args:
            optimizer: Has the parameters; an optimizer, or its proxy in manual optimization.
            gradient_clip_val: Maximal norm or value; by default the Trainer's, without which nothing is clipped.  0
                does not clip.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``; by default the Trainer's.
        """
        trainer = self.trainer
        clip_val = trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if clip_val:
            algorithm = gradient_clip_algorithm or trainer.gradient_clip_algorithm
            if not self.automatic_optimization and (manual := trainer.fit_loop.manual_optimization) is not None:
                manual.apply_weights(_unwrap(optimizer))
            trainer.strategy.clip_gradients(_unwrap(optimizer), clip_val, algorithm)

    def manual_backward(self, loss: Tensor, *args: Any, weight: Any = None, **kwargs: Any) -> None:
        """Compute the gradients of a loss in manual optimization, with strategy, precision and hooks.

        With weights, an optimizer steps with the gradient of the weighted mean of all losses, of all ranks, since its
        last ``step`` or ``zero_grad``.  Gradients are scaled to it by :meth:`clip_gradients` or the step.

        Args:
            loss: A scalar tensor.
            *args: Arguments of ``loss.backward``.
            weight: The number of labels or samples that the loss is the mean of, a number or a tensor with one element;
                for each loss of each rank or for none.
            **kwargs: Arguments of ``loss.backward``.
        """
        self.trainer.fit_loop.require_manual("manual_backward").backward(loss, *args, weight=weight, **kwargs)

    def no_backward_sync(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which ranks accumulate gradients without synchronizing them.

        Args:
            enabled: False makes the context do nothing.
        """
        self.trainer.fit_loop.require_manual("no_backward_sync")  # in automatic optimization the loop decides it
        return self.trainer.strategy.no_backward_sync() if enabled else nullcontext()

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Restrict gradients to the parameters of an optimizer, until :meth:`untoggle_optimizer`.

        It saves the computation of other gradients if several optimizers share a graph, as in a GAN.
        """
        if self._was_trainable is not None:
            raise MisuseError("an optimizer is toggled already: call untoggle_optimizer before you toggle another one")
        selected = set(_parameters(optimizer))
        # Parameters that optimizers share stay trainable.
        remaining = [p for other in self.trainer.strategy.optimizers for p in _parameters(other) if p not in selected]
        self._was_trainable = {parameter: parameter.requires_grad for parameter in remaining}
        for parameter in remaining:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer | None = None) -> None:
        """Undo :meth:`toggle_optimizer`."""
        for parameter, required in (self._was_trainable or {}).items():
            parameter.requires_grad_(required)
        self._was_trainable = None

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Restrict gradients to the parameters of an optimizer in a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)


def _unwrap(optimizer: Any) -> Optimizer:
    """Return the optimizer of a proxy; an optimizer itself, also one that wraps another as its ``optimizer``."""
    # Of the class: a proxy passes other look-ups on.
    unwrapped: Optimizer = optimizer.optimizer if getattr(type(optimizer), "is_proxy", False) else optimizer
    return unwrapped


def _parameters(optimizer: Any) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
