"""ZeRO stage 1 in one class: each rank keeps the optimizer's state of its share of the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1.
"""

import dataclasses
from itertools import chain

import torch.distributed as dist

from dstrat import GradientSyncStrategy, StrategyRegistry


@StrategyRegistry.register("zero1", description="each rank steps its share of the parameters", start_method="fork")
class Zero1Strategy(GradientSyncStrategy):
    """Data parallelism whose optimizer state is divided over the ranks, by whole parameters."""

    replicates_state = False

    def memory_layout(self, training):
        replicated = training.replicated
        state = -(-replicated.optimizer_state // training.world_size)
        return dataclasses.replace(replicated, optimizer_state=state)

    def owners(self, optimizer):
        """Yield each parameter of an optimizer with the rank that steps it; ranks own equally many elements."""
        owned = [0] * self.world_size
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            owner = owned.index(min(owned))
            owned[owner] += parameter.numel()
            yield parameter, owner

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        def compute():
            loss = closure()
            for parameter, owner in self.owners(optimizer):
                if owner != self.global_rank:
                    parameter.grad = None  # an optimizer leaves such a parameter alone, and has no state of it
            return loss

        output = super().optimizer_step(optimizer, compute, model, **kwargs)
        for parameter, owner in self.owners(optimizer):
            dist.broadcast(parameter.detach(), owner)
        return output

    # State: the optimizer's has entries of this rank's parameters only; the core gathers and reshards it

    def local_weights(self):
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def optimizer_template(self, optimizer):
        return {"state": dict.fromkeys(self._foreign(optimizer))}  # entries of other ranks are not read

    def load_sharded_optimizer_state(self, optimizer, state):
        foreign = self._foreign(optimizer)
        own = {name: entry for name, entry in state["state"].items() if name not in foreign}
        super().load_sharded_optimizer_state(optimizer, {**state, "state": own})

    def _foreign(self, optimizer):
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {names[parameter] for parameter, owner in self.owners(optimizer) if owner != self.global_rank}
