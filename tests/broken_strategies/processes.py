"""Strategies that are bad guests: they leave something behind, hide an error, or work once."""

from __future__ import annotations

import contextlib
import subprocess
import threading

import torch
from tests.broken_strategies.good import Averaging

from dstrat_ddp import DDPStrategy


class LeaksAProcess(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        self.helper = subprocess.Popen(["sleep", "120"], start_new_session=True)

    def __getstate__(self):
        return {**super().__getstate__(), "helper": None}


class SwallowsExceptions(Averaging):
    def training_step(self, *args, **kwargs):
        try:
            return super().training_step(*args, **kwargs)
        except ValueError:
            return sum(parameter.sum() for parameter in self.module.parameters()) * 0


class WaitsForTheOthersWhenItBreaks(DDPStrategy):
    def on_exception(self, exception):
        self.barrier("everybody tidies up")
        super().on_exception(exception)


class WorksOnce(DDPStrategy):
    has_worked = False

    def setup(self, trainer):
        if WorksOnce.has_worked:
            raise RuntimeError("the engine was set up already")
        WorksOnce.has_worked = True
        super().setup(trainer)


class LeavesTheGroupOpen(DDPStrategy):
    def teardown(self):
        self._end_training()


class CannotEndBeforeItHasBegun(DDPStrategy):
    def on_exception(self, exception):
        self.engine.abort()

    def setup(self, trainer):
        self.engine = threading.Event()
        super().setup(trainer)


class SetsTheAcceleratorUpTwice(DDPStrategy):
    def setup(self, trainer):
        self.accelerator.setup(self.root_device)
        super().setup(trainer)


class KeepsTheWrapperAsModule(DDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)
        self._module = self.model


class CannotTravel(DDPStrategy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()


class SharesItsHistory(DDPStrategy):
    def __init__(self, *args, history=[], **kwargs):  # noqa: B006 - the fault
        super().__init__(*args, **kwargs)
        self.history = history


class SeedsAllRanksAlike(DDPStrategy):
    def setup(self, trainer):
        torch.manual_seed(0)
        super().setup(trainer)


class KeepsItsHooks(Averaging):
    def setup(self, trainer):
        super().setup(trainer)
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        parameter.grad.copy_(self.reduce(parameter.grad))

    def synchronize_gradients(self, gradients):
        pass


class LeavesItsDtype(DDPStrategy):
    def setup(self, trainer):
        torch.set_default_dtype(torch.float64)
        super().setup(trainer)


class KeepsTheWeightsOfTheEvaluation(DDPStrategy):
    """Evaluates the mean of the last weights, and trains on from it."""

    @contextlib.contextmanager
    def evaluation_context(self):
        for parameter in self.module.parameters():
            parameter.data.mul_(0.99)
        yield


class TidiesUpOnlyAfterSuccess(DDPStrategy):
    is_busy = False

    def setup(self, trainer):
        if TidiesUpOnlyAfterSuccess.is_busy:
            raise RuntimeError("the engine is busy")
        TidiesUpOnlyAfterSuccess.is_busy = trainer.is_fitting
        super().setup(trainer)

    def finish_training(self):
        TidiesUpOnlyAfterSuccess.is_busy = False
        super().finish_training()
