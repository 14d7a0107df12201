"""Optimization methods of a module."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.training.loops.optimization import ManualOptimization, ManualOptimizer
    from dstrat.training.trainer import Trainer


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and that of all of them as one vector.

    Every process calls it, where the strategy shards gradients.  It is for ``on_before_optimizer_step``, with
    ``self.log_dict(grad_norm(self, norm_type=2))``.

    Args:
        module: Its parameters with a gradient are measured.
        norm_type: The p of the p-norm, ``"inf"`` for the largest value.
        group_separator: Between ``grad_2.0_norm`` and the parameter's name.

    Raises:
        RequestError: The p is not positive.
    """
    order = float(norm_type)
    if order <= 0:
        raise RequestError(f"grad_norm(norm_type={norm_type!r}) must be positive, or 'inf' for the largest value")
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    norms = {
        f"grad_{order}_norm{group_separator}{name}": _full_tensor(torch.linalg.vector_norm(gradient.detach(), order))
        for name, gradient in gradients.items()
    }
    if norms:
        device = next(iter(norms.values())).device
        together = torch.stack([norm.to(device) for norm in norms.values()])
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(together, order)
    return norms


def _full_tensor(norm: Tensor) -> Tensor:
    """Return a norm that is known in parts, on several processes, as one number."""
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # as a DTensor has
    return full


class OptimizationMethods:
    """What a :class:`~dstrat.training.module.train_module.TrainModule` has to do with optimizers.

    Attributes:
        automatic_optimization: Whether the loss that ``training_step`` returns is optimized for it.  A module that sets
            it to False calls :meth:`manual_backward` and the ``step`` of its :meth:`optimizers` by itself::

                def training_step(self, batch, batch_idx):
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()
    """

    automatic_optimization: bool = True
    _was_trainable: dict[Parameter, bool] | None = None

    if TYPE_CHECKING:

        @property
        def trainer(self) -> Trainer: ...

    def configure_optimizers(self) -> Any:
        """Return the optimizer; also several, with or without schedulers.

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
        """Return the optimizer, or the list of them where there are several.

        In manual optimization each is a :class:`~dstrat.training.loops.optimization.ManualOptimizer`.
        """
        optimizers = self.trainer.fit_loop.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them where there are several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    # What automatic optimization does, to be overridden

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of the loss, which is scaled where the precision scales it."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Run the closure, which computes the gradients, and step the optimizer."""
        self.trainer.strategy.optimizer_step(_plain(optimizer), optimizer_closure, self)  # type: ignore[arg-type]  # a Module

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: ClipAlgorithm
    ) -> None:
        """Clip the gradients of an optimizer; they are not scaled."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler, with its monitored value where it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # What a module may call

    def clip_gradients(
        self,
        optimizer: Optimizer | ManualOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
    ) -> None:
        """Clip the gradients of an optimizer to a norm or a value.

        Args:
            optimizer: Whose parameters' gradients are clipped.
            gradient_clip_val: The largest norm or value; by default the Trainer's, and nothing is clipped without one.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``; by default the Trainer's.
        """
        trainer = self.trainer
        clip_val = trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if clip_val is not None:
            algorithm = gradient_clip_algorithm or trainer.gradient_clip_algorithm
            trainer.strategy.clip_gradients(_plain(optimizer), clip_val, algorithm)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss (a scalar tensor) in manual optimization.

        Use it in place of ``loss.backward()``, so that strategy, precision and hooks take part.

        Args:
            loss: What is minimized.
            *args: Passed to ``loss.backward``.
            **kwargs: Passed to ``loss.backward``.
        """
        self._manual("manual_backward").backward(loss, *args, **kwargs)

    def no_backward_sync(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate on each process without being synchronised.

        Args:
            enabled: Whether it does so; False makes the context do nothing.
        """
        self._manual("no_backward_sync")
        return self.trainer.strategy.no_backward_sync() if enabled else nullcontext()

    def toggle_optimizer(self, optimizer: Optimizer | ManualOptimizer) -> None:
        """Let only the parameters of this optimizer require gradients, until :meth:`untoggle_optimizer`.

        It saves the gradients of the others where several optimizers share a graph, as in a GAN.
        """
        if self._was_trainable is not None:
            raise MisuseError("an optimizer is toggled already: call untoggle_optimizer before you toggle another one")
        selected = set(_parameters(optimizer))
        remaining = [p for other in self.trainer.strategy.optimizers for p in _parameters(other) if p not in selected]
        self._was_trainable = {parameter: parameter.requires_grad for parameter in remaining}
        for parameter in remaining:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer | ManualOptimizer | None = None) -> None:
        """Undo :meth:`toggle_optimizer`."""
        for parameter, required in (self._was_trainable or {}).items():
            parameter.requires_grad_(required)
        self._was_trainable = None

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManualOptimizer) -> Iterator[None]:
        """Let only the parameters of this optimizer require gradients in a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def _manual(self, name: str) -> ManualOptimization:
        manual = self.trainer.fit_loop.manual_optimization
        if manual is None:
            raise MisuseError(
                f"{name} is for manual optimization, and {type(self).__name__} is optimized automatically: "
                "set self.automatic_optimization = False in its __init__, or return the loss from training_step"
            )
        return manual


def _plain(optimizer: Any) -> Optimizer:
    plain: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain


def _parameters(optimizer: Any) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
