"""Post-local SGD: gradients averaged for a while, and then parameters, now and then."""

import io
import logging

import pytest
import torch
from tests.hand_loop import Net, batches, one_pass, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.utils.data import DataLoader, TensorDataset

from dstrat import EMAWeightAveraging, TrainModule
from dstrat.errors import ConflictError
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


class Drifting(TrainModule):
    """Its replicas differ from the first step on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        self.before_the_end = None

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def on_train_end(self):
        self.before_the_end = self.layer.weight.item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drifting_fit(cluster, callbacks=(), max_steps=5, **paths):
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    strategy = DDPStrategy(ddp_comm_hook="post_localSGD", ddp_comm_state=state, model_averaging_period=100)
    module = Drifting()
    trainer = quiet_trainer(strategy, cluster, callbacks=list(callbacks), max_steps=max_steps)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=2), **paths)
    return trainer, module


def ends_of_training(cluster):
    _, module = drifting_fit(cluster)
    return module.before_the_end, module.layer.weight.item()


def test_a_training_ends_with_the_mean():
    (first, end), (second, other_end) = in_ranks(ends_of_training)
    assert first != second
    assert end == other_end == pytest.approx((first + second) / 2)


def averages_refused(cluster):
    with pytest.raises(ConflictError, match=r"post_localSGD.*lets each rank train weights of its own.*diloco"):
        drifting_fit(cluster, [EMAWeightAveraging()])


def test_averages_of_weights_are_refused():
    in_ranks(averages_refused)


def power_sgd_fit(cluster, max_steps=5, **paths):
    trainer = quiet_trainer(DDPStrategy(ddp_comm_hook="powerSGD"), cluster, max_steps=max_steps)
    trainer.fit(Drifting(), DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=2), **paths)
    return trainer, None


def warnings_of_a_resume(cluster, path, fit):
    trainer, _ = fit(cluster)
    trainer.save_checkpoint(path)
    log = io.StringIO()
    logging.getLogger("dstrat_ddp").addHandler(logging.StreamHandler(log))
    fit(cluster, max_steps=6, ckpt_path=path)
    return log.getvalue()


@pytest.mark.parametrize(
    ("fit", "end"),
    [(drifting_fit, " and its ranks from the weights of global rank 0\n"), (power_sgd_fit, "\n")],
    ids=["post-local SGD", "PowerSGD without a state"],
)
def test_a_resume_says_that_the_state_of_the_hook_begins_anew(tmp_path, fit, end):
    first, second = in_ranks(warnings_of_a_resume, path=tmp_path / "end", fit=fit)
    assert first == f"ddp_comm_state, which checkpoints do not have, resumes as in a new training{end}"
    assert second == ""
