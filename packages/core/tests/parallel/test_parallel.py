from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import CatalogMismatchError, ClusterError, MisuseError, RankFailedError, RequestError
from dstrat.interfaces.strategy import Strategy
from dstrat.launch.local import LocalLauncher
from dstrat.parallel.collectives import broadcast_object, gather_tensors, pack_object, reduce_tensor
from dstrat.parallel.internals import new_connections, uses_nccl
from dstrat.parallel.job import Job, current_job, rank_and_size
from dstrat.parallel.process_group import (
    check_same_catalog,
    close_process_group,
    noting_failed_steps,
    open_process_group,
)
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.testing.ranks.team import LoopbackCluster

TIMEOUT = timedelta(seconds=20)


@dataclasses.dataclass
class Seen:
    """Stands for a catalog of which only the fingerprint counts."""

    fingerprint_lines: tuple[str, ...]


def in_ranks(function, *args, ranks: int = 2):
    """Run a function in forked ranks with an open process group; return what it returned in rank 0."""

    def run():
        store = open_process_group(LocalEnvironment(os.environ), backend="gloo", timeout=TIMEOUT)
        try:
            return function(store, *args)
        finally:
            close_process_group()

    return LocalLauncher(num_processes=ranks, start_method="fork").launch(run)


def test_new_groups_of_a_group_that_is_bound_to_a_device_have_their_own_connections():
    """torch splits the connections of a bound group, which ends the process where NCCL has opened it twice."""

    def open_group(store):
        default, device = dist.group.WORLD, torch.device("cuda", 0)
        default.bound_device_id = device
        with new_connections():
            seen = default.bound_device_id
            group = dist.new_group([0, 1])
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        with pytest.raises(ValueError, match="the body's"), new_connections():
            raise ValueError("the body's")
        return seen, default.bound_device_id == device, total.item()

    assert in_ranks(open_group) == (None, True, 2.0)


