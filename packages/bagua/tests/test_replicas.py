"""Replicas that differ: what evaluation, checkpoints and the end of a training have, and exact resumption."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from packages.bagua.tests.test_formulas import QAdamNet
from tests.failing_ranks import check_that_a_rank_that_dies_is_noticed, check_that_nobody_waits_for_a_rank_that_raises
from tests.hand_loop import Net, batches, one_pass, parts, start
from tests.ranks import each, in_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dstrat.interfaces.state_dict import canonical_parameters
from dstrat_bagua import BaguaStrategy
from dstrat_bagua.communication import CommunicationThread

FLAT = {"hierarchical": False}
DIFFERING = {
    "decentralized": {"algorithm": "decentralized", "peer_selection_mode": "shift_one", **FLAT},
    "low_precision_decentralized": {"algorithm": "low_precision_decentralized", **FLAT},
    "async": {"algorithm": "async", "sync_interval_ms": 10},
}
RESUMED = {
    **{name: options for name, options in DIFFERING.items() if name != "async"},
    "bytegrad": {"algorithm": "bytegrad", **FLAT},
    "qadam in its warm-up": {"algorithm": "qadam", "module": QAdamNet, "stop": 3, **FLAT},
    "qadam": {"algorithm": "qadam", "module": QAdamNet, **FLAT},
}


def weights_of(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def steps(strategy, first, last):
    [optimizer] = strategy.optimizers
    for index, batch in list(enumerate(batches(last)))[first:]:

        def closure(batch=batch, index=index):
            optimizer.zero_grad()
            return one_pass(strategy, batch, index, 1)

        strategy.optimizer_step(optimizer, closure)


def weights_everywhere(cluster, wraps=False, **options):
    """Return what differs and what is the average, in a training, in evaluation, in a checkpoint and at the end."""
    strategy, module = BaguaStrategy(**options), Net()
    if wraps:
        module.layers[0] = checkpoint_wrapper(module.layers[0])
    start(strategy, module, parts(cluster))
    steps(strategy, 0, 5)
    local = weights_of(strategy.module)
    average = strategy.reduce(local)
    with strategy.evaluation_context():
        evaluated = weights_of(strategy.module)
    state = strategy.broadcast(strategy.module_state_dict())  # rank 0 has it
    saved = torch.cat([state[name].reshape(-1) for name in canonical_parameters(strategy.module)])
    moments = strategy.sharded_optimizer_state(strategy.optimizers[0])["state"]["layers.0.weight"]["exp_avg"]
    own = strategy.optimizers[0].state[strategy.module.layers[0].weight]["exp_avg"]
    found = {
        "ranks differ": not bool((strategy.broadcast(local) == local).all()) or strategy.is_global_zero,
        "evaluation has the average": torch.allclose(evaluated, average, atol=1e-6),
        "training goes on with its weights": torch.equal(weights_of(strategy.module), local),
        "a checkpoint has the average": torch.allclose(saved, average, atol=1e-6),
        "and that of the optimizer": torch.allclose(moments, strategy.reduce(own), atol=1e-6),
        "no rank alone has the state": not strategy.replicates_state,
    }
    strategy.finish_training()
    final = weights_of(strategy.module)
    found["the end has the average"] = torch.equal(strategy.broadcast(final), final)
    found["every rank has the state then"] = strategy.replicates_state
    strategy.teardown()
    found["threads have ended"] = not [one for one in threading.enumerate() if one.name.startswith("dstrat-bagua")]
    return found


def test_evaluation_checkpoints_and_the_end_have_the_average():
    cases = {**DIFFERING, "wrapped layers": {**DIFFERING["decentralized"], "wraps": True}}
    for outcomes in in_ranks(each, function=weights_everywhere, cases=cases):
        for name, found in outcomes.items():
            assert all(found.values()), (name, found)


class Counted(Net):
    """Has a number in its state."""

    number = 0

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]


def loaded_number(cluster):
    strategy = BaguaStrategy(**DIFFERING["decentralized"])
    start(strategy, Counted(), parts(cluster))
    state = {**strategy.module_state_dict(), "_extra_state": {"number": 3}}
    strategy.load_module_state_dict(state if strategy.is_global_zero else {})
    number = strategy.module.number
    strategy.teardown()
    return number


def test_each_rank_loads_the_extra_state_of_a_layer():
    assert in_ranks(loaded_number) == [3, 3]


class Branches(torch.nn.Module):
    """Two branches of one shape, of which each batch uses one."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList([torch.nn.Linear(4, 1, bias=False) for _ in range(2)])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def moments_by_branch(cluster, orders):
    """Return the saved first moments of the branches, and the local ones, after a step with each of some branches."""
    strategy = BaguaStrategy("decentralized", hierarchical=False)
    start(strategy, Branches(), parts(cluster))
    [optimizer] = strategy.optimizers
    for branch in orders[strategy.global_rank]:
        weight = strategy.module.branches[branch].weight
        optimizer.zero_grad()
        weight.grad = torch.full_like(weight, 1.0 + strategy.global_rank + 10 * branch)
        optimizer.step()
    names = {name: parameter for name, parameter in strategy.module.named_parameters() if parameter in optimizer.state}
    local = {name: float(optimizer.state[parameter]["exp_avg"][0, 0]) for name, parameter in names.items()}
    saved = strategy.sharded_optimizer_state(optimizer)["state"]
    strategy.teardown()
    return {name: float(entry["exp_avg"][0, 0]) for name, entry in saved.items()}, local


