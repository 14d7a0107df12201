"""Training over slow networks: each process takes many steps alone, and then an outer optimizer joins them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from dstrat import ParallelStrategy, take_from_first_rank
from dstrat.errors import CheckpointError, MisuseError, RequestError

from acme_diloco.vectors import assign, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer


class DiLoCoStrategy(ParallelStrategy):
    """Distributed low-communication training (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).

    Each process trains a replica with the module's optimizer on its own share of the data.  After ``inner_steps``
    steps the mean of what the replicas have gone is an outer gradient, with which stochastic gradient descent with
    Nesterov momentum takes a step from where the round began, and all replicas go on from there.  So parameters are
    sent once in a round, and gradients never; the losses are not those of one device.

    Within a round, evaluation and the weights in checkpoints are those of the mean of the replicas, with the buffers of
    each process.  A round that is not complete at the end of the training is joined there.  A checkpoint has the outer
    momentum, where the round began, and each process's replica with its optimizer: on as many processes training goes
    on exactly, on another number all go on from the mean, with the optimizer of global rank 0.

    Args:
        *args: Those of ParallelStrategy.
        inner_steps: Steps of the (first) optimizer in a round; the paper has 500.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum.
        **kwargs: Those of ParallelStrategy.

    Raises:
        RequestError: A number is out of its range.
    """

    def __init__(
        self, *args: Any, inner_steps: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(inner_steps, int) or inner_steps < 1:
            raise RequestError(f"inner_steps {inner_steps!r} must be a number of steps, at least 1")
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise RequestError(
                f"outer_lr={outer_lr!r} must be above 0, and outer_momentum={outer_momentum!r} from 0 to below 1"
            )
        self.inner_steps, self.outer_lr, self.outer_momentum = inner_steps, outer_lr, outer_momentum
        self._forget()

    def _forget(self) -> None:
        self._steps = 0  # of this round
        self._start: Tensor | None = None  # where the round began
        self._momentum: Tensor | None = None
        self._replica: Tensor | None = None  # set aside while the module has the mean
        self._is_alone = False

    # Rounds

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        if self._steps == 0 and optimizer is self.optimizers[0]:
            self._start = joined(self._trained())
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if optimizer is self.optimizers[0]:
            self._steps += 1
        if self._steps == self.inner_steps:
            self._join()
        return output

    def finish_training(self) -> None:
        if self._steps:
            self._join()

    def _join(self) -> None:
        """End a round: the outer optimizer's step."""
        assert self._start is not None
        trained = self._trained()
        gradient = self._start - self.reduce(joined(trained))
        if self._momentum is None:
            self._momentum = torch.zeros_like(gradient)
        self._momentum.mul_(self.outer_momentum).add_(gradient)
        assign(trained, self._start - self.outer_lr * (gradient + self.outer_momentum * self._momentum))
        take_from_first_rank(self.module.buffers())
        self._steps, self._start = 0, None

    def _trained(self) -> list[Parameter]:
        """Return the parameters that any optimizer has, each once, in an order that all processes share."""
        of_optimizers = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        trained = [parameter for parameter in self.module.parameters() if id(parameter) in of_optimizers]
        if self._start is not None and self._start.numel() != sum(parameter.numel() for parameter in trained):
            raise MisuseError(
                "an optimizer has got more parameters within a round of DiLoCo, in which each process has changed them "
                "for itself: give them to the optimizer in configure_optimizers"
            )
        return trained

    # The mean of the replicas

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        if self._steps == 0 or self._replica is not None or self._is_alone:
            yield
            return
        trained = self._trained()
        self._replica = joined(trained)
        assign(trained, self.reduce(self._replica))
        try:
            yield
        finally:
            assign(trained, self._replica)
            self._replica = None

    def module_state_dict(self) -> dict[str, Any]:
        with self.evaluation_context():
            state = super().module_state_dict()
            return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    # Checkpoints

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().sharded_optimizer_state(optimizer)
        return state if self.is_global_zero else {**state, "state": {}}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "start": self._start, "momentum": self._momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = None
        numbers = sum(parameter.numel() for parameter in self._trained())
        for name in ("start", "momentum"):
            vector = state[name]
            if vector is not None and vector.numel() != numbers:
                raise CheckpointError(
                    f"the {name} of DiLoCo in the checkpoint has {vector.numel()} numbers, and the optimizers of this "
                    f"training have {numbers}: they must have the same parameters"
                )
            setattr(self, f"_{name}", None if vector is None else vector.to(self.root_device))
        self._steps = state["steps"]

    def rank_state(self) -> dict[str, Any]:
        return {
            "replica": joined(self._trained()) if self._replica is None else self._replica,
            "buffers": dict(self.module.named_buffers()),
            "optimizers": [super(DiLoCoStrategy, self).sharded_optimizer_state(one) for one in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
        }

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        assign(self._trained(), state["replica"].to(self.root_device))
        for name, buffer in self.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            self.load_sharded_optimizer_state(optimizer, saved)
        self.precision_plugin.load_state_dict(state["precision"])

    # The end

    def on_exception(self, exception: BaseException) -> None:
        self._is_alone = True  # the others may be gone
        super().on_exception(exception)

    def teardown(self) -> None:
        super().teardown()
        self._forget()