@pytest.mark.parametrize(
    ("backends", "uses"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_groups_of_nccl_are_aborted_beside_other_backends_too(backends: str, uses: bool) -> None:
    assert uses_nccl(backends) is uses


def expected_reduction(operation: str, ranks: int) -> list[float]:
    stacked = torch.stack([torch.tensor([rank + 1.0, -rank]) for rank in range(ranks)])
    return {
        "mean": stacked.mean(0),
        "avg": stacked.mean(0),
        "sum": stacked.sum(0),
        "max": stacked.amax(0),
        "min": stacked.amin(0),
    }[operation].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reductions_equal_those_of_the_stacked_tensors(ranks):
    operations = ["mean", "avg", "sum", "max", "min"]

    def reduce_all(store):
        mine = torch.tensor([dist.get_rank() + 1.0, -dist.get_rank()])
        results = [reduce_tensor(mine, reduce_op=operation).tolist() for operation in operations]
        assert mine.tolist() == [dist.get_rank() + 1.0, -dist.get_rank()]
        return results

    assert in_ranks(reduce_all, ranks=ranks) == [expected_reduction(operation, ranks) for operation in operations]


def test_torch_s_own_operations_and_none_are_reductions_too():
    given = [None, dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]

    def reduce_all(store):
        return [reduce_tensor(torch.tensor(float(dist.get_rank())), reduce_op=one).item() for one in given]

    assert in_ranks(reduce_all) == [0.5, 0.5, 1.0, 1.0, 0.0]


def test_every_operation_of_torch_is_known_by_its_name_and_itself():
    names = ("product", "band", "BOR", "bxor")

    def reduce_all(store):
        mine = torch.tensor([6, 3][dist.get_rank()])
        given = [*names, *(getattr(dist.ReduceOp, name.upper()) for name in names)]
        return [reduce_tensor(mine, reduce_op=one).item() for one in given]

    assert in_ranks(reduce_all) == [18, 2, 7, 5] * 2


def test_a_mean_of_integers_is_a_float():
    assert in_ranks(lambda store: reduce_tensor(torch.tensor(dist.get_rank())).item()) == 0.5


def test_an_unknown_reduction_is_refused():
    with pytest.raises(RequestError, match="reduce_op 'median' is not one of avg, mean, sum, max, min"):
        reduce_tensor(torch.zeros(1), reduce_op="median")


def test_gathered_tensors_are_stacked_in_the_order_of_ranks():
    def gather(store):
        return gather_tensors(torch.full((2, 3), float(dist.get_rank()))[:, ::2])

    gathered = in_ranks(gather, ranks=3)
    assert gathered.shape == (3, 2, 2)
    assert gathered[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_gradients_flow_back_through_gathering_where_that_is_asked_for():
    def gather(store):
        mine = torch.ones(2, requires_grad=True)
        (gather_tensors(mine, sync_grads=True) * 3).sum().backward()
        return mine.grad.tolist()

    assert in_ranks(gather) == [6.0, 6.0]  # each of two ranks uses the tensor three times


def test_an_object_comes_from_the_source_rank():
    assert in_ranks(lambda store: broadcast_object({"rank": dist.get_rank()}, src=1)) == {"rank": 1}


class OnDevice(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]  # read-only in torch too

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class Rebuilding(pickle.Unpickler):
    """Notes on which device tensors would be put, of which this machine has none."""

    def find_class(self, module, name):
        return (lambda *arguments: arguments) if name == "_to_current_device" else super().find_class(module, name)


def test_tensors_of_a_device_travel_by_value_without_its_index():
    tensor = torch.arange(3.0).as_subclass(OnDevice)
    message = pack_object({"nested": [SimpleNamespace(inner=tensor)], "host": torch.ones(2)})
    received = Rebuilding(io.BytesIO(message)).load()
    values, device_type, requires_grad = received["nested"][0].inner
    assert (values.tolist(), device_type, requires_grad) == ([0.0, 1.0, 2.0], "cuda", False)
    assert received["host"].tolist() == [1.0, 1.0]
    assert b"cuda:1" not in message


@pytest.mark.parametrize(
    ("backend", "device", "passed"),
    [
        ("nccl", torch.device("cuda", 1), torch.device("cuda", 1)),
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 1), None),
        ("gloo", torch.device("cpu"), None),
    ],
)
def test_nccl_is_told_its_device_when_the_group_opens(backend, device, passed, monkeypatch):
    options = {}

    def init_process_group(backend, **given):
        options.update(given)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = LoopbackCluster(0, 1, listener.getsockname()[1], listener)
        open_process_group(cluster, backend=backend, timeout=TIMEOUT, device=device)
        close_process_group()
    assert options["device_id"] == passed


def test_an_interface_is_selected_for_any_backend(monkeypatch):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    selected = []
    monkeypatch.setattr("dstrat.parallel.process_group.select_interface", lambda *peer: selected.append(peer))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        open_process_group(LoopbackCluster(0, 1, port, listener), backend="fake", timeout=TIMEOUT)
        close_process_group()
    assert selected == [("127.0.0.1", port)]


def test_a_process_group_can_be_opened_again_in_the_same_job():
    def twice(store):
        close_process_group()
        open_process_group(LocalEnvironment(os.environ), backend="gloo", timeout=TIMEOUT)
        return reduce_tensor(torch.tensor(1.0), reduce_op="sum").item()

    assert in_ranks(twice) == 2.0


def test_no_rank_goes_on_before_the_process_group_is_open_in_all(monkeypatch):
    init_process_group = dist.init_process_group
    opened_at = []

    def slow_in_rank_1(*args, **kwargs):
        init_process_group(*args, **kwargs)
        time.sleep(0.3 * dist.get_rank())
        opened_at.append(time.monotonic())

    def times(store):
        opened_at.append(time.monotonic())
        return gather_tensors(torch.tensor(opened_at, dtype=torch.float64)).tolist()

    monkeypatch.setattr(dist, "init_process_group", slow_in_rank_1)
    (_, rank_0_goes_on), (rank_1_opens, _) = in_ranks(times)
    assert rank_0_goes_on >= rank_1_opens


def test_a_process_group_of_the_users_is_joined():
    def join(store):
        group = dist.group.WORLD
        open_process_group(LocalEnvironment(os.environ), backend="gloo", timeout=TIMEOUT)
        return dist.group.WORLD is group

    assert in_ranks(join)


def sum_or_error():
    """Return what all ranks add up in a run in the open group, or the error."""
    try:
        open_process_group(LocalEnvironment(os.environ), backend="gloo", timeout=TIMEOUT)
    except MisuseError as error:
        return str(error)
    return float(reduce_tensor(torch.tensor(1.0 + dist.get_rank()), reduce_op="sum"))


def fail_and_go_on(_, *, num_begun, sends_messages=False):
    """Fail in ranks that have begun so many collectives, go on twice, and return the errors and sums of all ranks."""
    with contextlib.suppress(ValueError), noting_failed_steps(sends_messages=sends_messages):
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(num_begun[dist.get_rank()])]
        raise ValueError(f"bad sample after {len(works)} collectives")
    seen = [sum_or_error(), sum_or_error()]
    store = dist.PrefixStore("seen", current_job())  # where collectives do not work
    store.set(str(dist.get_rank()), json.dumps(seen))
    return [json.loads(store.get(str(rank))) for rank in range(2)] if dist.get_rank() == 0 else None


