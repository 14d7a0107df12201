"""Strategies that apply a wrong gradient."""

from __future__ import annotations

import contextlib

from tests.broken_strategies.good import Averaging

from dstrat import take_from_first_rank
from dstrat_ddp import DDPStrategy


class ForgetsToAverage(Averaging):
    def synchronize_gradients(self, gradients):
        pass


class SumsGradients(Averaging):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient, reduce_op="sum"))


class DividesTwice(DDPStrategy):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss / self.world_size, *args, **kwargs)


class ScalesTheLossAgain(DDPStrategy):
    def setup(self, trainer):
        self.accumulates = trainer.accumulate_grad_batches
        super().setup(trainer)

    def backward(self, loss, *args, **kwargs):
        super().backward(loss / self.accumulates, *args, **kwargs)


class LosesWhatWasAccumulated(Averaging):
    @contextlib.contextmanager
    def no_backward_sync(self):
        with super().no_backward_sync():
            yield
        for parameter in self.module.parameters():
            parameter.grad = None


class IgnoresClipping(DDPStrategy):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        pass


class ClipsBeforeAveraging(Averaging):
    def setup(self, trainer):
        self.limit = trainer.gradient_clip_val
        super().setup(trainer)

    def synchronize_gradients(self, gradients):
        if self.limit is not None:
            super().clip_gradients(self.optimizers[0], self.limit)
        super().synchronize_gradients(gradients)

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        pass


class IgnoresTheLastGroup(DDPStrategy):
    def setup(self, trainer):
        self.group, self.count = trainer.accumulate_grad_batches, 0
        super().setup(trainer)

    def backward(self, loss, *args, **kwargs):
        self.count += 1
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        loss = closure()
        if self.count == self.group:
            optimizer.step(**kwargs)
        self.count = 0
        return loss


class AveragesWholeGroupsOnly(DDPStrategy):
    """Takes each group for a whole one, as a strategy that scales gradients by a count of its own."""

    def scale_gradients(self, optimizer, factor):
        pass


class KeepsItsOwnFirstValues(Averaging):
    def wrap_model(self, trainer):
        pass


class GivesNothingBack(Averaging):
    """Whether its ranks hold replicas depends on its options, as it does for DeepSpeed."""

    replicates_state = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.replicates_state = True

    def teardown(self):
        module = self.module
        super().teardown()
        module.to_empty(device="meta")


class OptimizesACopy(DDPStrategy):
    def setup_optimizers(self, trainer):
        import copy

        module, self._module = self._module, copy.deepcopy(self._module)
        trainer._module = lambda copied=self._module: copied
        super().setup_optimizers(trainer)
        self._module = module


class SumsAgainWhatWasSummed(Averaging):
    """Under accumulation, sums what was summed before with every further batch."""

    def backward(self, loss, *args, **kwargs):
        is_accumulating, self._is_accumulating = self._is_accumulating, True
        super().backward(loss, *args, **kwargs)
        self._is_accumulating = is_accumulating
        for parameter in self.module.parameters():
            summed = self.reduce(parameter.grad, reduce_op="sum")
            parameter.grad.copy_(summed if is_accumulating else summed / self.world_size)


class HasOneLearningRate(DDPStrategy):
    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]
        return super().optimizer_step(optimizer, closure, model, **kwargs)


class StepsTheSchedulerInEachRank(DDPStrategy):
    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        for _ in range(self.world_size - 1):
            for config in self.lr_schedulers:
                config.scheduler.step()
        return output


class KeepsItsOwnBuffers(Averaging):
    def wrap_model(self, trainer):
        take_from_first_rank(self.module.parameters())


class AveragesOnlyAfterTheStep(Averaging):
    """As a wrapper does that prepares for the backward pass when the step returns."""

    is_in_step = False

    def training_step(self, *args, **kwargs):
        self.is_in_step = True
        output = super().training_step(*args, **kwargs)
        self.is_in_step = False
        return output

    def backward(self, loss, *args, **kwargs):
        if self.is_in_step:
            self.precision_plugin.backward(loss, *args, **kwargs)
        else:
            super().backward(loss, *args, **kwargs)
