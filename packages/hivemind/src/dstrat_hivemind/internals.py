"""hivemind's DHT, averagers and optimizer, which end with their process; written for hivemind 1.1.12."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import warnings
from functools import partial
from multiprocessing.context import ForkProcess
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from dstrat.launch.rank import die_with_parent

__all__ = ["CollaborativeOptimizer", "P2PDaemonError", "PeerDHT", "known_options"]

_WITHDRAWAL = 2.0  # seconds for the message to the other peers
_END = 1.0  # seconds for a killed process

_logger = logging.getLogger(__name__)


# Processes that end with the one that has started them


class PeerDHT(hivemind.DHT):  # type: ignore[misc]  # hivemind has no types that mypy sees
    """hivemind's node of the distributed hash table, which does not outlive its process, and nor does its daemon."""

    def run(self) -> None:
        die_with_parent()
        warnings.simplefilter("ignore", DeprecationWarning)  # of what hivemind uses; an error would end this process
        # hivemind leaves its daemon (p2pd) alive where this process is killed.  Only this process sees the change.
        asyncio.subprocess.create_subprocess_exec = partial(
            asyncio.subprocess.create_subprocess_exec, preexec_fn=die_with_parent
        )
        super().run()


class _ForkedAverager:
    """Starts an averager by fork and lets Ctrl-C reach this process.

    hivemind takes the default start method, which is spawn in a process that was spawned, and its averagers do not
    pickle.  It also ignores SIGINT for good in the process that starts them.
    """

    def run(self) -> None:
        die_with_parent()
        super().run()  # type: ignore[misc]  # of the averager

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        try:
            super().run_in_background(await_ready, timeout)  # type: ignore[misc]  # likewise
        finally:
            signal.signal(signal.SIGINT, handler)

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return ForkProcess._Popen(process)  # multiprocessing has no other way


class _StateAverager(_ForkedAverager, TrainingStateAverager):  # type: ignore[misc]
    """Averages parameters with peers."""

    def _init_components(self, param_groups: Any, optimizer: Any, scheduler: Any, initialize_optimizer: Any) -> Any:  # noqa: ARG002 - hivemind's
        # hivemind's own initialization takes a step with zero gradients: see initialize_state.
        components = super()._init_components(param_groups, optimizer, scheduler, initialize_optimizer=False)
        initialize_state(components[0])
        return components


class _GradientAverager(_ForkedAverager, GradientAverager):  # type: ignore[misc]
    """Averages gradients with peers."""


# Peers call each other's averagers by the names of their classes.
_StateAverager.__name__, _GradientAverager.__name__ = TrainingStateAverager.__name__, GradientAverager.__name__


# The optimizer


