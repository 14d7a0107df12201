"""QAdam: Adam with a warm-up, and then a frozen variance and compressed momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim import Optimizer

from dstrat.errors import MisuseError, RequestError
from dstrat_bagua.algorithm import Algorithm, check_count, check_flag, check_real
from dstrat_bagua.compression import average_compressed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim.optimizer import ParamsT

    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Bucket, Work


class QAdamOptimizer(Optimizer):
    r"""Adam whose second moment is updated in the first steps only.

    In the first ``warmup_steps`` steps it is Adam.  After these its bias-corrected second moment :math:`\hat v` stays,
    and the step is :math:`\theta \leftarrow \theta - lr \cdot \hat m_t / (\sqrt{\hat v} + \epsilon)` (Tang et al.,
    1-bit Adam, https://arxiv.org/abs/2102.02888).  Bagua continues with the bias correction of a second moment that no
    longer changes, so that its steps grow; here both are frozen.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate.
        warmup_steps: Number of first steps that are Adam's, at least 1.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Factor of the parameters that is added to gradients.

    Raises:
        RequestError: A number is outside of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, is_possible, range_ in (
            ("lr", lr, lr >= 0, "at least 0"),
            ("eps", eps, eps >= 0, "at least 0"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
        ):
            if not is_possible:
                raise RequestError(f"{name} {value!r} of QAdamOptimizer must be {range_}")
        self.warmup_steps = check_count("warmup_steps", warmup_steps, least=1, unit="optimizer steps")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients.

        Args:
            closure: Computes loss and gradients, and returns the loss.

        Returns:
            The loss of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())  # a tensor, as in torch's Adam, so that a checkpoint has it
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        if step <= self.warmup_steps:
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction = 1 - beta2 ** min(step, self.warmup_steps)
        denominator = state["exp_avg_sq"].div(correction).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))


class QAdamAlgorithm(Algorithm):
    """Average of gradients in the warm-up of QAdamOptimizer, and after it of compressed momentum.

    After the warm-up each rank computes the momentum that its gradient leads to, and ranks average these with one byte
    per value, as ByteGrad does with gradients.  The gradients of the parameters become those that lead to the averaged
    momentum, so that clipping and loss scales work as usual.  Tang et al., 1-bit Adam: Communication Efficient
    Large-Scale Training with Adam's Convergence Speed, https://arxiv.org/abs/2102.02888, with eight bits instead of
    one, and without the feedback of errors, as in Bagua.

    Args:
        q_adam_optimizer: The optimizer; None for the one that the module configures.
        hierarchical: Whether the ranks of a machine average without compression first, and then the machines with it.
            On a single machine nothing is compressed then.

    Raises:
        MisuseError: An option has another type.
    """

    def __init__(self, q_adam_optimizer: QAdamOptimizer | None = None, hierarchical: bool = True) -> None:
        if q_adam_optimizer is not None and not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise MisuseError(
                f"q_adam_optimizer {q_adam_optimizer!r} must be a QAdamOptimizer, or left out for that of the module"
            )
        self.hierarchical = check_flag("hierarchical", hierarchical)
        self._expected = q_adam_optimizer

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        check_real(replica, "qadam")
        self._optimizer = self._only_optimizer(replica)
        self._beta1 = {
            id(parameter): group["betas"][0] for group in self._optimizer.param_groups for parameter in group["params"]
        }
        lacking = [name for name, parameter in replica.parameters.items() if id(parameter) not in self._beta1]
        if lacking:
            raise MisuseError(
                f"algorithm 'qadam' sends the momentum of every trainable parameter, and QAdamOptimizer lacks "
                f"{', '.join(lacking[:10])}: pass self.parameters() to it, or freeze them"
            )
        self._ranks, self._thread = replica.open_ranks(hierarchical=self.hierarchical), replica.start_thread()

    def _only_optimizer(self, replica: Replica) -> QAdamOptimizer:
        [*optimizers] = replica.optimizers
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "nothing"
            raise MisuseError(
                f"algorithm 'qadam' needs one QAdamOptimizer, and configure_optimizers returned {names}: return "
                "dstrat_bagua.QAdamOptimizer(self.parameters(), lr=...)"
            )
        if self._expected is not None and self._expected is not optimizers[0]:
            raise MisuseError(
                "q_adam_optimizer is another optimizer than the one that configure_optimizers returned: leave it out"
            )
        return optimizers[0]

    def reduce_gradients(self, bucket: Bucket) -> Work:
        states = [self._optimizer.state[parameter] for parameter in bucket.parameters]
        # A parameter that had no gradient so far begins its own warm-up, whatever the step of the training.
        is_warming_up = any(int(state.get("step", 0)) < self._optimizer.warmup_steps for state in states)
        return self._thread.submit(self._average if is_warming_up else self._average_momentum, bucket)

    def _average(self, bucket: Bucket) -> None:
        self._ranks.run(self._ranks.average, bucket.flat)

    @torch.no_grad()
    def _average_momentum(self, bucket: Bucket) -> None:
        state = self._optimizer.state
        before = [
            (view, state[parameter]["exp_avg"], self._beta1[id(parameter)])
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        ]
        for view, momentum, beta1 in before:
            view.mul_(1 - beta1).add_(momentum, alpha=beta1)  # the momentum that QAdamOptimizer would compute
        self._ranks.run(lambda values: average_compressed(values, self._ranks.group), bucket.flat)
        for view, momentum, beta1 in before:
            view.sub_(momentum, alpha=beta1).div_(1 - beta1)  # the gradient from which it computes the average
