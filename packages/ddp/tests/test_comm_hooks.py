"""Communication hooks: each of torch's that the CPU can run, and our own in bfloat16."""

import functools

import pytest
import torch
import torch.distributed as dist
from tests.hand_loop import Net, batches, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from dstrat.errors import MisuseError, RequestError
from dstrat.parallel.separate_modules import SeparateModules
from dstrat_ddp import DDPStrategy

TOLERANCES = {  # of losses, relative, over 20 steps; from compression to 16 bits, or to matrices of rank 1
    "allreduce": 1e-6,
    "fp16_compress": 2e-3,
    "bf16_compress": 2e-2,
    "powerSGD": 0.3,
}
POWER_SGD = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 2}
CALLABLES = {
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "partial": functools.partial(default_hooks.allreduce_hook),
}


def hooked_losses(cluster, power_sgd=None, given=None, **options):
    if power_sgd is not None:
        options["ddp_comm_state"] = PowerSGDState(process_group=None, **power_sgd)
    if given is not None:
        options["ddp_comm_hook"] = CALLABLES[given]
    strategy = DDPStrategy(**options)
    start(strategy, Net(), parts(cluster))
    losses = train(strategy)
    parameters = [parameter.detach().clone() for parameter in strategy.module.parameters()]
    drift = max(float((strategy.broadcast(parameter) - parameter).abs().max()) for parameter in parameters)
    strategy.teardown()
    return losses, drift


SENDS = {  # what is given, and the hook whose tolerance it has
    **{name: ({"ddp_comm_hook": name}, name) for name in ("allreduce", "fp16_compress", "bf16_compress")},
    "powerSGD": ({"ddp_comm_hook": "powerSGD", "power_sgd": POWER_SGD}, "powerSGD"),
    "powerSGD without a state, which begins at step 1000": ({"ddp_comm_hook": "power_sgd_hook"}, "allreduce"),
    "fp16 around allreduce": ({"ddp_comm_hook": "allreduce", "ddp_comm_wrapper": "fp16_compress"}, "fp16_compress"),
    "bf16 around allreduce": ({"ddp_comm_hook": "allreduce", "ddp_comm_wrapper": "bf16_compress"}, "bf16_compress"),
    "fp16 around powerSGD": (
        {"ddp_comm_hook": "powerSGD", "ddp_comm_wrapper": "fp16_compress", "power_sgd": POWER_SGD},
        "powerSGD",
    ),
    "torch's bf16": ({"given": "bf16_compress"}, "bf16_compress"),
    "torch's fp16": ({"given": "fp16_compress"}, "fp16_compress"),
    "a partial": ({"given": "partial"}, "allreduce"),
}


def test_a_hook_stays_close_to_one_device_by_name_as_a_callable_and_in_a_wrapper():
    expected = single_device_losses(Net())
    for outcomes in in_ranks(each, function=hooked_losses, cases={name: case for name, (case, _) in SENDS.items()}):
        for name, (losses, drift) in outcomes.items():
            sends = SENDS[name][1]
            assert losses == pytest.approx(expected, rel=TOLERANCES[sends]), name
            assert (losses == pytest.approx(expected, rel=1e-6)) == (sends == "allreduce"), name  # others compress
            assert drift == 0, name


def test_noop_leaves_each_rank_its_own_gradients():
    for _, drift in in_ranks(hooked_losses, ddp_comm_hook="noop")[1:]:
        assert drift > 0


def refusal(cluster, **options):
    strategy = DDPStrategy(**options)
    with pytest.raises(RequestError) as refused:
        start(strategy, Net(), parts(cluster))
    strategy.teardown()
    return str(refused.value)


@pytest.mark.on_cpu
def test_hooks_for_gpus_are_refused_on_the_cpu():
    names = ("batched_powerSGD", "quantization_pertensor", "quantization_perchannel")
    for messages in in_ranks(each, function=refusal, cases={name: {"ddp_comm_hook": name} for name in names}):
        assert messages == {
            name: f"ddp_comm_hook {name!r} runs on GPUs only; on the CPU these do: "
            "allreduce, bf16_compress, fp16_compress, noop, post_localSGD, powerSGD"
            for name in names
        }


class OwnWrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class OwnStrategy(DDPStrategy):
    def configure_ddp(self):
        self.model = OwnWrapper(self.model)


def hook_without_taker(cluster):
    strategy = OwnStrategy(ddp_comm_hook="allreduce")
    with pytest.raises(MisuseError, match="needs a model with register_comm_hook, and configure_ddp made OwnWrapper"):
        start(strategy, Net(), parts(cluster))
    strategy.teardown()


def test_a_wrapper_that_takes_no_hooks_is_reported():
    in_ranks(hook_without_taker, 1)


def counting_hook(state, bucket):
    state.append(bucket.buffer().numel())
    return default_hooks.allreduce_hook(None, bucket)


def sizes_seen(cluster, accumulate):
    sizes = []
    strategy = DDPStrategy(ddp_comm_hook=counting_hook, ddp_comm_state=sizes)
    start(strategy, Net(), parts(cluster))
    train(strategy, steps=3, accumulate=accumulate)
    strategy.teardown()
    return sum(sizes), sum(parameter.numel() for parameter in strategy.module.parameters()), dist.is_initialized()


def test_a_hook_of_ones_own_gets_its_state_and_every_gradient_once_in_an_optimizer_step():
    for found in in_ranks(each, function=sizes_seen, cases={n: {"accumulate": n} for n in (1, 4)}):
        for seen, parameters, still_open in found.values():
            assert seen == 3 * parameters
            assert not still_open


class Pair(SeparateModules):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sizes_before_the_first_step(cluster, separate):
    sizes = []
    strategy = DDPStrategy(ddp_comm_hook=counting_hook, ddp_comm_state=sizes)
    start(strategy, Pair({"first": Net(), "second": Net()}) if separate else Net(), parts(cluster))
    strategy.teardown()
    return sizes


def test_a_hook_is_not_called_before_the_first_step():
    cases = {separate: {"separate": separate} for separate in (False, True)}
    assert in_ranks(each, function=sizes_before_the_first_step, cases=cases) == [{False: [], True: []}] * 2


class Wide(Net):
    def make_layers(self):
        self.layers = torch.nn.Linear(6, 3)


def compressed_losses(cluster, separate):
    strategy = DDPStrategy(ddp_comm_hook="powerSGD", ddp_comm_state=PowerSGDState(process_group=None, **POWER_SGD))
    modules = {"net": Net(), "wide": Wide()} if separate else {"net": Net()}
    start(strategy, Pair(modules), parts(cluster))
    losses = []
    for batch in batches(8):
        for name, module in modules.items():
            step = module.training_step
            loss = strategy.model(lambda run, *inputs: run(*inputs), step, share(strategy, batch), 0)
            strategy.backward(loss)
            losses += [float(strategy.reduce(loss.detach()))] if name == "net" else []
        strategy.optimizers[0].step()
        strategy.optimizers[0].zero_grad()
    strategy.barrier()  # a rank that is slower may still be in its last collective
    strategy.teardown()
    return losses


def test_modules_that_take_turns_have_each_a_state_of_power_sgd():
    for losses in in_ranks(each, function=compressed_losses, cases={way: {"separate": way} for way in (True, False)}):
        assert losses[True] == losses[False]
