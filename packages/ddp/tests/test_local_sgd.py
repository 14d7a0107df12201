"""Post-local SGD: gradients averaged for a while, and then parameters, now and then."""

import pytest
import torch
from tests.hand_loop import Net, batches, one_pass, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from dstrat.parallel.separate_modules import SeparateModules
from dstrat_ddp import DDPStrategy

START, PERIOD = 2, 3


def local_strategy(cluster, averages_gradients_on_machine, module=None):
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=START,
        post_local_gradient_allreduce=averages_gradients_on_machine,
    )
    strategy = DDPStrategy(ddp_comm_hook="post_localSGD", ddp_comm_state=state, model_averaging_period=PERIOD)
    start(strategy, module or Net(), parts(cluster))
    return strategy, state


def drifts(cluster, averages_gradients_on_machine):
    """Whether the ranks' parameters differ, after each of ten steps."""
    strategy, state = local_strategy(cluster, averages_gradients_on_machine)
    [optimizer] = strategy.optimizers
    found = []
    for index, batch in enumerate(batches(10)):

        def closure(batch=batch, index=index):
            optimizer.zero_grad()
            return one_pass(strategy, batch, index, 1)

        strategy.optimizer_step(optimizer, closure, strategy.model)
        everyone = [strategy.all_gather(parameter.detach()) for parameter in strategy.module.parameters()]
        found.append(any(bool((gathered != gathered[0]).any()) for gathered in everyone))
    had_subgroup = state.subgroup is not None
    strategy.teardown()
    return found, had_subgroup, state.subgroup


def test_parameters_drift_from_the_start_on_and_meet_at_each_averaging_except_inside_a_machine():
    drifting = [step >= START and (step - START) % PERIOD != 0 for step in range(10)]
    cases = {inside: {"averages_gradients_on_machine": inside} for inside in (False, True)}
    for found in in_ranks(each, function=drifts, cases=cases):
        assert found[False][:2] == (drifting, False)
        assert found[True] == ([False] * 10, True, None)  # no subgroup is left, so that the state serves another run


def losses_inside_one_machine(cluster):
    strategy, _ = local_strategy(cluster, averages_gradients_on_machine=True)
    losses = train(strategy)
    strategy.teardown()
    return losses


def test_on_one_machine_it_is_plain_ddp():
    for losses in in_ranks(losses_inside_one_machine):
        assert losses == pytest.approx(single_device_losses(Net()), rel=1e-6)


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.layers[:2].parameters(), lr=0.1)


def steps_with_two_optimizers(cluster):
    strategy, _ = local_strategy(cluster, averages_gradients_on_machine=False, module=TwoOptimizers())
    optimizers = [*strategy.optimizers, torch.optim.SGD(strategy.module.layers[2:].parameters(), lr=0.1)]
    found = []
    for index, batch in enumerate(batches(10)):
        strategy.module.zero_grad()
        one_pass(strategy, batch, index, 1)
        for optimizer in optimizers:
            strategy.optimizer_step(optimizer, lambda: None, strategy.model)
        everyone = [strategy.all_gather(parameter.detach()) for parameter in strategy.module.parameters()]
        found.append([bool((gathered != gathered[0]).any()) for gathered in everyone])
    strategy.teardown()
    return found


def test_each_optimizer_counts_its_own_steps():
    for found in in_ranks(steps_with_two_optimizers):
        for step, drifted in enumerate(found):
            apart = step >= START and (step - START) % PERIOD != 0
            assert drifted == [apart] * len(drifted)


class Pair(SeparateModules):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drift_of_two_modules(cluster):
    state = PostLocalSGDState(None, None, start_localSGD_iter=4, post_local_gradient_allreduce=False)
    strategy = DDPStrategy(ddp_comm_hook="post_localSGD", ddp_comm_state=state, model_averaging_period=2)
    modules = {"first": Net(), "second": Net()}
    start(strategy, Pair(modules), parts(cluster))
    for batch in batches(3):
        for module in modules.values():
            step = module.training_step
            loss = strategy.model(lambda run, *inputs: run(*inputs), step, share(strategy, batch), 0)
            strategy.backward(loss)
        strategy.optimizers[0].step()
        strategy.optimizers[0].zero_grad()
    parameters = [parameter.detach() for parameter in strategy.module.parameters()]
    drift = max(float((strategy.broadcast(parameter) - parameter).abs().max()) for parameter in parameters)
    strategy.barrier()
    strategy.teardown()
    return drift


def test_iterations_of_modules_that_take_turns_are_counted_for_each():
    assert in_ranks(drift_of_two_modules) == [0, 0]
