"""The simulated GPU shows what a CPU does not: late copies, other streams' memory, waits, contexts, forks."""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.ranks import in_ranks

from dstrat.parallel.process_group import DEFAULT_TIMEOUT, open_process_group
from dstrat.testing import simulated_gpu
from dstrat.testing.simulated_gpu import synchronizations

DEVICE = "simgpu:0"


@pytest.fixture(autouse=True)
def all_done():
    """Wait for what a test has left in streams, whose memory the next one would reuse."""
    yield
    for index in range(2):
        torch.accelerator.synchronize(index)


# Copies between pinned memory and the device


def test_a_copy_to_pinned_memory_happens_when_the_host_waits():
    source, host = torch.ones(3, device=DEVICE), torch.zeros(3).pin_memory()
    host.copy_(source, non_blocking=True)
    source.add_(1)  # a later operation of the stream, which the copy does not see
    assert host.tolist() == [0, 0, 0]
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1, 1]


def test_a_copy_from_pinned_memory_reads_it_late():
    host = torch.ones(3).pin_memory()
    copied = host.to(DEVICE, non_blocking=True)
    host.fill_(7)
    assert copied.tolist() == [7, 7, 7]


def test_an_event_ends_the_copies_before_it_alone():
    source, first, second = torch.ones(3, device=DEVICE), torch.zeros(3).pin_memory(), torch.zeros(3).pin_memory()
    first.copy_(source, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    second.copy_(source, non_blocking=True)
    event.synchronize()
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_a_copy_without_pinned_memory_is_there_at_once():
    assert torch.zeros(3).copy_(torch.ones(3, device=DEVICE), non_blocking=True).tolist() == [1, 1, 1]


# Streams


def test_memory_of_another_stream_needs_a_wait():
    stream = torch.Stream(DEVICE)
    with stream:
        made = torch.ones(3, device=DEVICE) * 2
    with pytest.raises(RuntimeError, match="aten::add on stream 0 reads memory that aten::mul on stream"):
        made + 1
    torch.accelerator.current_stream().wait_stream(stream)
    assert (made + 1).tolist() == [3, 3, 3]


def test_overwriting_what_another_stream_reads_needs_a_wait():
    stream, read = torch.Stream(DEVICE), torch.ones(3, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        read + 1
    with pytest.raises(RuntimeError, match="writes memory that aten::add"):
        read.zero_()


def test_memory_that_another_stream_uses_is_not_free_yet():
    stream, used = torch.Stream(DEVICE), torch.ones(3, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        used + 1
    del used
    with pytest.raises(RuntimeError, match="an allocation on stream 0 reuses memory that aten::add"):
        torch.empty(3, device=DEVICE)


def test_memory_is_free_while_a_copy_of_it_has_not_run():
    stream, used, host = torch.Stream(DEVICE), torch.ones(3, device=DEVICE), torch.zeros(3).pin_memory()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(used, non_blocking=True)
    del used
    with pytest.raises(RuntimeError, match="an allocation on stream 0 reuses memory that aten::copy_"):
        torch.empty(3, device=DEVICE)
    stream.synchronize()
    assert host.tolist() == [1, 1, 1]


def test_recorded_memory_stays_until_its_stream_has_used_it():
    stream, used = torch.Stream(DEVICE), torch.ones(3, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        used + 1
    used.record_stream(stream)
    del used
    torch.empty(3, device=DEVICE)


def test_a_stream_that_the_host_has_waited_for_is_done():
    stream = torch.Stream(DEVICE)
    with stream:
        made = torch.ones(3, device=DEVICE) * 2
    stream.synchronize()
    assert made.sum().item() == 6


# Waits of the host


@pytest.mark.parametrize(
    ("wait", "cause"),
    [
        (lambda values: values.sum().item(), "item"),
        (lambda values: bool(values.any()), "item"),
        (lambda values: values.tolist(), "a copy to the host"),
        (lambda values: values.cpu(), "a copy to the host"),
        (lambda values: values.nonzero(), "aten::nonzero"),
        (lambda values: values[values > 0], "aten::index"),
        (lambda values: torch.tensor([1.0], device=DEVICE), "a copy from memory of the host that is not pinned"),
        (lambda values: torch.accelerator.synchronize(), "synchronize"),
        (lambda values: torch.accelerator.current_stream().synchronize(), "Stream.synchronize"),
    ],
)
def test_a_wait_is_counted_with_its_stack(wait, cause):
    values = torch.ones(3, device=DEVICE)
    with synchronizations() as waits:
        wait(values)
    assert [one.cause for one in waits] == [cause]
    assert "wait(values)" in waits[0].stack


def test_what_only_queues_is_no_wait():
    host = torch.ones(3).pin_memory()
    with synchronizations() as waits:
        values = host.to(DEVICE, non_blocking=True)
        torch.tensor([1.0]).to(DEVICE, non_blocking=True)
        layer = torch.nn.Linear(3, 3, device=DEVICE)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(values).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        host.copy_(values, non_blocking=True)
    assert waits == []


# Devices and their memory


def test_tensors_of_two_devices_do_not_mix():
    for other in ("cpu", "simgpu:1"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(2, device=DEVICE) + torch.ones(2, device=other)
    assert (torch.ones(2, device=DEVICE) * torch.tensor(3.0)).tolist() == [3, 3]  # a scalar of the CPU may


def test_a_pickled_tensor_comes_back_on_its_device():
    there = pickle.loads(pickle.dumps(torch.ones(2, device="simgpu:1")))
    assert there.device == torch.device("simgpu", 1)
    assert 1 in simulated_gpu.touched_devices()


def test_memory_ends_at_the_limit():
    in_use = torch.simgpu.memory_allocated(0)
    with simulated_gpu.limited_memory(in_use + 1000):
        held = torch.ones(200, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 400 bytes"):
            torch.ones(100, device=DEVICE)
        del held
        torch.ones(100, device=DEVICE)


def test_each_device_has_random_numbers_of_its_own():
    torch.manual_seed(1)
    first = torch.rand(3, device=DEVICE)
    state = torch.simgpu.get_rng_state(0)
    second = torch.rand(3, device=DEVICE)
    torch.rand(3, device="simgpu:1")
    torch.simgpu.set_rng_state(state, 0)
    assert torch.equal(torch.rand(3, device=DEVICE), second)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device=DEVICE), first)


FORK = """
import os, torch
from dstrat.testing import simulated_gpu
simulated_gpu.load()
if {before}: torch.ones(1, device="simgpu")
child = os.fork()
if child == 0:
    try:
        torch.ones(1, device="simgpu")
    except RuntimeError as error:
        os._exit("forked subprocess" in str(error))
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_fork_cannot_use_what_was_initialized_before(before):
    ended = subprocess.run([sys.executable, "-c", FORK.format(before=before)], check=False, timeout=400)
    assert ended.returncode == int(before)


# Collectives


def collectives(cluster):
    simulated_gpu.load()
    rank, device = cluster.global_rank, torch.device("simgpu", cluster.global_rank)
    torch.accelerator.set_device_index(rank)
    open_process_group(cluster, backend=simulated_gpu.BACKEND, timeout=DEFAULT_TIMEOUT)
    total = torch.full((2,), rank + 1.0, device=device)
    with synchronizations() as waits:
        work = dist.all_reduce(total, async_op=True)
        try:
            total + 1
        except RuntimeError as error:
            race = str(error)
        work.wait()
        mean = torch.full((2,), float(rank), device=device)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        gathered = [torch.empty(1, device=device) for _ in range(2)]
        dist.all_gather(gathered, mean[:1] + rank)
        one = torch.full((1,), float(rank), device=device)
        received = torch.empty(1, device=device)
        messages = [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        dist.batch_isend_irecv(messages)  # arrive also where nobody waits for them
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    assert waits == []
    values = [total.tolist(), mean.tolist(), torch.cat(gathered).tolist(), received.tolist()]
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(torch.ones(1))
    return values, race


def test_collectives_have_a_stream_of_their_own():
    for rank, (values, race) in enumerate(in_ranks(collectives)):
        assert values == [[3, 3], [0.5, 0.5], [0.5, 1.5], [1 - rank]]
        assert "memory that a collective" in race
