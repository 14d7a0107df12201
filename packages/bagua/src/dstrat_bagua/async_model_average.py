"""Asynchronous model averaging: weights averaged by a thread at intervals of time, while ranks train on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dstrat.errors import LaunchError, PeerError
from dstrat.parallel.job import current_job
from dstrat_bagua.algorithm import Algorithm, check_choice, check_count
from dstrat_bagua.buckets import Bucket, divide_into_buckets

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Work
    from dstrat_bagua.communication import Ranks

_PAUSE = 0.005  # seconds between two looks into the store
_SECONDS_TO_END = 5.0  # for a thread whose peers have failed


class AsyncModelAverageAlgorithm(Algorithm):
    r"""Average of weights at intervals of time, for which no rank waits.

    A thread averages copies of the weights of all ranks; after the next optimizer step each rank adds the difference:
    :math:`x \leftarrow x + avg(c) - c`, with :math:`c` its copy.  The result depends on the speed of ranks, so that no
    training is the same twice.  Asynchronous averaging of Gan et al., BAGUA, https://arxiv.org/abs/2107.01499, after
    Lian et al., Asynchronous Decentralized Parallel SGD, https://arxiv.org/abs/1710.06952.

    Args:
        peer_selection_mode: ``"all"``, the only one: the weights of all ranks are averaged.
        sync_interval_ms: Milliseconds between two averagings.
        warmup_steps: Number of first optimizer steps in which gradients are averaged instead, as in
            ``gradient_allreduce``.

    Raises:
        RequestError: An option is not possible.
    """

    replicas_differ = True
    weight_copies = 2

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0) -> None:
        self.peer_selection_mode = check_choice("peer_selection_mode", peer_selection_mode, ("all",))
        self.sync_interval_ms = check_count("sync_interval_ms", sync_interval_ms, least=1, unit="milliseconds")
        self.warmup_steps = check_count("warmup_steps", warmup_steps, least=0, unit="optimizer steps")
        self._averaging: BackgroundAveraging | None = None

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._ranks = replica.open_ranks(hierarchical=False)

    @property
    def exchanges_gradients(self) -> bool:
        return self.replica.steps < self.warmup_steps

    def reduce_gradients(self, bucket: Bucket) -> Work:
        bucket.flat.div_(self.replica.world_size)
        work: Work = dist.all_reduce(bucket.flat, async_op=True)
        return work

    def after_step(self) -> None:
        if self.exchanges_gradients or self.replica.world_size == 1:
            return
        if self._averaging is None:
            self._averaging = BackgroundAveraging(self.replica, self._ranks, self.sync_interval_ms / 1000)
        self._averaging.after_step()

    def finish(self) -> None:
        if self._averaging is not None:
            self._averaging.stop(self.replica.timeout.total_seconds())
            self._averaging = None

    def close(self) -> None:
        if self._averaging is not None:  # after an error, which the user sees instead of the thread's
            self._averaging.stop(_SECONDS_TO_END, raises=False)
            self._averaging = None


class BackgroundAveraging:
    """Rounds of averaging in a thread, which touches copies of the weights only.

    In each round the thread waits for the interval, asks for copies of the weights, which the training makes after its
    next step, and averages them when all ranks have theirs; the training adds the difference after a later step.  Ranks
    agree in the store on each round before they communicate, so that a rank that ends leaves none in a collective.

    Args:
        replica: The replica.
        ranks: All ranks.
        interval: Seconds between two rounds.
    """

    def __init__(self, replica: Replica, ranks: Ranks, interval: float) -> None:
        job = current_job()
        if job is None:
            raise LaunchError("algorithm 'async' needs the store of the job, which is open in a run of dstrat only")
        self._store = job.clone_store(f"async model average/{replica.steps}", replica.timeout)
        self._ranks, self._interval = ranks, interval
        self._device = replica.device
        self._copies = divide_into_buckets(replica.parameters.values())
        self._averages = [torch.empty_like(copy.flat) for copy in self._copies]
        self._wanted, self._copied, self._averaged = threading.Event(), threading.Event(), threading.Event()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="dstrat-bagua-async", daemon=True)
        self._thread.start()

    def after_step(self) -> None:
        """Make copies that the thread waits for, or apply averages that it has.

        Raises:
            LaunchError: The thread has failed.
        """
        if self._error is not None:
            raise LaunchError(f"the averaging of weights between ranks failed: {self._error}") from self._error
        if self._wanted.is_set():
            self._wanted.clear()
            for copy in self._copies:
                copy.load_weights()
            self._copied.set()
        elif self._averaged.is_set():
            for copy, average in zip(self._copies, self._averages, strict=True):
                copy.flat.neg_().add_(average)
                copy.add_to_weights()  # the difference only: steps since the copy stay
            self._averaged.clear()
            self.rounds += 1

    def stop(self, seconds: float, *, raises: bool = True) -> None:
        """End the thread after the round that ranks have agreed on.

        Args:
            seconds: How long to wait for it.
            raises: Whether a thread that has failed, or does not end, is an error.

        Raises:
            LaunchError: It has failed.
            PeerError: It does not end, as other ranks do not take part.
        """
        self._stopping.set()  # a round that all ranks have agreed on is finished all the same, as others wait in it
        self._thread.join(seconds)
        if raises and self._error is not None:
            raise LaunchError(f"the averaging of weights between ranks failed: {self._error}") from self._error
        if raises and self._thread.is_alive():
            raise PeerError(f"a round of averaging between ranks did not end within {seconds:g} s", timed_out=True)

    def _run(self) -> None:
        try:
            number = 0
            while self._agree_on_round(number):
                self._average()
                number += 1
        except BaseException as error:  # noqa: BLE001 - raised in the training
            self._error = error

    def _agree_on_round(self, number: int) -> bool:
        """Prepare this rank for a round, and return whether all ranks take part."""
        verdict = f"verdict {number}"
        is_ready = not self._stopping.wait(self._interval) and self._request_copies()
        if is_ready and self._store.add(f"ready {number}", 1) == self._ranks.size:  # the last one decides
            self._store.compare_set(verdict, "", "go")
        while not self._store.check([verdict]):
            if self._stopping.wait(_PAUSE):
                self._store.compare_set(verdict, "", "stop")  # without effect if all were ready first
        return self._store.get(verdict) == b"go"

    def _request_copies(self) -> bool:
        """Return whether the training has made copies, before it stopped."""
        if not self._wait(lambda: not self._averaged.is_set()):
            return False
        self._copied.clear()
        self._wanted.set()
        return self._wait(self._copied.is_set)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._stopping.wait(_PAUSE):
                return False
        return True

    @torch.no_grad()
    def _average(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # the copies
        for copy, average in zip(self._copies, self._averages, strict=True):
            average.copy_(copy.flat)  # the copy stays, as its difference to the average is added
            self._ranks.average(average)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        self._averaged.set()
