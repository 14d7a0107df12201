"""A rank of which test_peer_watch.py starts several, as another launcher would; the last one misbehaves."""

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from dstrat.builtin.clusters.torchelastic import TorchElasticEnvironment
from dstrat.launch.progress import watched_for_hangs
from dstrat.parallel.process_group import open_process_group
from dstrat.training.loops.stopping import Interruption

deed = sys.argv[1]
rank, size, local_size, port = map(int, sys.argv[2:])
local_rank, node_rank = rank % local_size, rank // local_size
platform.node = lambda: f"machine {node_rank}"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
cluster = TorchElasticEnvironment({
    "TORCHELASTIC_RUN_ID": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank),
})  # fmt: skip

# A wait that keeps a processor busy, as those for a GPU do: its file says that it is one of torch.distributed, and all
# of it is one line, as a wait in native code is.
WAIT = """
def wait_busily():
    while True: time.sleep(0.1); sum(range(500_000))
"""
# One function for each of many collectives.
WAITS = "".join(f"def wait_{index}(end):\n    while time.monotonic() < end: pass\n" for index in range(80))
exec(compile(WAIT + WAITS, Path(dist.__file__).with_name("wait.py"), "exec"))

open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=600))
limit = timedelta(seconds=600 if deed in ("sleep", "block") else 1)  # such a rank is not to end as one that hangs
limits = {"hang_timeout": limit, "timeout": timedelta(seconds=600)}
with watched_for_hangs(SimpleNamespace(**limits, global_rank=rank, local_rank=local_rank, world_size=size)):
    if rank == size - 1:
        time.sleep(1)  # so that it has published its state, and others know of it
        match deed:
            case "wait":
                dist.barrier()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "work":
                for index in range(80):
                    globals()[f"wait_{index}"](time.monotonic() + 0.1)
            case "sleep":
                with Interruption():
                    print("sleeps", flush=True)
                    time.sleep(600)
            case "block":  # in native code, without the interpreter's lock, as in a wait for a GPU
                mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
                libc.pthread_mutex_lock(mutex)
                with Interruption():
                    threading.Timer(1, print, ["blocks"], {"flush": True}).start()  # when this thread does
                    libc.pthread_mutex_lock(mutex)
    if deed == "work":
        dist.barrier()
        sys.exit()
    wait_busily()  # noqa: F821 - made above
