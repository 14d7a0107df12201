"""Steps of a hand-written loop: forward and backward passes, and optimizer steps with accumulated gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dstrat.data.limits import check_count
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.optimizers import Optimization, check_clipping, read_optimizers
from dstrat.parallel.loss_weights import LossWeights
from dstrat.parallel.optimizer_closures import closure_of_computed
from dstrat.parallel.separate_modules import SeparateModules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import Strategy


T = TypeVar("T")

_STEP_WITH_CLOSURE = (
    "call loop.step(closure=closure), where the closure clears gradients, calls compute and backward, and returns the "
    "loss"
)


class FunctionSteps:
    """Steps whose first argument is the function to call, with the other arguments."""

    @staticmethod
    def training_step(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function that computes a loss."""
        return function(*args, **kwargs)

    validation_step = predict_step = training_step


class Steps:
    """Runs the steps of a module that its strategy has set up.

    Gradients are kept from a backward pass until their optimizer steps.  In a backward pass after a step, gradients
    that no optimizer has used are cleared, since they are of another loss.

    Args:
        settings: The settings of the module's optimization.

    Attributes:
        num_done: Number of optimizer steps.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._strategy = settings, settings.strategy
        self._weights = LossWeights(settings.strategy)
        self._computes_gradients = False
        self._computed: tuple[Any, Any] | None = None  # loss and weight, whose gradients wait for backward
        self._in_group = 0  # batches accumulated since the last optimizer step
        self._due: list[Optimizer] = []  # have not stepped since the last backward pass
        self.num_done = 0

    def begin(self) -> None:
        """Take over the gradients of a strategy that computes them with the loss, such as through stages.

        Raises:
            ConflictError: The strategy runs optimizer steps too, or there are several optimizers.
        """
        strategy = self._strategy
        compiled = strategy.compiled_steps()
        if compiled is None:
            return
        if compiled.optimizer_steps > 0:
            raise ConflictError(
                f"{type(strategy).__name__} runs whole optimizer steps here, so that a loop of one's own cannot call "
                "backward: use a Trainer, or choose another strategy"
            )
        if len(strategy.optimizers) > 1:
            raise ConflictError(
                f"{type(strategy).__name__} runs forward and backward passes together here, for all parameters, and "
                f"setup made {len(strategy.optimizers)} optimizers: put the parameters into groups of one"
            )
        self._computes_gradients = True
        strategy.weigh_batch = lambda weight: self._weighted(torch.ones_like(weight), weight)

    def compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a training step with gradients, otherwise an evaluation step; see :meth:`dstrat.OwnLoop.compute`."""
        strategy = self._strategy
        if not torch.is_grad_enabled():
            output: T = strategy.validation_step(function, *args, **kwargs)
            strategy.accelerator.end_graph("evaluation_step")
            return output
        if not self._settings.is_fitting:
            raise MisuseError(
                "compute with gradients is a training step, and setup got no optimizers: evaluate in "
                "`with loop.evaluation():`, or pass setup a function that makes them"
            )
        self._drop_computed()
        with self._synchronization():
            outputs: Any = strategy.training_step(function, *args, **kwargs)
        if self._computes_gradients:
            has_weight = isinstance(outputs, Mapping)
            self._computed = (outputs["loss"], outputs["weight"]) if has_weight else (outputs, None)
            outputs = self._computed if has_weight else outputs
        computed: T = outputs
        return computed

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Compute the gradients of a loss, divided by the number of accumulated batches, and by its weight."""
        if self._computes_gradients:
            self._take_computed(loss, weight)
            self._due = list(self._strategy.optimizers)
            return
        if weight is not None or self._weights.is_used is not False:
            loss = self._weighted(loss, weight)
        # Some optimizers have stepped since the last backward pass, and the others' gradients are of that pass.
        if 0 < len(self._due) < len(self._strategy.optimizers):
            for optimizer in self._due:
                optimizer.zero_grad()
        accumulate = self._settings.accumulate_grad_batches
        with self._synchronization():
            self._strategy.backward(loss if accumulate == 1 else loss / accumulate)
        self._strategy.accelerator.end_graph("backward")
        self._due = list(self._strategy.optimizers)

    def _take_computed(self, loss: Tensor, weight: Any) -> None:
        """Count the gradients that compute has left as those of a loss and its weight."""
        expected = self._computed
        if expected is None or loss is not expected[0] or weight is not expected[1]:
            name = type(self._strategy).__name__
            raise MisuseError(
                f"backward got something else than compute returned last, for which {name} has computed the gradients: "
                "pass the loss of compute, and its weight if it returned one, as they are and once; another factor or "
                "weight belongs into configure_pipeline"
            )
        self._computed = None

    def _drop_computed(self) -> None:
        """Clear gradients that compute has left and no backward has taken, such as those of a loss of nan."""
        if self._computed is None:
            return
        if self._due or self._settings.accumulate_grad_batches > 1:
            raise MisuseError(
                "compute has added the gradients of a batch to those of others, and backward was not called for it: "
                f"{type(self._strategy).__name__} computes gradients with the loss, so call loop.backward(loss) for "
                "each batch; one can be left out only with accumulate_grad_batches=1 and a step for each batch"
            )
        self._strategy.optimizers[0].zero_grad()
        self._computed = None

    def _weighted(self, loss: Tensor, weight: Any) -> Tensor:
        number, accumulate = self._in_group + 1, self._settings.accumulate_grad_batches
        caller, advice = "backward got", "call loop.backward(loss, weight=n)"
        if self._computes_gradients:
            caller, advice = "configure_pipeline gave", "let it return a Pipeline(weight=...)"
        self._weights.agree(
            has_weight=weight is not None,
            caller=caller,
            batch=f"batch {number} of optimizer step {self.num_done + 1}",
            advice=advice,
        )
        if weight is None:
            return loss
        if self._due and accumulate > 1:
            raise MisuseError(
                f"backward was called twice with a weight for batch {number} of accumulate_grad_batches={accumulate}: "
                "add the losses of a batch, and call it once before step"
            )
        return self._weights.scale(loss, weight, is_first=self._in_group == 0)

    def step(self, optimizer: Optimizer | None, closure: Callable[[], Any] | None = None) -> bool:
        """Step an optimizer, once per group of accumulated batches; return whether it stepped."""
        optimizer = self._select(optimizer)
        if closure is not None:
            self._step_with_closure(optimizer, closure)
            return True
        if not any(optimizer is one for one in self._due):
            raise MisuseError("step was called without gradients: call loop.backward(loss) before")
        self._drop_computed()  # raises, as gradients are due
        strategy = self._strategy
        self._in_group += 1
        is_complete = self._in_group == self._settings.accumulate_grad_batches
        # A strategy that accumulates by itself counts the batches in its optimizer's step.
        if is_complete or strategy.accumulates_gradients:
            prepare = self._preparation(optimizer, is_complete=is_complete)
            closure = closure_of_computed(optimizer, _STEP_WITH_CLOSURE, prepare)
            strategy.optimizer_step(optimizer, closure, strategy.model)
            strategy.accelerator.end_graph("optimizer_step")
        if is_complete:
            optimizer.zero_grad()
            self._in_group, self.num_done = 0, self.num_done + 1
        self._due = [one for one in self._due if one is not optimizer]
        return is_complete

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        """Step an optimizer that computes the loss in its step, with gradients clipped each time."""
        accumulate = self._settings.accumulate_grad_batches
        if accumulate > 1:
            raise ConflictError(
                f"step got a closure, which computes the gradients of a whole step, and accumulate_grad_batches="
                f"{accumulate} adds those of several batches: leave one of the two out"
            )
        prepare = self._preparation(optimizer, is_complete=True)

        def compute() -> Any:
            self._due = [one for one in self._due if one is not optimizer]
            with torch.enable_grad():  # an optimizer's step is under no_grad, and some call the closure there
                loss = closure()
            if not any(optimizer is one for one in self._due):
                raise MisuseError("the closure of a step left no gradients: call loop.backward(loss) in it")
            prepare()
            return loss

        self._strategy.optimizer_step(optimizer, compute, self._strategy.model)
        self._strategy.accelerator.end_graph("optimizer_step")
        optimizer.zero_grad()
        self.num_done += 1
        self._due = [one for one in self._due if one is not optimizer]

    def check_no_pending(self) -> None:
        """Raise an error if accumulated gradients wait for an optimizer step.

        Not checked with several optimizers, as some gradients may never be used, nor with LBFGS, which runs its
        backward passes itself.

        Raises:
            MisuseError: Gradients wait for an optimizer step.
        """
        optimizers = self._strategy.optimizers
        is_plain = len(optimizers) == 1 and not isinstance(optimizers[0], torch.optim.LBFGS)
        num_pending = self._in_group + (is_plain and bool(self._due))
        if num_pending:
            raise MisuseError(
                f"the gradients of {num_pending} of accumulate_grad_batches={self._settings.accumulate_grad_batches} "
                "batches wait for their step, and are in no checkpoint: save when loop.step() has returned True"
            )

    def resume_after(self, num_done: int) -> None:
        """Continue after a number of steps, without accumulated gradients."""
        for optimizer in self._strategy.optimizers:
            optimizer.zero_grad()
        self._in_group, self._due, self._computed, self.num_done = 0, [], None, num_done

    def _select(self, optimizer: Optimizer | None) -> Optimizer:
        optimizers = self._strategy.optimizers
        selected = optimizers[0] if optimizer is None and len(optimizers) == 1 else optimizer
        if selected is None or not any(selected is one for one in optimizers):
            received = "no optimizer" if selected is None else f"a {type(selected).__name__} that setup did not make"
            raise MisuseError(f"step got {received}: pass one of the {len(optimizers)} in loop.optimizers")
        return selected

    def _synchronization(self) -> AbstractContextManager[Any]:
        """Return the context of forward and backward passes: only the last ones of a group synchronize gradients."""
        is_last = self._in_group + 1 == self._settings.accumulate_grad_batches
        if is_last or self._strategy.accumulates_gradients:
            return nullcontext()
        return self._strategy.no_backward_sync()

    def _preparation(self, optimizer: Optimizer, *, is_complete: bool) -> Callable[[], None]:
        """Return the closure of an optimizer's step, which does not compute the gradients again."""
        limit, algorithm = self._settings.gradient_clip_val, self._settings.gradient_clip_algorithm
        accumulate = self._settings.accumulate_grad_batches

        def prepare() -> None:
            if not is_complete:
                return
            # Gradients that compute has left are not divided by the number of batches.
            factor: Any = 1 / accumulate if self._computes_gradients else 1
            if self._weights.is_used and accumulate > 1:
                factor = factor * accumulate * self._weights.correction()
            if accumulate > 1 and (self._weights.is_used or self._computes_gradients):
                self._strategy.scale_gradients(optimizer, factor)
            if limit is not None:  # without clipping, the precision unscales within its step
                self._strategy.unscale_gradients(optimizer)
                self._strategy.clip_gradients(optimizer, limit, algorithm)

        return prepare