LEFT = "a step has failed in rank 0 of 2 (ValueError: bad sample after {} collectives), and ranks have left it at"


@pytest.mark.parametrize(
    "case", [{"num_begun": (0, 1)}, {"num_begun": (2, 1)}, {"num_begun": (1, 1), "sends_messages": True}], ids=str
)
def test_a_group_that_ranks_have_left_at_different_points_serves_no_other_run(case):
    for messages in in_ranks(partial(fail_and_go_on, **case)):
        assert len(messages) == 2
        assert all(message.startswith(LEFT.format(case["num_begun"][0])) for message in messages), messages


def test_a_group_that_all_ranks_have_left_at_the_same_point_serves_other_runs():
    assert in_ranks(partial(fail_and_go_on, num_begun=(1, 1))) == [[3.0, 3.0], [3.0, 3.0]]


def test_the_job_is_the_store_of_its_opening_with_the_cluster_and_timeout():
    def describe(job):
        job.set("from rank", str(dist.get_rank()))
        store = dist.PrefixStore("of a package", job)
        store.set("key", "value")
        seen_in_thread = []
        thread = threading.Thread(target=lambda: seen_in_thread.append(current_job()))
        thread.start()
        thread.join()
        return {
            "size": job.cluster.world_size,
            "timeout": job.timeout,
            "value": store.get("key"),
            "is current": current_job() is job and seen_in_thread == [job],
        }

    assert in_ranks(describe) == {"size": 2, "timeout": TIMEOUT, "value": b"value", "is current": True}


def test_closing_ends_the_job_and_a_group_that_the_user_has_opened():
    def close(job):
        first = (dist.is_initialized(), current_job() is job)
        close_process_group()
        ended = (dist.is_initialized(), current_job(), rank_and_size())
        # As a script does, or torchrun's or Ray's worker.
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("of the user", job), rank=int(os.environ["RANK"]), world_size=2
        )
        opened = (dist.is_initialized(), current_job(), rank_and_size()[1])
        dist.barrier()  # gloo fails in a rank that still connects when another one leaves
        close_process_group()
        return first, ended, opened, dist.is_initialized()

    first, ended, opened, is_open = in_ranks(close)
    assert first == (True, True)
    assert ended == (False, None, (0, 1))
    assert opened == (True, None, 2)
    assert not is_open


def test_a_process_group_of_another_size_is_refused():
    class Larger(LocalEnvironment):
        world_size = 3

    def join(store):
        with pytest.raises(ClusterError, match=r"open already, with rank \d of 2, and .* says rank \d of 3: close it"):
            open_process_group(Larger(os.environ), backend="gloo", timeout=TIMEOUT)
        return True

    assert in_ranks(join)


def test_ranks_that_see_the_same_catalog_go_on():
    def compare(store):
        check_same_catalog(Seen(("ddp dstrat-ddp 0.1.0",)), store, dist.get_rank(), dist.get_world_size())
        return True

    assert in_ranks(compare, ranks=3)


