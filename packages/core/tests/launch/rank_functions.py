"""What ranks run in tests that need torch and a process group."""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.launch.rank import note_failure
from dstrat.parallel.process_group import open_process_group


def open_group(seconds):
    cluster = LocalEnvironment()
    open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=seconds))
    return cluster.global_rank


def add_up(factor):
    tensor = torch.ones(3) * factor * (open_group(30) + 1)
    dist.all_reduce(tensor)
    return {"sum": tensor, "threads": torch.get_num_threads()}


def has_compiler():
    return "torch._dynamo" in sys.modules


def get_stuck():
    """Rank 1 never comes to the second meeting."""
    rank = open_group(4.0)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        fall_asleep()
    dist.all_reduce(torch.ones(1))


def hang_in_the_cleanup():
    """Rank 1 fails, and cannot clean up."""
    rank = open_group(1.0)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        try:
            raise ValueError("boom")
        except ValueError as error:
            note_failure(error)
            fall_asleep()
    dist.all_reduce(torch.ones(1))


def abort_like_a_watchdog():
    """A thread of native code aborts rank 0 while it waits; rank 1 sleeps."""
    if os.environ["RANK"] == "1":
        Path(os.environ["DSTRAT_JOB"], "asleep").touch()
        fall_asleep()
    while not Path(os.environ["DSTRAT_JOB"], "asleep").exists():
        time.sleep(0.01)
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    library.pthread_create(ctypes.byref(thread), None, library.abort, None)
    fall_asleep()


def fall_asleep():
    time.sleep(600)


def never_arrive(rank):
    """One rank does not even open the process group."""
    asleep = Path(os.environ["DSTRAT_JOB"], "asleep")
    if os.environ["RANK"] == str(rank):
        asleep.touch()
        fall_asleep()
    while not asleep.exists():
        time.sleep(0.01)
    open_group(1.0)


def stop_before_all_have_come(supervisor):
    """Rank 0 has the job stopped and obeys; the other one misses the signal, and waits for it."""
    if os.environ["RANK"] == "0":
        os.kill(supervisor, signal.SIGINT)
        fall_asleep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    open_group(600)


def raise_while_others_wait():
    """Rank 2 fails, and the others lose it at the same moment."""
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


def raise_after_hanging_up():
    """Rank 1 is lost by the other before it fails."""
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(0.3)
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


def die_while_others_wait():
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


def leave_early(way):
    """Rank 1 has enough before the others have."""
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        WAYS_TO_LEAVE[way]()
        return
    dist.all_reduce(torch.ones(1))


WAYS_TO_LEAVE = {
    "return": int,
    "sys.exit()": sys.exit,
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
}


def raise_what_sounds_like_a_lost_peer():
    """Rank 1 fails for a reason of its own, and the other one loses it before."""
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(0.3)
        raise RuntimeError("cannot read the shard: Connection reset by peer")
    dist.all_reduce(torch.ones(1))


class Slow(torch.utils.data.Dataset):
    """Data that do not come."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        fall_asleep()


def wait_for_data_too_long():
    """Rank 1 gives up waiting for its loader's worker, and the other one loses it before."""
    rank = open_group(30)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.destroy_process_group()
        list(torch.utils.data.DataLoader(Slow(), num_workers=1, timeout=1))
    dist.all_reduce(torch.ones(1))


def listeners():
    """Return the addresses on which any process of this network namespace's ranks listens."""
    open_group(30)
    dist.all_reduce(torch.ones(1))
    found = listening_addresses()
    dist.barrier()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return [address for addresses in gathered for address in addresses]


def listeners_of_the_supervisor():
    """Return the addresses on which the process that has forked this one listens."""
    open_group(30)
    dist.barrier()  # all ranks have been started
    return listening_addresses(os.getppid())


def listening_addresses(pid="self"):
    """Return the hexadecimal addresses of a process's listening sockets."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    lines = [line for table in ("tcp", "tcp6") for line in Path("/proc/self/net", table).read_text().splitlines()[1:]]
    sockets = [line.split() for line in lines]
    return [
        fields[1].partition(":")[0]
        for fields in sockets
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in links  # 0A is TCP_LISTEN
    ]


class RankOfWorker(torch.utils.data.Dataset):
    """What a worker of a DataLoader sees of the job."""

    def __init__(self):
        self.cluster = LocalEnvironment()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.cluster.global_rank, self.cluster.world_size


def rank_in_worker():
    loader = torch.utils.data.DataLoader(RankOfWorker(), num_workers=1, batch_size=None)
    return list(loader)


def return_lambda():
    return {"metrics": [1.0, lambda: 2]}


def identity(*args, **kwargs):
    return args, kwargs


def views():
    """Return two tensors that share memory, one of them large."""
    whole = torch.arange(1_000_000.0)
    return whole, whole[10:20]