# Settings of a hand-written loop


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a module's optimization, which strategies need before they set the module up.

    Attributes:
        strategy: The strategy, whose module is on its device and wrapped when optimizers are made.
        make_optimizers: Returns an optimizer of a module, or any result that ``configure_optimizers`` may have; None if
            the module is only evaluated.
        accumulate_grad_batches: Number of batches whose gradients make up one optimizer step.
        gradient_clip_val: Maximal norm or value of gradients; None and 0 do not clip.
        gradient_clip_algorithm: How gradients are clipped.
    """

    strategy: Strategy
    make_optimizers: Callable[..., Any] | None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: ClipAlgorithm = "norm"

    def __post_init__(self) -> None:
        if self.make_optimizers is not None and not callable(self.make_optimizers):
            raise MisuseError(
                f"setup needs a function, not a {type(self.make_optimizers).__name__}: optimizers are "
                "made after the module has been sharded, so pass lambda module: torch.optim.AdamW(module.parameters())"
            )
        check_count(self.accumulate_grad_batches, "accumulate_grad_batches", 1)
        check_clipping(self.gradient_clip_val, self.gradient_clip_algorithm)
        # Strategies compare it with None, as a Trainer's, which sets 0 to None too.
        object.__setattr__(self, "gradient_clip_val", self.gradient_clip_val or None)

    @property
    def is_fitting(self) -> bool:
        """Whether the module is going to be trained."""
        return self.make_optimizers is not None

    def configure_optimizers(self) -> Optimization:
        """Create the optimizers of the module in its current state, and their schedulers."""
        assert self.make_optimizers is not None  # noqa: S101 - a strategy asks only where is_fitting is True
        module = self.strategy.module
        modules = module.children() if isinstance(module, SeparateModules) else (module,)
        return read_optimizers(self.make_optimizers(*modules), steps_schedulers=False)  # the user's loop steps them
