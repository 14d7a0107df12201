"""FairScale's sharded optimizer and ShardedDataParallel: the losses of one device, and a share of the state."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from tests.hand_loop import BlockNet, Run, batches, losses_of, one_pass, parts, start, train
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

from dstrat import GatheredOptimizer
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.optimizers import Optimization, SchedulerConfig
from dstrat.interfaces.strategy import Parts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fairscale", reason="needs fairscale")
    from dstrat_fairscale import DDPFullyShardedStrategy, DDPShardedStrategy, DDPSpawnShardedStrategy


def losses(cluster, training):
    return losses_of(DDPShardedStrategy(), BlockNet(), parts(cluster), **training)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_are_those_of_one_device(world_size):
    cases = {way: {"training": training} for way, training in WAYS.items()}
    expected = losses_of_one_device(BlockNet)
    for found in in_ranks(each, world_size, function=losses, cases=cases):
        assert found == expected


class WithScheduler(Run):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        then = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [4])
        return Optimization(optimizers=(optimizer,), schedulers=(SchedulerConfig(scheduler=both),))


def scheduled(cluster):
    strategy = DDPShardedStrategy() if cluster else SingleDeviceStrategy()
    strategy.receive(parts(cluster))
    strategy.connect(BlockNet())
    strategy.setup_environment()
    strategy.setup(WithScheduler(strategy.module))
    found = []
    for batch in batches(12):
        [optimizer] = strategy.optimizers
        optimizer.zero_grad()
        found.append(float(strategy.reduce(one_pass(strategy, batch, 0, 1))))
        strategy.optimizer_step(optimizer, lambda: None)
        strategy.lr_schedulers[0].scheduler.step()
    strategy.teardown()
    return found


def test_schedulers_belong_to_the_sharded_optimizer():
    expected = scheduled(None)
    for found in in_ranks(scheduled):
        assert found == pytest.approx(expected, rel=1e-6)


def saved(cluster):
    strategy = DDPShardedStrategy()
    start(strategy, BlockNet(), parts(cluster))
    train(strategy, steps=5)
    [optimizer] = strategy.optimizers
    held = sum(value.numel() for entry in optimizer.optim.state.values() for value in entry.values())
    state = (strategy.module_state_dict(), strategy.optimizer_state(optimizer))
    written = io.BytesIO()
    torch.save(state, written)
    found = train(strategy, steps=5)
    strategy.teardown()
    return written.getvalue(), held, found


def resumed(cluster, state, optimizer):
    strategy = DDPShardedStrategy()
    start(strategy, BlockNet(), parts(cluster))
    strategy.load_module_state_dict(state)
    strategy.load_optimizer_state(strategy.optimizers[0], optimizer if strategy.is_global_zero else {})
    found = train(strategy, steps=5)
    strategy.teardown()
    return found


def test_the_state_is_that_of_one_device_and_each_rank_holds_a_share():
    alone = SingleDeviceStrategy()
    start(alone, BlockNet(), parts())
    train(alone, steps=5)
    expected_state = copy.deepcopy(alone.optimizer_state(alone.optimizers[0])["state"])
    expected = train(alone, steps=5)
    (written, held, first), (other, held_too, _) = in_ranks(saved)
    state, optimizer = torch.load(io.BytesIO(written))
    assert torch.load(io.BytesIO(other))[1] == {}
    assert optimizer["state"].keys() == expected_state.keys()
    for index, entry in expected_state.items():
        torch.testing.assert_close(optimizer["state"][index]["exp_avg"], entry["exp_avg"], rtol=1e-4, atol=1e-7)
    whole = sum(value.numel() for entry in expected_state.values() for value in entry.values())
    assert held + held_too == whole
    assert max(held, held_too) < 0.6 * whole
    assert first == pytest.approx(expected, rel=1e-6)
    for found in in_ranks(resumed, state=state, optimizer=optimizer):
        assert found == pytest.approx(expected, rel=1e-6)


def manual(cluster):
    """Two backward passes in one step."""
    strategy = DDPShardedStrategy() if cluster else SingleDeviceStrategy()

    class Manual(BlockNet):
        def training_step(self, batch, batch_idx):
            found = []
            [optimizer] = strategy.optimizers
            for _ in range(2):
                optimizer.zero_grad()
                loss = super().training_step(batch, batch_idx)
                strategy.backward(loss)
                optimizer.step()
                found.append(loss.detach())
            return sum(found)

    start(strategy, Manual(), parts(cluster))
    found = []
    for batch in batches(6):
        where = {"rank": 0, "num_replicas": 1} | strategy.distributed_sampler_kwargs
        mine = tuple(tensor[where["rank"] :: where["num_replicas"]] for tensor in batch)
        found.append(float(strategy.reduce(strategy.training_step(mine, 0))))
    strategy.teardown()
    return found


def test_several_backward_passes_in_a_step_are_all_reduced():
    expected = manual(None)
    for found in in_ranks(manual):
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConflictError, match="trains wrongly with optimizers that set gradients to None"):
        DDPShardedStrategy(reduce_buffer_size=2**23)
    with pytest.raises(RequestError, match="has no search for unused parameters"):
        DDPShardedStrategy(find_unused_parameters=True)
    with pytest.raises(MisuseError, match="got 'bucket_cap_mb', which neither it nor FairScale's ShardedDataParallel"):
        DDPShardedStrategy(bucket_cap_mb=3)
    assert DDPSpawnShardedStrategy().start_method == "spawn"


def test_fully_sharded_on_a_cpu_names_what_runs_there():
    with pytest.raises(ConflictError, match=r"shards on CUDA devices only.*use strategy='fsdp', which runs here too"):
        DDPFullyShardedStrategy().receive(Parts(parallel_devices=(torch.device("cpu"),)))


class Thawing(BlockNet):
    """Trains its blocks later."""

    def configure_optimizers(self):
        self.blocks.requires_grad_(False)
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def thaws(cluster):
    strategy = DDPShardedStrategy()
    start(strategy, Thawing(), parts(cluster))
    train(strategy, steps=2)
    with pytest.raises(MisuseError) as raised:
        strategy.optimizers[0].add_param_group({"params": list(strategy.module.blocks.requires_grad_().parameters())})
    strategy.teardown()
    return str(raised.value)


def test_a_group_that_is_added_later_is_an_error_as_its_gradients_would_not_be_shared():
    for message in in_ranks(thaws):
        assert "configure_optimizers return all groups" in message


class Coupled(torch.optim.SGD):
    """Divides gradients by the norm of all of them."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        super().step()
        return loss


class With(Run):
    def __init__(self, module, make):
        super().__init__(module)
        self.make = make

    def configure_optimizers(self):
        return Optimization(optimizers=(self.make(self.module.parameters()),), schedulers=())


def error_with(cluster, make):
    strategy = DDPShardedStrategy()
    strategy.receive(parts(cluster))
    strategy.connect(BlockNet())
    strategy.setup_environment()
    try:
        strategy.setup(With(strategy.module, make))
    except RequestError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Coupled, "Coupled needs all parameters, and DDPShardedStrategy lets each rank step some of them"),
        (partial(GatheredOptimizer, torch.optim.SGD), "return the optimizer itself, without GatheredOptimizer"),
    ],
)
def test_an_optimizer_that_cannot_step_some_parameters_is_refused(make, message):
    for error in in_ranks(error_with, make=make):
        assert message in error
