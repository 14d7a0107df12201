"""Each wait that a GPU needs is removed once: without it, numbers are wrong, or the simulator refuses the race."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packages.mesh.tests import context_fits
from tests.ranks import in_ranks
from tests.simulated_gpu import test_activation_offload as offload
from tests.simulated_gpu.test_mesh import Unsharded
from tests.simulated_gpu.test_training import DEVICE, Net, copied, loader, make_trainer, weights
from torch import nn
from torch.utils.data import DataLoader

from dstrat import SingleDeviceStrategy, build
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.parallel.activation_memory import ActivationMemory
from dstrat.testing import simulated_gpu
from dstrat_bagua import BaguaStrategy
from dstrat_deepspeed.internals import scale_partial_gradients
from dstrat_deepspeed.unused_parameters import GradientOrder
from dstrat_diloco import DiLoCoStrategy
from dstrat_mesh import MeshStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES = Path(__file__).parents[2] / "packages"
WRONG = "the numbers are wrong"


# Removal of a line


@dataclass(frozen=True)
class Wait:
    """A wait of ours.

    Attributes:
        where: Module and function, or method, that waits.
        line: What waits, which the function has once.
        run: Computes on simulated GPUs, and raises an error where the numbers are not right.
        ranks: Number of ranks.
        instead: What stands there without the wait.
    """

    where: str
    line: str
    run: Callable[[Any], None]
    ranks: int = 1
    instead: str = "pass"


def remove(wait: Wait) -> None:
    """Let the function not wait any more in this process."""
    module_name, names = wait.where.split(":")
    module = importlib.import_module(module_name)
    function = inspect.unwrap(functools.reduce(getattr, names.split("."), module))
    source = inspect.getsource(function)
    assert source.count(wait.line) == 1, source
    text = inspect.getsource(module).replace(source, source.replace(wait.line, wait.instead))
    function.__code__ = dict(functions(compile(text, str(module.__file__), "exec")))[names]


def functions(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the functions of a module, and the methods of its classes, each with its qualified name and its code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = prefix + constant.co_name
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield name, constant
            else:
                yield from functions(constant, f"{name}.")


def check(found, expected):
    if found != expected:
        raise AssertionError(f"{WRONG}: {found} instead of {expected}")


# What computes with the waits


def batches(_cluster):
    total, sums = torch.zeros(4, device=DEVICE), []
    for batch in copied([torch.full((4,), float(index)) for index in range(6)]):
        total = total + batch * 2
        sums.append(total)
        del batch
    check([one[0].item() for one in sums], [0, 2, 6, 12, 20, 30])


def offloaded_activations(_cluster):
    found, expected = (offload.trained(SingleDeviceStrategy(**options)) for options in (offload.OFFLOAD, {}))
    check([values.tolist() for values in found], [values.tolist() for values in expected])


def interrupted_backward(_cluster):
    module, batch = offload.Net().to(DEVICE), torch.zeros(offload.BATCH, offload.WIDTH, device=DEVICE)
    ActivationMemory(offloads=True).select(module, torch.device(DEVICE), has_streams=True)()
    before, deadline = torch.simgpu.memory_allocated(), time.monotonic() + 300

    def hook(_layer, _inputs, output):
        output.register_hook(mock.Mock(side_effect=ValueError))

    handle = module.blocks[2].register_forward_hook(hook)
    with pytest.raises(ValueError):
        module.training_step([batch], 0).backward()
    handle.remove()
    module.zero_grad()
    while torch.simgpu.memory_allocated() > before and time.monotonic() < deadline:  # a thread of autograd frees it
        time.sleep(0.001)
    check(torch.ones_like(batch).sum().item(), batch.numel())


def saved(make_io):
    layer, stream = nn.Linear(4, 4, device=DEVICE), torch.Stream(DEVICE)
    with torch.no_grad():
        layer.weight.fill_(2)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            layer.weight.fill_(3)
        io, path = make_io(), f"{tempfile.mkdtemp(dir='.')}/saved"
        io.save_checkpoint({"state_dict": layer.state_dict()}, path)
        torch.accelerator.current_stream().wait_stream(stream)
        layer.weight.fill_(4)
    io.teardown()
    check(io.load_checkpoint(path)["state_dict"]["weight"].unique().tolist(), [3])


def saved_at_once(_cluster):
    saved(PortableCheckpointIO)


def saved_in_the_background(_cluster):
    saved(lambda: AsyncCheckpointIO(PortableCheckpointIO()))


def one_file_saved_in_the_background(_cluster):
    layer, io = nn.Linear(4, 4, device=DEVICE), AsyncCheckpointIO(TorchCheckpointIO())
    path = f"{tempfile.mkdtemp(dir='.')}/saved"
    with torch.no_grad():
        layer.weight.fill_(3)
        io.save_checkpoint({"state_dict": layer.state_dict()}, path)
        layer.weight.fill_(4)
    io.teardown()
    check(io.load_checkpoint(path)["state_dict"]["weight"].unique().tolist(), [3])


def values_on_the_host(_cluster):
    values = torch.rand(3)
    check(SingleDeviceStrategy(DEVICE).to_host(values.to(DEVICE)).tolist(), values.tolist())


def trained(cluster, make_strategy, accelerator):
    net = Net()
    make_trainer(cluster, accelerator, strategy=make_strategy()).fit(net, loader())
    return weights(net)


def as_on_processors(cluster, make_strategy):
    found, expected = (trained(cluster, make_strategy, accelerator) for accelerator in ("simulated_gpu", "cpu"))
    check(torch.allclose(nn.utils.parameters_to_vector(found), nn.utils.parameters_to_vector(expected)), True)


def gradients_of_buckets(cluster):
    as_on_processors(cluster, BaguaStrategy)


def gradients_in_a_thread(cluster):
    as_on_processors(cluster, lambda: BaguaStrategy("gradient_allreduce", hierarchical=True))


def decentralized(cluster):
    as_on_processors(cluster, lambda: BaguaStrategy("decentralized", hierarchical=False))


def decentralized_in_pairs(cluster):
    pairs = {"peer_selection_mode": "shift_one", "hierarchical": False}
    as_on_processors(cluster, lambda: BaguaStrategy("decentralized", **pairs))


def averaged_beside_another_stream(cluster):
    with torch.Stream(torch.device("simgpu", cluster.local_rank)):
        net, strategy = Net(), BaguaStrategy("async", sync_interval_ms=1)
        make_trainer(cluster, strategy=strategy, max_epochs=30).fit(net, loader())
        check(all(values.isfinite().all() for values in weights(net)), True)


def means_in_flight(cluster):
    as_on_processors(cluster, lambda: DiLoCoStrategy(groups=2, every=4, delay=2))


def fit_on_a_mesh(cluster, accelerator, options):
    module = context_fits.Net()
    options = {"strategy": MeshStrategy(**options), "max_epochs": 1}
    make_trainer(cluster, accelerator, **options).fit(module, DataLoader(context_fits.data(), 2))
    return module.losses


def mesh_as_on_processors(cluster, **options):
    found, expected = (fit_on_a_mesh(cluster, accelerator, options) for accelerator in ("simulated_gpu", "cpu"))
    check(found == pytest.approx(expected, rel=1e-5), True)


def stages(cluster):
    mesh_as_on_processors(cluster, pp=2, microbatches=2)


def ring(cluster):
    mesh_as_on_processors(cluster, cp=2, context_parallel="ring")


def shared_batches(cluster):
    strategy = Unsharded(tp=2)
    build(strategy=strategy, accelerator="simulated_gpu", devices=cluster.world_size, plugins=[cluster])
    strategy.connect(context_fits.Net())
    strategy.setup_environment()
    strategy.setup(SimpleNamespace(is_fitting=False))
    strategy.check_same_batch("validation_step", torch.ones(2))
    strategy.finish_training()
    strategy.teardown()


def accelerator_of_deepspeed():
    """In this context DeepSpeed, whose modules need not be installed, computes on simulated GPUs."""
    accelerator = SimpleNamespace(
        resolves_data_dependency=lambda: False,
        Event=torch.Event,
        current_stream=torch.accelerator.current_stream,
        synchronize=torch.accelerator.synchronize,
    )
    module = SimpleNamespace(get_accelerator=lambda: accelerator)
    return mock.patch.dict(sys.modules, {"deepspeed.accelerator": module})


def gradients_on_the_host(_cluster):
    gradients = torch.rand(4)
    offloaded = torch.zeros(4).pin_memory()
    optimizer = SimpleNamespace(
        grad_partitions_flat_buffer=offloaded, micro_step_id=0, _epilogue_ran_this_backward=True, offload_optimizer=True
    )
    offloaded.copy_(gradients.to(DEVICE), non_blocking=True)
    with accelerator_of_deepspeed():
        scale_partial_gradients(optimizer, 0.5)
    torch.accelerator.synchronize()
    check(offloaded.tolist(), (gradients * 0.5).tolist())


def deferred_gradients(_cluster):
    """Let DeepSpeed get a gradient of another stream too early, and free it when it has been sent."""
    first, second = parameters = [nn.Parameter(torch.zeros(4, device=DEVICE)) for _ in range(2)]
    sent = []
    optimizer = SimpleNamespace(
        bit16_groups=[parameters],
        get_param_id=parameters_by_id(parameters),
        get_gradient_for_reduction=lambda parameter: parameter.grad,
        reduce_independent_p_g_buckets_and_remove_grads=lambda parameter, _group: sent.append(parameter.grad * 2),
        overlapping_partition_gradients_reduce_epilogue=lambda: None,
        reduce_bucket_size=1000,
        ready_for_gradients=True,
        dp_process_group=None,
    )
    GradientOrder(optimizer)
    stream = torch.Stream(DEVICE)
    alone = mock.patch.multiple(dist, all_reduce=mock.DEFAULT, broadcast=mock.DEFAULT, get_global_rank=mock.DEFAULT)
    with accelerator_of_deepspeed(), alone:
        for parameter in parameters:  # the order of later passes
            parameter.grad = torch.ones(4, device=DEVICE)
            optimizer.reduce_independent_p_g_buckets_and_remove_grads(parameter, 0)
        optimizer.overlapping_partition_gradients_reduce_epilogue()
        with stream:
            second.grad = torch.full((4,), 3.0, device=DEVICE)
            optimizer.reduce_independent_p_g_buckets_and_remove_grads(second, 0)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(first, 0)
        optimizer.overlapping_partition_gradients_reduce_epilogue()
    second.grad = None
    with stream:
        torch.zeros(4, device=DEVICE)
    check([gradient[0].item() for gradient in sent], [2, 2, 2, 6])


def parameters_by_id(parameters):
    return lambda parameter: next(index for index, one in enumerate(parameters) if one is parameter)


PREFETCH = "dstrat.data.prefetch"
SAVED = "dstrat.parallel.activation_offload:_SavedTensors"
CHECKPOINT = "dstrat.checkpoint.portable"
AVERAGE = "dstrat_bagua.async_model_average:BackgroundAveraging._average"
SYNCHRONIZE = "torch.get_device_module(self._device).synchronize(self._device)"
DEFERRED = "dstrat_deepspeed.unused_parameters:_wait_for"
IN_FLIGHT = "copy_(data, non_blocking=True)"

WAITS = {
    "a batch's memory is free before the next copy": Wait(
        f"{PREFETCH}:prefetch", "copies.wait_stream(torch.accelerator.current_stream(device))", batches
    ),
    "a batch is there before its step": Wait(
        f"{PREFETCH}:_awaited", "torch.accelerator.current_stream(device).wait_event(event)", batches
    ),
    "activations are computed before they are copied": Wait(
        f"{SAVED}._copy",
        "stream.wait_stream(torch.accelerator.current_stream(self._offload.device))",
        offloaded_activations,
    ),
    "activations are copied before their memory is free": Wait(
        f"{SAVED}.free_device", "self._offload.wait(self._copied)", offloaded_activations
    ),
    "activations are back before the backward pass": Wait(
        f"{SAVED}.restore", "self._offload.wait(self._copied)", offloaded_activations
    ),
    "memory is free before activations come back": Wait(
        f"{SAVED}._fetch", "stream.wait_stream(torch.accelerator.current_stream(device))", offloaded_activations
    ),
    "an error frees activations that come back": Wait(
        f"{SAVED}._fetch", "target.record_stream(stream)", interrupted_backward
    ),
    "a step has ended before threads save it": Wait(
        f"{CHECKPOINT}.checkpoint_io:PortableCheckpointIO._prepare",
        "wait_for_devices(prepared.shard.devices)",
        saved_at_once,
    ),
    "bytes are there before they are written": Wait(
        f"{CHECKPOINT}.payload:Payload.view", "copy_(data)", saved_at_once, instead=IN_FLIGHT
    ),
    "copies are there before a thread writes them": Wait(
        f"{CHECKPOINT}.checkpoint_io:StagingMemory.copy", "wait_for_devices(shard.devices)", saved_in_the_background
    ),
    "copies are there before a thread writes one file": Wait(
        "dstrat.checkpoint.async_io:_Copies.copy", "wait_for_devices(self._devices)", one_file_saved_in_the_background
    ),
    "values are there before they are read": Wait(
        "dstrat.interfaces.strategy:Strategy.to_host",
        "tensor.cpu()",
        values_on_the_host,
        instead="tensor.to('cpu', non_blocking=True)",
    ),
    "gradients are exchanged before the step": Wait(
        "dstrat_bagua.buckets:GradientExchange._finish", "work.wait()", gradients_of_buckets, 2
    ),
    "gradients are computed before a thread exchanges them": Wait(
        "dstrat_bagua.communication:CommunicationThread._run", "ready.wait()", gradients_in_a_thread, 2
    ),
    "a thread has exchanged gradients before the step": Wait(
        "dstrat_bagua.communication:Exchange.wait", "self.finished.wait()", gradients_in_a_thread, 2
    ),
    "a thread has averaged weights before the step": Wait(
        "dstrat_bagua.decentralized:DecentralizedAlgorithm.before_step", "exchange.wait()", decentralized, 2
    ),
    "a pair has exchanged weights before it averages them": Wait(
        "dstrat_bagua.communication:Ranks.exchange", "work.wait()", decentralized_in_pairs, 2
    ),
    "weights are copied before a thread averages them": Wait(
        AVERAGE, f"{SYNCHRONIZE}  # the copies", averaged_beside_another_stream, 2
    ),
    "a thread has averaged weights before they are applied": Wait(
        AVERAGE, f"{SYNCHRONIZE}\n        self", averaged_beside_another_stream, 2, "pass\n        self"
    ),
    "means of groups are there before they are applied": Wait(
        "dstrat.parallel.collectives:wait_for_collective", "work.wait()", means_in_flight, 2
    ),
    "the loss is there before stages return it": Wait(
        "dstrat_mesh.runner:StageRunner._share_loss", "work.wait()", stages, 2
    ),
    "keys are there before queries attend to them": Wait(
        "dstrat_mesh.attention:_Transfer.wait", "work.wait()", ring, 2
    ),
    "batches of ranks are there before they are compared": Wait(
        "dstrat_fsdp.shared_batch:SharedBatchStrategy._raise_for_other_batches", "work.wait()", shared_batches, 2
    ),
    "a deferred gradient is computed before it is sent": Wait(DEFERRED, "stream.wait_event(event)", deferred_gradients),
    "a deferred gradient is freed when it has been sent": Wait(
        DEFERRED, "gradient.record_stream(stream)", deferred_gradients
    ),
    "gradients are on the host before they are scaled": Wait(
        "dstrat_deepspeed.internals:_multiply",
        'import_module("deepspeed.accelerator").get_accelerator().synchronize()',
        gradients_on_the_host,
    ),
}

# Waits that cannot be removed by themselves, or change no numbers
CALLED_BY_THOSE = {
    "torch.accelerator.current_stream(self.device).wait_event(event)": "of activations that are copied, and back",
    "torch.accelerator.synchronize(device)": "in wait_for_devices",
    "wait_for_collective(self._work)": "in both halves of a mean",
    "pair = transfer.wait()": "of keys",
    "pair, of_pair = transfer.wait(), _Transfer(of_pair, group).wait()": "of keys",
}
OF_NO_NUMBERS = {
    "torch.accelerator.synchronize(self.device)": "in a measurement of times",
    "work.wait()": "in measurements of times",
    "send.work.wait()": "bounds memory: what is sent is kept until it has arrived",
}


def run_without(cluster, name):
    """Compute with all waits, then without one of them."""
    simulated_gpu.load()
    wait = WAITS[name]
    wait.run(cluster)
    print("without it:")
    remove(wait)
    wait.run(cluster)


@pytest.mark.parametrize("name", WAITS)
def test_without_a_wait_numbers_are_wrong(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception, match=f"without it:(.|\n)*({WRONG}|race on the simulated GPU)"):
        in_ranks(run_without, WAITS[name].ranks, name=name)


WAITING = re.compile(
    r"\.(wait_stream|wait_event|record_stream|synchronize)\(|\bwait_for_(devices|collective)\(|"
    r"\b(work|ready|finished|exchange|transfer)\.wait\(\)"
)
ON_SIMULATED_GPUS = ("bagua", "core", "ddp", "deepspeed", "diloco", "fsdp", "mesh")


def waits_of(package):
    """Return the lines of a package that wait for a device, without comments."""
    for path in sorted((PACKAGES / package / "src").rglob("*.py")):
        if "testing" not in path.parts:
            for line in path.read_text(encoding="utf-8").splitlines():
                if WAITING.search(line) and not line.lstrip().startswith("def "):
                    yield line.partition("  # ")[0].strip()


def test_every_wait_is_removed_or_has_a_reason():
    lines = {line for package in ON_SIMULATED_GPUS for line in waits_of(package)}
    in_cases = {line for line in lines for wait in WAITS.values() if line in wait.line}
    assert lines - in_cases == CALLED_BY_THOSE.keys() | OF_NO_NUMBERS.keys() - in_cases