def test_moments_of_different_parameters_are_never_averaged():
    # Adam has the state of a parameter from its first gradient on, in the order in which these came.
    (saved, first), (other, second) = in_ranks(moments_by_branch, orders=([0, 1], [1, 0]))
    assert saved == other == pytest.approx({name: (first[name] + second[name]) / 2 for name in first})
    (saved, first), (other, second) = in_ranks(moments_by_branch, orders=([0], [1]))
    assert first.keys() != second.keys()
    assert saved == other == first


def resumed(cluster, module=Net, stop=9, **options):
    """Return the weights after 14 steps, without and with a stop in between."""
    without = BaguaStrategy(**options)
    start(without, module(), parts(cluster))
    steps(without, 0, stop)
    state = {
        "module": without.module_state_dict(),
        "optimizer": without.sharded_optimizer_state(without.optimizers[0]),
        "strategy": without.state_dict(),
        "rank": without.rank_state(),
    }
    state = torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, state)
    steps(without, stop, 14)
    expected = weights_of(without.module)
    without.teardown()
    strategy = BaguaStrategy(**options)
    start(strategy, module(), parts(cluster))
    strategy.load_sharded_module_state(state["module"])
    strategy.load_module_state_dict(state["module"])
    strategy.load_sharded_optimizer_state(strategy.optimizers[0], state["optimizer"])
    strategy.load_state_dict(state["strategy"])
    strategy.load_rank_state(state["rank"])
    steps(strategy, stop, 14)
    found = weights_of(strategy.module)
    strategy.teardown()
    return torch.equal(found, expected)


def test_a_resumed_training_is_the_same_to_the_last_bit():
    for outcomes in in_ranks(each, function=resumed, cases=RESUMED):
        assert outcomes == dict.fromkeys(RESUMED, True)


def moved(cluster):
    """Go on from a checkpoint of decentralized with another algorithm."""
    before = BaguaStrategy(**DIFFERING["decentralized"])
    start(before, Net(), parts(cluster))
    steps(before, 0, 5)
    state, saved, rank_state = before.module_state_dict(), before.state_dict(), before.rank_state()
    before.teardown()
    after = BaguaStrategy(**DIFFERING["low_precision_decentralized"])
    start(after, Net(), parts(cluster))
    after.load_module_state_dict(state)
    after.load_state_dict(saved)
    after.load_rank_state(rank_state)
    weights = weights_of(after.module)
    same = torch.equal(after.broadcast(weights), weights)
    after.teardown()
    return same