def test_a_rank_that_sees_another_catalog_is_told_what_differs():
    def compare(store):
        lines = ("ddp dstrat-ddp 0.1.0",) if dist.get_rank() == 0 else ("ddp dstrat-ddp 0.2.0",)
        check_same_catalog(Seen(lines), store, dist.get_rank(), dist.get_world_size())
        dist.barrier()

    with pytest.raises(RankFailedError, match="rank 1 of 2 failed") as failure:
        in_ranks(compare)
    text = str(failure.value)
    assert CatalogMismatchError.__name__ in text
    assert "only rank 1 has ['ddp dstrat-ddp 0.2.0']; only rank 0 has ['ddp dstrat-ddp 0.1.0']" in text


class CountingJob(Job):
    """A job that counts the requests to its store."""

    num_requests = 0

    def __getattribute__(self, name):
        if name in {"add", "check", "get", "multi_get", "set", "wait"}:
            self.num_requests += 1
        return super().__getattribute__(name)


def test_reading_reports_of_many_ranks_takes_few_requests():
    store = dist.HashStore()
    expected = {}
    for rank in range(1000):
        job = CountingJob(store, "job", cluster=SimpleNamespace(global_rank=rank, world_size=1000), timeout=TIMEOUT)
        if rank in (0, 500):
            assert job.read_failure_reports() == expected
            assert job.num_requests <= 3
        if rank % 2:
            expected[rank] = "" if rank % 3 else "ValueError: bad sample"
            job.write_failure_report(expected[rank])


def test_report_that_a_rank_is_about_to_write_does_not_hide_others():
    job = Job(dist.HashStore(), "job", cluster=SimpleNamespace(global_rank=3, world_size=8), timeout=TIMEOUT)
    job.add("number of failures", 1)  # and its rank was killed
    job.write_failure_report("OSError: disk full")
    assert job.read_failure_reports() == {3: "OSError: disk full"}


def open_sockets():
    """What this process has open, by the targets of its descriptors."""
    return {str(fd.readlink()) for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()}


def test_the_processes_listen_on_the_loopback_only():
    of_earlier_tests = open_sockets()  # which forked ranks have too

    def listeners(store):
        dist.barrier()
        own = open_sockets() - of_earlier_tests
        addresses = set()
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:  # listening, and ours
                    addresses.add(fields[1].split(":")[0])
        return addresses

    assert in_ranks(listeners) == {"0100007F"}


IMPORTED_WHILE_OPEN = """
import socket, weakref
from datetime import timedelta
import torch.distributed as dist
from dstrat.testing.ranks.team import LoopbackCluster
from dstrat.parallel.process_group import close_process_group, open_process_group
listener = socket.create_server(("127.0.0.1", 0))
cluster = LoopbackCluster(0, 1, listener.getsockname()[1], listener)
open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=20))
group = weakref.ref(dist.group.WORLD)
import torch.distributed.nn
close_process_group()
assert group() is None
"""


def test_a_group_closes_though_torchs_functions_with_gradients_were_imported_while_it_was_open():
    subprocess.run([sys.executable, "-c", IMPORTED_WHILE_OPEN], check=True, timeout=400)


class Elsewhere(ParallelStrategy):
    """Has one device in each process, whichever of the machine's it is."""

    @property
    def root_device(self):
        return torch.device(super().root_device.type, 7)


class SharesDevices(ParallelStrategy):
    @property
    def assigned_device(self):
        return self.parallel_devices[self.local_rank // 2]


class Noting(CPUAccelerator):
    def setup(self, device=None):
        self.device = device


@pytest.mark.parametrize(("cls", "index"), [(ParallelStrategy, 1), (Elsewhere, 7), (SharesDevices, 0)])
def test_accelerator_sets_up_the_device_that_the_strategy_uses(cls, index):
    devices = [torch.device("meta", index) for index in range(2)]
    accelerator, cluster = Noting(), LoopbackCluster(1, 2, 0, None)
    strategy = cls(accelerator, devices, cluster)
    Strategy.setup_environment(strategy)
    assert accelerator.device == strategy.assigned_device == strategy.root_device == torch.device("meta", index)
