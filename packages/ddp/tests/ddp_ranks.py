"""Ranks that cost a fraction of a second: processes of the warm fork server, connected over loopback."""

import faulthandler
import importlib.util
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings

from dstrat.interfaces.cluster import ClusterEnvironment

SECONDS = 60
DIED = "died without a word"


class LoopbackCluster(ClusterEnvironment):
    """Ranks that a test has started."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    node_rank = 0

    def __init__(self, rank, world_size, port, listener):
        super().__init__({})
        self.rank, self.size, self.port, self.listener = rank, world_size, port, listener

    @classmethod
    def evidence(cls, environ):
        return None

    main_port = property(lambda self: self.port)
    world_size = property(lambda self: self.size)
    global_rank = property(lambda self: self.rank)
    local_rank = property(lambda self: self.rank)

    @property
    def listening_socket(self):
        return None if self.listener is None else self.listener.fileno()


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankRunner:
    """Runs a function of a file in several processes at once."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")

    def run(self, path, name, world_size, *, may_die=(), **arguments):
        """Return what the function returned in each rank, None for those that may die and did.

        Raises RankError with the first traceback that came.
        """
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        results = []
        processes = []
        for rank in range(world_size):
            receiving, sending = self.context.Pipe()
            place = (rank, world_size, listener.getsockname()[1], listener if rank == 0 else None)
            process = self.context.Process(target=work, args=(sending, str(path), name, place, arguments), daemon=True)
            process.start()
            sending.close()
            results.append(receiving)
            processes.append(process)
        listener.close()
        try:
            return self.collect(results, may_die)
        finally:
            for result in results:
                result.close()
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()

    def collect(self, results, may_die):
        deadline = time.monotonic() + SECONDS
        outcomes = {}
        while len(outcomes) < len(results):
            waiting = [result for result in results if results.index(result) not in outcomes]
            ready = multiprocessing.connection.wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"no answer from ranks {[results.index(r) for r in waiting]} in {SECONDS} s")
            for result in ready:
                rank = results.index(result)
                outcome, failure = receive(result)
                if failure == DIED and rank in may_die:
                    failure = None
                if failure is not None:
                    raise RankError(f"rank {rank}: {failure}")
                outcomes[rank] = outcome
        return [outcomes[rank] for rank in range(len(results))]


def receive(result):
    try:
        return result.recv()
    except EOFError:
        return None, DIED


def work(results, path, name, place, arguments):
    """What a rank does."""
    import torch

    faulthandler.dump_traceback_later(SECONDS * 0.8)  # says where a rank hangs
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Raised by torch's own torch.distributed.optim when it is imported.
    warnings.filterwarnings("ignore", message=r".torch.jit.\w+. is deprecated", category=DeprecationWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        outcome = getattr(load(path), name)(LoopbackCluster(*place), **arguments)
        results.send((outcome, None))
    except BaseException:
        results.send((None, traceback.format_exc()))
    results.poll(SECONDS)  # until all have answered: rank 0 has the store that others may still need


def load(path):
    """Import a test file under a name by which its classes pickle in this process."""
    spec = importlib.util.spec_from_file_location("rank_program", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_program"] = module
    spec.loader.exec_module(module)
    return module