def test_another_algorithm_goes_on_from_the_average():
    assert in_ranks(moved) == [True, True]


def test_the_thread_of_exchanges_has_ended_when_it_is_closed():
    thread = CommunicationThread(torch.device("cpu"), timedelta(seconds=10))
    thread.submit(lambda: None).wait()
    thread.close()
    assert not [one for one in threading.enumerate() if one.name == "dstrat-bagua"]


# Asynchronous averages


def asynchronous(cluster, slow_rank=None):
    strategy = BaguaStrategy("async", sync_interval_ms=5, warmup_steps=2)
    start(strategy, Net(), parts(cluster))
    rounds = 0
    for first in range(0, 200, 10):
        steps(strategy, first, first + 10)
        if strategy.global_rank == slow_rank:
            time.sleep(0.05)
        rounds = strategy.algorithm._averaging.rounds
        if strategy.reduce_boolean_decision(rounds >= 3):
            break
    strategy.finish_training()
    weights = weights_of(strategy.module)
    same = torch.equal(strategy.broadcast(weights), weights)
    strategy.teardown()
    return rounds, same


@pytest.mark.parametrize("slow_rank", [None, 1])
def test_weights_are_averaged_beside_the_training_which_ends_cleanly(slow_rank):
    for rounds, same in in_ranks(asynchronous, slow_rank=slow_rank):
        assert rounds >= 3
        assert same


def one_averaging(cluster):
    """Return the weights before and after an average was applied, without a step in between."""
    strategy = BaguaStrategy("async", sync_interval_ms=1)
    start(strategy, Net(), parts(cluster))
    steps(strategy, 0, 1)
    averaging = strategy.algorithm._averaging
    deadline = time.monotonic() + 300
    while averaging.rounds < 1 and time.monotonic() < deadline:  # of which a rank has made a copy in the step, or not
        averaging.after_step()
        time.sleep(0.001)
    averaging._copied.clear()
    with torch.no_grad():
        for parameter in strategy.module.parameters():
            parameter.fill_(float(strategy.global_rank))
    copied = None
    while averaging.rounds < 2 and time.monotonic() < deadline:
        with torch.no_grad():  # the training goes on, by 10, when the copy has been made
            if copied is None and averaging._copied.is_set():
                copied = weights_of(strategy.module)
                for parameter in strategy.module.parameters():
                    parameter.add_(10)
        averaging.after_step()
        time.sleep(0.001)
    weights = weights_of(strategy.module)
    strategy.finish_training()
    strategy.teardown()
    return float(copied[0]), weights.unique().tolist()


def test_the_difference_to_the_copy_is_added_and_steps_in_between_stay():
    assert in_ranks(one_averaging) == [(0.0, [10.5]), (1.0, [10.5])]


class Asynchronous(BaguaStrategy):
    def __init__(self):
        super().__init__("async", sync_interval_ms=1)


class ByteGrad(BaguaStrategy):
    def __init__(self):
        super().__init__("bytegrad", hierarchical=False)


@pytest.mark.parametrize("strategy_class", [BaguaStrategy, ByteGrad])
def test_when_a_rank_raises_or_dies_the_others_do_not_wait(strategy_class):
    check_that_nobody_waits_for_a_rank_that_raises(strategy_class)
    check_that_a_rank_that_dies_is_noticed(strategy_class)


def left_alone(cluster):
    """Let one rank end in an error while the other trains on without waiting for it."""
    strategy = Asynchronous()
    start(strategy, Net(), parts(cluster))
    steps(strategy, 0, 20)
    if strategy.global_rank == 0:
        time.sleep(1)
    strategy.on_exception(ValueError())
    strategy.teardown()
    return "dstrat-bagua-async" in {thread.name for thread in threading.enumerate()}


def test_asynchronous_averaging_ends_after_an_error():
    assert in_ranks(left_alone) == [False, False]