class CollaborativeOptimizer(hivemind.Optimizer):  # type: ignore[misc]
    """hivemind's optimizer, with the state dict of the optimizer that it wraps.

    Args:
        averager_opts: Passed to both averagers; hivemind documents this, and passes them to that of the state only.
        **options: Arguments of hivemind.Optimizer.

    Attributes:
        num_failed_averagings: Number of epochs in which peers were known and the gradients of none were averaged.
        num_averaged_peers: Number of peers, with this one, of the last averaging of gradients.
    """

    num_failed_averagings = 0
    num_averaged_peers = 1

    def __init__(self, *, averager_opts: dict[str, Any], **options: Any) -> None:
        self._averager_opts = averager_opts
        super().__init__(averager_opts=averager_opts, **options)

    def _make_state_averager(self, **options: Any) -> TrainingStateAverager:
        return _StateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            **options,
        )

    def _make_gradient_averager(self, factory: Any, **options: Any) -> GradientAverager:
        return super()._make_gradient_averager(factory or _GradientAverager, **{**self._averager_opts, **options})

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless hivemind accumulates in them (``reuse_grad_buffers``) and clears them itself."""
        if not (self.use_gradient_averaging and self.grad_averager.reuse_grad_buffers):
            super().zero_grad(set_to_none)

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: Any) -> None:
        num_peers = self.tracker.global_progress.num_peers
        super()._average_gradients_and_load_into_optimizer(maybe_step_control)
        self.num_averaged_peers = _group_size(maybe_step_control)
        if num_peers > 1 and self.num_averaged_peers == 1:
            self._report_failed_averaging(num_peers)

    def _report_failed_averaging(self, num_peers: int) -> None:
        self.num_failed_averagings += 1
        _logger.warning(
            "epoch %d of run %r: the gradients were not averaged with any of %d other peers, and this peer steps with "
            "its own; if it happens often, raise matchmaking_time (%.1f s) or averaging_timeout (%.1f s)",
            self.local_epoch,
            self.run_id,
            num_peers - 1,
            self.matchmaking_time,
            self.averaging_timeout,
        )

    # State: that of the wrapped optimizer, so that checkpoints move to other strategies

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the wrapped optimizer."""
        defaults: dict[str, Any] = self.opt.defaults
        return defaults

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.opt.state

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer, after delayed updates."""
        self.state_averager.step(wait_for_delayed_updates=True)
        state: dict[str, Any] = self.opt.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the wrapped optimizer."""
        self.opt.load_state_dict(state_dict)

    def progress_state(self) -> dict[str, Any]:
        """Return the gradients that this peer has accumulated in the present epoch, and of how many samples."""
        averager = self.grad_averager
        if averager is None:
            return {"samples": self.tracker.local_progress.samples_accumulated}
        return {
            "samples": averager.local_samples_accumulated,
            "times": averager.local_times_accumulated,
            "anchor": averager._anchor_batch_size,  # hivemind has no other way
            "gradients": [accumulated.detach().cpu().clone() for accumulated in averager._grad_accumulators()],
        }

    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`progress_state`."""
        averager = self.grad_averager
        if averager is not None and "gradients" in state:
            averager.local_samples_accumulated, averager.local_times_accumulated = state["samples"], state["times"]
            averager._anchor_batch_size = state["anchor"]
            for accumulated, saved in zip(averager._grad_accumulators(), state["gradients"], strict=True):
                accumulated.copy_(saved)
        self.tracker.report_local_progress(self.local_epoch, state["samples"])

    def restore_epoch(self, epoch: int) -> None:
        """Go on from an epoch of the collaboration, with the parameters that the module has now."""
        self.state_averager.local_epoch = epoch
        if self.offload_optimizer:  # it steps copies of the parameters, which the checkpoint has not changed
            offloaded = [parameter for group in self.opt.param_groups for parameter in group["params"]]
            with torch.no_grad():
                for parameter, copy in zip(self.state_averager.main_parameters, offloaded, strict=True):
                    copy.copy_(parameter)
        with self.tracker.pause_updates():  # its thread would report the old epoch to the others
            self.tracker.update_epoch(epoch)

    # The end

    def leave(self, *, at_once: bool) -> None:
        """Leave the collaboration and end all processes, those of the DHT too.

        Args:
            at_once: Whether rounds that have begun are abandoned; peers of them go on after their timeout.
        """
        with contextlib.suppress(Exception):  # the DHT may be what has failed
            self._withdraw_progress()
        if not at_once:
            with contextlib.suppress(Exception):
                self._end_rounds()
            # Before the averagers: the DHT reports each message whose sender is gone, and waits after it.
            self.dht.shutdown()
        for averager in filter(None, (self.state_averager, self.grad_averager)):
            averager._inner_pipe.send(("_SHUTDOWN", None))  # to its thread in this process
        for process in filter(None, (self.state_averager, self.grad_averager, self.dht)):
            if process.is_alive():
                process.kill()
            process.join(_END)

    def _end_rounds(self) -> None:
        """Finish the rounds of averaging in which others wait for this peer, and cancel the others."""
        self.state_averager.step(wait_for_delayed_updates=True)
        for scheduled in filter(None, (self.scheduled_grads, self.scheduled_state)):
            if scheduled.stage == AveragingStage.LOOKING_FOR_GROUP:
                scheduled.cancel()
            else:
                self._tag_along_with_zero_weight(scheduled)

    def _withdraw_progress(self) -> None:
        """Withdraw the progress of this peer, for which the others would wait, and wait until the DHT has it."""
        self.tracker.shutdown(_WITHDRAWAL)
        # The answer also means that the DHT has read all earlier messages, whose senders are about to end.
        self.dht.store(
            self.tracker.training_progress_key,
            subkey=self.tracker._local_public_key,  # as its shutdown does, without waiting
            value=None,
            expiration_time=hivemind.get_dht_time() + self.tracker.metadata_expiration,
            return_future=True,
        ).result(_WITHDRAWAL)


def known_options() -> list[str]:
    """Return the names of the arguments of hivemind.Optimizer."""
    return list(inspect.signature(hivemind.Optimizer).parameters)


def _group_size(control: Any) -> int:
    """Return the number of peers of a round of averaging, with this one; 1 if it failed."""
    if control is None or not control.done() or control.cancelled() or control.exception() is not None:
        return 1
    return len(control.result() or {}) or 1


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer without any effect on its first step.

    hivemind needs the state from the start, and creates it by a step with zero gradients: that step counts for the bias
    correction of Adam, and decays the weights.  An optimizer that has a state keeps it.
    """
    if optimizer.state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    rates: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "weight_decay") if name in group} for group in optimizer.param_groups
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update({name: value * 0 for name, value in rate.items()})  # of its type: a rate may be a tensor
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(optimizer)  # an instance attribute may be a scheduler's wrapper, which counts steps
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update(rate)
    with torch.no_grad():
        for parameter, (values, gradient) in zip(parameters, before, strict=True):
            parameter.copy_(values)
            parameter.grad = gradient
    for entry in optimizer.state.values():
        if "step" in entry:
            entry["step"] *= 0
