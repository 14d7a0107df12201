"""What DDPStrategy wraps, when, and how to wrap in something else."""

import logging

import pytest
import torch
from tests.hand_loop import Net, batches, one_pass, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dstrat.errors import MisuseError
from dstrat_ddp import DDPStrategy


class MyCustomDistributedDataParallel(DistributedDataParallel):
    forwards = 0

    def forward(self, *args, **kwargs):
        self.forwards += 1
        return super().forward(*args, **kwargs)


class CustomDDPStrategy(DDPStrategy):
    def configure_ddp(self):
        self.model = MyCustomDistributedDataParallel(self.model, device_ids=None)


def custom_wrapper(cluster):
    strategy = CustomDDPStrategy(ddp_comm_hook="allreduce")
    start(strategy, Net(), parts(cluster))
    losses = train(strategy)
    wrapper = strategy.model
    strategy.teardown()
    return losses, type(wrapper).__name__, wrapper.forwards, strategy.model is strategy.module


def test_configure_ddp_can_wrap_in_a_class_of_ones_own():
    for losses, name, forwards, unwrapped in in_ranks(custom_wrapper):
        assert losses == pytest.approx(single_device_losses(Net()), rel=1e-6)
        assert (name, forwards, unwrapped) == ("MyCustomDistributedDataParallel", 20, True)


