"""Strategies from whose checkpoints a training does not go on."""

from __future__ import annotations

import dataclasses

import torch
from tests.broken_strategies.good import Averaging

from dstrat.parallel.collectives import take_from_first_rank
from dstrat_ddp import DDPStrategy


class LosesTheOptimizer(DDPStrategy):
    def optimizer_state(self, optimizer):
        return {**super().optimizer_state(optimizer), "state": {}}

    def sharded_optimizer_state(self, optimizer):
        return {**super().sharded_optimizer_state(optimizer), "state": {}}


class ForgetsToLoadTheOptimizer(DDPStrategy):
    def load_optimizer_state(self, optimizer, state):
        pass

    load_sharded_optimizer_state = load_optimizer_state


class ForgetsToLoadTheWeights(DDPStrategy):
    def load_module_state_dict(self, state, strict=True):
        pass


class LosesTheBuffers(DDPStrategy):
    def module_state_dict(self):
        names = dict(self.module.named_parameters())
        return {name: value for name, value in super().module_state_dict().items() if name in names}


class SavesTheNamesOfItsWrapper(Averaging):
    def module_state_dict(self):
        return {f"module.{name}": value for name, value in super().module_state_dict().items()}

    def load_module_state_dict(self, state, strict=True):
        super().load_module_state_dict({name.removeprefix("module."): value for name, value in state.items()})


class DrawsRandomNumbersWhenItBegins(DDPStrategy):
    def setup(self, trainer):
        self.noise = None
        super().setup(trainer)

    def training_step(self, *args, **kwargs):
        if self.noise is None:
            self.noise = torch.rand(1)
        return super().training_step(*args, **kwargs)


class KeepsMomentumToItself(Averaging):
    """Remembers the last gradients, and tells no checkpoint of them."""

    def setup(self, trainer):
        self.last = None
        super().setup(trainer)

    def synchronize_gradients(self, gradients):
        super().synchronize_gradients(gradients)
        now = [gradient.clone() for gradient in gradients]
        for gradient, last in zip(gradients, self.last or now, strict=True):
            gradient.add_(last, alpha=0.5)
        self.last = now


class RestoresTheOptimizerOntoOtherParameters(DDPStrategy):
    """Matches states with parameters by their shapes, of which several are the same."""

    def load_sharded_optimizer_state(self, optimizer, state):
        states = dict(state["state"])
        one, other = "layers.0.bias", "layers.2.bias"
        states[one], states[other] = states[other], states[one]
        super().load_sharded_optimizer_state(optimizer, {**state, "state": states})


class GoesOnBeforeTheCheckpointIsThere(DDPStrategy):
    def save_checkpoint(self, checkpoint, path):
        if self.checkpoint_io.is_collective or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path)


class WritesItInEveryRank(DDPStrategy):
    def save_checkpoint(self, checkpoint, path):
        self.checkpoint_io.save_checkpoint(checkpoint, path)
        self.barrier("save_checkpoint")


class GoesOnWithTheBuffersOfRank0(DDPStrategy):
    def __init__(self, **kwargs):
        super().__init__(**{"broadcast_buffers": False, **kwargs})  # or evaluation would share them anyway

    def load_rank_state(self, state):
        super().load_rank_state(state)
        take_from_first_rank(self.module.buffers())


class DividesTheOptimizer(Averaging):
    """Declares that each rank has half of the optimizer's state, which is what it returns for a checkpoint."""

    replicates_state = False

    def memory_layout(self, training):
        replicated = training.replicated
        return dataclasses.replace(replicated, optimizer_state=replicated.optimizer_state // training.world_size)

    def sharded_optimizer_state(self, optimizer):
        state = super().sharded_optimizer_state(optimizer)
        names = sorted(state["state"])[self.global_rank :: self.world_size]
        return {**state, "state": {name: state["state"][name] for name in names}}


class SendsTheOptimizerForASave(DividesTheOptimizer):
    def sharded_optimizer_state(self, optimizer):
        for entry in optimizer.state.values():
            for value in entry.values():
                self.all_gather(value)
        return super().sharded_optimizer_state(optimizer)


class GathersTheOptimizerForASave(DividesTheOptimizer):
    def sharded_optimizer_state(self, optimizer):
        return Averaging.sharded_optimizer_state(self, optimizer)