class Averaging(nn.Module):
    """A wrapper that is no DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class AveragingStrategy(DDPStrategy):
    def configure_ddp(self):
        self.model = Averaging(self.model)


def foreign_wrapper(cluster):
    strategy = AveragingStrategy()
    start(strategy, Net(), parts(cluster))
    losses = train(strategy)
    strategy.teardown()
    return losses


def test_the_wrapper_need_not_be_ddp():
    for losses in in_ranks(foreign_wrapper):
        assert losses == pytest.approx(single_device_losses(Net()), rel=1e-6)


class NotingStrategy(DDPStrategy):
    def setup(self, trainer):
        assert self.model is self.module
        super().setup(trainer)
        self.noted = (isinstance(self.model, DistributedDataParallel), len(self.optimizers))


def overridden_setup(cluster):
    strategy = NotingStrategy()
    start(strategy, Net(), parts(cluster))
    strategy.teardown()
    return strategy.noted


def test_setup_can_be_overridden():
    assert in_ranks(overridden_setup) == [(True, 1), (True, 1)]


def evaluation(cluster, is_fitting):
    strategy = DDPStrategy()
    start(strategy, Net(), parts(cluster), is_fitting=is_fitting)
    wrapped = isinstance(strategy.model, DistributedDataParallel)
    num_batches = 3 + strategy.global_rank  # ranks may have different numbers of batches
    own = strategy.batch_to_device(list(batches(num_batches)))
    with torch.no_grad():
        losses = [float(strategy.validation_step(batch, index)) for index, batch in enumerate(own)]
    strategy.barrier()
    strategy.teardown()
    return wrapped, losses


def test_evaluation_waits_for_nobody():
    cases = {is_fitting: {"is_fitting": is_fitting} for is_fitting in (True, False)}
    for rank, found in enumerate(in_ranks(each, function=evaluation, cases=cases)):
        for is_fitting, (wrapped, losses) in found.items():
            assert wrapped == is_fitting
            assert len(losses) == 3 + rank


class NotingSteps(DDPStrategy):
    noted = ()

    def run_step(self, name, step, /, *args, **kwargs):
        self.noted += (name,)
        return super().run_step(name, step, *args, **kwargs)


def steps_in_one_method(cluster):
    strategy = NotingSteps()
    start(strategy, Net(), parts(cluster))
    losses = train(strategy)
    with torch.no_grad():
        strategy.validation_step(strategy.batch_to_device(next(batches())), 0)
    strategy.teardown()
    return losses, strategy.noted


def test_one_method_runs_training_and_evaluation():
    for losses, noted in in_ranks(steps_in_one_method):
        assert losses == pytest.approx(single_device_losses(Net()), rel=1e-6)
        assert noted == ("training_step",) * 20 + ("validation_step",)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))])


def frozen_module(cluster):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("dstrat_ddp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    strategy = DDPStrategy()
    start(strategy, Frozen(), parts(cluster))
    with strategy.no_backward_sync():
        loss = strategy.training_step(strategy.batch_to_device(next(batches())), 0)
    plain = strategy.model is strategy.module
    strategy.barrier()  # there was nothing else to wait for the others
    strategy.teardown()
    return plain, loss.requires_grad, records


def test_a_module_without_trainable_parameters_runs_as_it_is_and_that_is_logged():
    message = "Frozen has no trainable parameter, so that there is nothing to average"
    assert in_ranks(frozen_module) == [(True, False, [message])] * 2


def unfrozen_halfway(strategy, given, accumulate):
    """Losses of a training whose first layer is frozen (or all are) for the first five steps."""
    module = Net()
    module.layers[0].requires_grad_(False)
    start(strategy, module, given)
    losses = train(strategy, steps=5, accumulate=accumulate)
    module.layers[0].requires_grad_(True)
    losses += train(strategy, accumulate=accumulate)
    strategy.teardown()
    return losses


def unfrozen_with_ddp(cluster, accumulate, options):
    return unfrozen_halfway(DDPStrategy(**options), parts(cluster), accumulate)


def test_parameters_that_are_unfrozen_later_are_averaged_too():
    from dstrat.builtin.single_device import SingleDeviceStrategy

    options = {"plain": {}, "static": {"static_graph": True}, "hook": {"ddp_comm_hook": "allreduce"}}
    cases = {(name, n): {"options": given, "accumulate": n} for name, given in options.items() for n in (1, 2)}
    expected = {n: unfrozen_halfway(SingleDeviceStrategy(), parts(), n) for n in (1, 2)}
    for losses in in_ranks(each, function=unfrozen_with_ddp, cases=cases):
        assert losses == {(name, n): pytest.approx(expected[n], rel=1e-6) for name, n in cases}


def ignored_parameters(cluster):
    module = Net()
    module._ddp_params_and_buffers_to_ignore = ["layers.4.bias"]
    with torch.no_grad():
        module.layers[4].bias.fill_(cluster.global_rank)
    strategy = DDPStrategy()
    start(strategy, module, parts(cluster))
    one_pass(strategy, next(batches()), 0, 1)
    gradients = [strategy.all_gather(layer.grad) for layer in (module.layers[4].bias, module.layers[4].weight)]
    strategy.teardown()
    return [bool((gathered[0] == gathered[1]).all()) for gathered in gradients]


def test_parameters_that_ddp_is_told_to_ignore_are_ignored_under_their_own_names():
    assert in_ranks(ignored_parameters) == [[False, True]] * 2


def twice(cluster):
    strategy = DDPStrategy()
    results = []
    for _ in range(2):
        start(strategy, Net(), parts(cluster))
        results.append(train(strategy, steps=5))
        strategy.teardown()
        assert not torch.distributed.is_initialized()
    return results


def test_a_second_training_with_the_same_strategy_is_like_the_first():
    for first, second in in_ranks(twice):
        assert first == second


def sharded_optimizer(cluster):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharded(Net):
        def configure_optimizers(self):
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.05)

    strategy = DDPStrategy()
    start(strategy, Sharded(), parts(cluster))
    losses = train(strategy)
    [optimizer] = strategy.optimizers
    saved = strategy.optimizer_state(optimizer)
    state = strategy.broadcast(saved)
    begun = strategy.collectives_begun()
    strategy.load_optimizer_state(optimizer, state)
    collectives = strategy.collectives_begun() - begun
    strategy.teardown()
    return losses, len(state["state"]), len(list(strategy.module.parameters())), bool(saved), collectives


@pytest.mark.filterwarnings("ignore")
def test_the_state_of_an_optimizer_that_is_sharded_over_the_ranks_is_whole():
    outcomes = in_ranks(sharded_optimizer)
    for losses, with_state, parameters, _, collectives in outcomes:
        assert losses == pytest.approx(single_device_losses(Net()), rel=1e-6)
        assert with_state == parameters
        assert collectives == 0  # of a load: every rank has the full state
    assert [has_state for *_, has_state, _ in outcomes] == [True, False]


def names(cluster):
    strategy = DDPStrategy()
    start(strategy, Net(), parts(cluster))
    found = [*strategy.module_state_dict()]
    strategy.teardown()
    return found


def test_names_of_the_state_are_the_users():
    assert in_ranks(names, 1) == [[*Net().state_dict()]]


def shares(cluster):
    strategy = DDPStrategy()
    strategy.receive(parts(cluster))
    return strategy.distributed_sampler_kwargs, float(share(strategy, next(batches()))[0].sum())


def test_each_rank_reads_its_own_part():
    (first, one), (second, other) = in_ranks(shares)
    assert first == {"num_replicas": 2, "rank": 0}
    assert second == {"num_replicas": 2, "rank": 1}
    assert one != other


class Words(Net):
    def __init__(self, *, is_frozen=False):
        super().__init__()
        self.words = nn.Embedding(4, 3, max_norm=1.0).requires_grad_(not is_frozen)


def scaled_embedding(cluster):
    strategy = DDPStrategy()
    try:
        with pytest.raises(MisuseError) as raised:
            start(strategy, Words(), parts(cluster))
    finally:
        strategy.teardown()
    start(frozen := DDPStrategy(), Words(is_frozen=True), parts(cluster))
    frozen.teardown()
    return str(raised.value)


def test_an_embedding_that_each_rank_scales_for_its_batches_is_an_error():
    for message in in_ranks(scaled_embedding):
        assert message.startswith("'words' is an Embedding with max_norm=1.0, which scales its weight in each forward")


class FirstValues(Net):
    """A layer takes first values from its first batch; ``own`` is a parameter that each rank has for itself."""

    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self, *, from_batch=True):
        super().__init__()
        self.shift, self.own = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(1))
        self.from_batch = from_batch

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        with torch.no_grad():
            if batch_idx == 0 and self.from_batch:
                self.shift.copy_(inputs.mean(0))
            self.own.add_(inputs.abs().sum())
        return nn.functional.mse_loss(self.layers(inputs - self.shift) + 0 * self.own, targets)


def first_values(cluster):
    start(strategy := DDPStrategy(), FirstValues(), parts(cluster))
    with pytest.raises(MisuseError) as raised:
        train(strategy)
    strategy.barrier()
    strategy.teardown()
    start(strategy := DDPStrategy(), FirstValues(from_batch=False), parts(cluster))
    train(strategy)
    strategy.teardown()
    return str(raised.value)


def test_first_values_from_the_batch_of_a_rank_are_an_error_but_those_of_parameters_that_are_left_out():
    for message in in_ranks(first_values):
        assert message.startswith("ranks have other values of the parameter 'shift' in optimizer step 2 (norms from ")
