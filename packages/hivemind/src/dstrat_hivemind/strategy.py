"""Strategy of hivemind: one peer of a collaboration, which trains with others over the network."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, LaunchError, MisuseError, RequestError
from dstrat.interfaces.optimizers import SchedulerConfig
from dstrat.plugins.settings import nearest
from dstrat.training.metrics.logged import size_of
from dstrat_hivemind.internals import CollaborativeOptimizer, P2PDaemonError, PeerDHT, known_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike

INITIAL_PEERS = "INITIAL_PEERS"
"""Environment variable with the addresses of peers, separated by commas."""

_ALL_INTERFACES = ("/ip4/0.0.0.0/tcp/0",)
_START = 60.0  # seconds for the DHT and its daemon
_SET_BY_STRATEGY = {"dht", "optimizer", "params", "scheduler", "batch_size_per_step"}

_logger = logging.getLogger(__name__)


class HivemindStrategy(SingleDeviceStrategy):
    """Training of one peer together with others, which find each other over the network, join and leave.

    Each peer is a job of one process and one device.  It accumulates gradients; when all peers together have seen
    ``target_batch_size`` samples, they average the gradients and step: this is an epoch of the collaboration.
    ``trainer.global_step`` counts the local batches; :attr:`collaboration_epoch` counts the epochs, and schedulers
    follow these.

    Args:
        target_batch_size: Samples of an optimizer step, of all peers together.
        run_id: Name of the collaboration, the same for each peer.
        batch_size: Samples of a batch of this peer; None takes the length of its first tensor.
        delay_state_averaging: Whether parameters are averaged in the background.
        delay_optimizer_step: Whether the optimizer steps in the background; None follows ``delay_grad_averaging``.
        delay_grad_averaging: Whether gradients are averaged in the background.
        offload_optimizer: Whether the optimizer is on the CPU; None does so if a step or gradients are delayed.
        reuse_grad_buffers: Whether gradients accumulate in ``.grad``, which saves memory.
        scheduler_fn: Makes the scheduler of an optimizer; needed with an offloaded or delayed optimizer.
        matchmaking_time: Seconds to wait for other peers before averaging.
        averaging_timeout: Seconds after which an averaging is abandoned.
        verbose: Whether hivemind logs its progress.
        averager_opts: Arguments of hivemind's averagers.
        host_maddrs: Addresses to listen on; None listens on TCP on all interfaces, on a free port.
        initial_peers: Addresses of peers, as a list or separated by commas; None reads ``INITIAL_PEERS``, and without
            it begins a new collaboration.
        device: The device; None takes the first that the accelerator offers.
        accelerator: The hardware.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts.
        **optimizer_kwargs: Passed to hivemind.Optimizer, such as ``grad_compression`` and ``client_mode``.

    Raises:
        MisuseError: ``target_batch_size`` is missing, or hivemind.Optimizer has no such argument.
        RequestError: A number is out of range.
        ConflictError: Options exclude each other.
    """

    allows_new_optimizers = False  # hivemind.Optimizer averages the state of the one of the setup

    def __init__(
        self,
        target_batch_size: int | None = None,
        run_id: str = "dstrat_run",
        batch_size: int | None = None,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        verbose: bool = False,
        averager_opts: Mapping[str, Any] | None = None,
        host_maddrs: Sequence[str] | None = None,
        initial_peers: Sequence[str] | str | None = None,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        _check_sizes(target_batch_size, batch_size)
        _check_keywords(optimizer_kwargs, type(self))
        if matchmaking_time <= 0 or averaging_timeout <= matchmaking_time:
            raise RequestError(
                f"matchmaking_time={matchmaking_time!r} and averaging_timeout={averaging_timeout!r} are seconds, of "
                "which the first must be above 0 and the second longer than it, as it includes the search for peers"
            )
        self.target_batch_size, self.run_id, self.batch_size = target_batch_size, run_id, batch_size
        step_is_delayed = delay_grad_averaging if delay_optimizer_step is None else delay_optimizer_step
        self._recreates_optimizer = bool(step_is_delayed if offload_optimizer is None else offload_optimizer)
        _check_delays(step_is_delayed, delay_grad_averaging, delay_state_averaging, offload_optimizer)
        self._scheduler_fn = scheduler_fn
        self._reuse_grad_buffers = reuse_grad_buffers
        self._options = {
            "delay_state_averaging": delay_state_averaging,
            "delay_optimizer_step": step_is_delayed,
            "delay_grad_averaging": delay_grad_averaging,
            "offload_optimizer": self._recreates_optimizer,
            "reuse_grad_buffers": reuse_grad_buffers,
            "matchmaking_time": matchmaking_time,
            "averaging_timeout": averaging_timeout,
            # hivemind warns of request timeouts that are not below the time for matchmaking
            "averager_opts": dict(averager_opts or {"request_timeout": min(1.0, matchmaking_time / 2)}),
            "verbose": verbose,
            **optimizer_kwargs,
        }
        self._host_maddrs = list(_ALL_INTERFACES if host_maddrs is None else host_maddrs)
        self._initial_peers = read_peers(initial_peers, os.environ)
        self._batch_samples = self._samples = 0
        self._failed = False
        self._peer: CollaborativeOptimizer | None = None
        self._dht: PeerDHT | None = None

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:  # noqa: ARG002 - it is not known
        return None  # peers are other jobs, as many as there happen to be

    # The collaboration

    @property
    def collaboration_epoch(self) -> int:
        """Number of optimizer steps of the collaboration; 0 before a training."""
        return 0 if self._peer is None else int(self._peer.local_epoch)

    @property
    def num_peers(self) -> int:
        """Number of peers that train, with this one, as of the last exchange of progress."""
        return 1 if self._peer is None else max(1, self._peer.tracker.global_progress.num_peers)

    @property
    def num_samples(self) -> int:
        """Number of samples that all peers have seen in the present epoch, as of the last exchange of progress."""
        return 0 if self._peer is None else int(self._peer.tracker.global_progress.samples_accumulated)

    @property
    def num_failed_averagings(self) -> int:
        """Number of epochs in which this peer stepped with its own gradients although there were others."""
        return 0 if self._peer is None else self._peer.num_failed_averagings

    @property
    def visible_addresses(self) -> list[str]:
        """Addresses under which other peers reach this one, for their ``initial_peers``; empty before a training."""
        if self._dht is None:
            return []
        addresses = [str(address) for address in self._dht.get_visible_maddrs()]
        # The loopback is of use where there is nothing else: all peers are on this machine then.
        return [address for address in addresses if "/ip4/127." not in address] or addresses

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        self._check_optimization(trainer)
        self._batch_samples = self._samples = 0
        self._failed = False
        self._dht = self._start_dht()
        if not self._initial_peers:
            addresses = ",".join(self.visible_addresses)
            # Not logged: without it no other peer can join, and most programs show no log of this level.
            print(
                f"Other peers join {self.run_id!r} by HivemindStrategy(initial_peers={addresses!r}), "
                f"or by the environment variable:\n{INITIAL_PEERS}={addresses}",
                flush=True,
            )
        [optimizer], configs = self.optimizers, self.lr_schedulers
        scheduler = configs[0].scheduler if configs else None
        # hivemind makes an offloaded or delayed optimizer itself, of copies of the parameters on the CPU.
        if self._recreates_optimizer:
            wrapped: Any = type(optimizer)
            schedule: Any = self._scheduler_fn
        else:
            wrapped = optimizer
            schedule = scheduler if self._scheduler_fn is None else self._scheduler_fn(optimizer)
        self._peer = CollaborativeOptimizer(
            dht=self._dht,
            run_id=self.run_id,
            target_batch_size=self.target_batch_size,
            batch_size_per_step=self.batch_size,
            optimizer=wrapped,
            params=optimizer.param_groups if self._recreates_optimizer else None,
            scheduler=schedule,
            **self._options,
        )
        self.optimizers = [self._peer]
        if (created := self._peer.state_averager.scheduler) is not None:
            config = configs[0] if configs else SchedulerConfig(scheduler=created)
            # hivemind steps the scheduler, and the Trainer must not.
            config.scheduler = CollaborationScheduler(created, self._peer)
            self.lr_schedulers = [config]
        if self._initial_peers:  # the peers train already, with other parameters than the first ones
            self._peer.load_state_from_peers()

    def _start_dht(self) -> PeerDHT:
        _check_process()
        try:
            dht = PeerDHT(
                initial_peers=self._initial_peers or None, host_maddrs=self._host_maddrs, start=True, await_ready=False
            )
            dht.wait_until_ready(_START)
        except (P2PDaemonError, RuntimeError, ValueError, TimeoutError) as error:
            if not self._initial_peers:
                raise LaunchError(
                    f"hivemind's DHT did not start ({error}): check host_maddrs={self._host_maddrs!r}"
                ) from error
            raise LaunchError(
                f"none of initial_peers {', '.join(self._initial_peers)} answered ({error}): check that a peer of "
                f"{self.run_id!r} runs at one of these addresses and can be reached; the first peer prints them"
            ) from error
        return dht

    def _check_optimization(self, trainer: TrainerLike) -> None:
        if len(self.optimizers) != 1:
            raise MisuseError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and a collaboration has one: put "
                "the parameters into groups of a single optimizer"
            )
        [optimizer] = self.optimizers
        if isinstance(optimizer, LBFGS):
            raise MisuseError(
                "LBFGS computes the loss several times in a step, and peers average gradients once: "
                "use another optimizer"
            )
        frozen = sum(not p.requires_grad for group in optimizer.param_groups for p in group["params"])
        if frozen:
            raise MisuseError(
                f"{frozen} parameters of {type(optimizer).__name__} are frozen, and hivemind would decay their "
                "weights: pass it those with requires_grad only"
            )
        if self._reuse_grad_buffers and trainer.gradient_clip_val is not None:
            raise ConflictError(
                f"gradient_clip_val={trainer.gradient_clip_val!r} with reuse_grad_buffers=True would clip what earlier "
                "batches have accumulated again in each batch: leave one of them out"
            )
        self._check_schedulers()

    def _check_schedulers(self) -> None:
        schedulers = [config.scheduler for config in self.lr_schedulers]
        if schedulers and self._scheduler_fn is not None:
            raise ConflictError("scheduler_fn and a scheduler of configure_optimizers exclude each other: keep one")
        if schedulers and self._recreates_optimizer:
            raise ConflictError(
                "hivemind makes the optimizer anew if it is offloaded or delayed, and the scheduler of "
                "configure_optimizers would be of the old one: pass HivemindStrategy a scheduler_fn, such as "
                "lambda optimizer: StepLR(optimizer, 10)"
            )
        if len(schedulers) > 1:
            raise MisuseError(
                f"configure_optimizers returned {len(schedulers)} schedulers, and a collaboration has one: combine "
                "them in torch.optim.lr_scheduler.ChainedScheduler"
            )
        for scheduler in schedulers:
            if not isinstance(scheduler, LRScheduler) or self.lr_schedulers[0].monitor is not None:
                raise MisuseError(
                    f"{type(scheduler).__name__} watches a value, and schedulers of a collaboration follow its epochs: "
                    "use another scheduler of torch"
                )

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._peer is not None:
            self._peer.leave(at_once=self._failed)
            if self._module is not None:  # hivemind has set gradients of its own
                self._module.zero_grad(set_to_none=True)
        elif self._dht is not None:  # the optimizer could not be made
            self._dht.kill()
        self._peer = self._dht = None
        super().teardown()

    # Steps

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name == "training_step" and self._peer is not None:
            self._batch_samples = self.batch_size or self._count(args)
        return super().run_step(name, step, *args, **kwargs)

    def _count(self, arguments: Sequence[Any]) -> int:
        """Return the number of samples of the batch among the arguments of a step."""
        batch = next((argument for argument in arguments if not callable(argument)), None)
        size = size_of(batch)
        if size is None:
            raise MisuseError(
                f"no tensor in the batch (a {type(batch).__name__}) has a length, the number of samples by which peers "
                "weight their gradients: pass HivemindStrategy batch_size=n"
            )
        if size > (self.target_batch_size or size):
            raise RequestError(
                f"a batch has {size} samples, and target_batch_size={self.target_batch_size!r} of all peers together "
                "is smaller: raise it, or use smaller batches"
            )
        return size

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._samples += self._batch_samples

    @property
    def weighs_losses(self) -> bool:
        return False  # peers weigh their gradients by numbers of samples

    @override
    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, and add its gradients to those of the collaboration, which steps when it has enough."""
        output = closure()
        samples, self._samples = self._samples, 0  # of all batches that were accumulated for this call
        optimizer.step(batch_size=samples, **kwargs)
        return output

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the collaboration."""
        return {"collaboration_epoch": self.collaboration_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an epoch of the collaboration; if peers are ahead, the first step loads their state."""
        if self._peer is not None:
            self._peer.restore_epoch(state.get("collaboration_epoch", 0))

    def rank_state(self) -> dict[str, Any]:
        """Return what this peer has accumulated in the present epoch."""
        return {} if self._peer is None else {"progress": self._peer.progress_state()}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`rank_state`."""
        if self._peer is not None and "progress" in state:
            self._peer.load_progress_state(state["progress"])


class CollaborationScheduler:
    """A scheduler that the collaboration's epochs step; other calls of ``step`` do nothing.

    Args:
        scheduler: Scheduler of the wrapped optimizer.
        optimizer: Optimizer of the collaboration.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: CollaborativeOptimizer) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer

    def step(self, *args: Any) -> None:
        """Do nothing: hivemind steps the scheduler once in each epoch of the collaboration."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the scheduler."""
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # pickle and copy ask for attributes before there is one
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def read_peers(initial_peers: Sequence[str] | str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of peers, from the argument or else the environment; empty for a new collaboration.

    Raises:
        ConflictError: Both are set, and differ.
        RequestError: An address is not one of libp2p's.
    """
    from_environment = [address for address in environ.get(INITIAL_PEERS, "").split(",") if address]
    listed = initial_peers.split(",") if isinstance(initial_peers, str) else list(initial_peers or [])
    if listed and from_environment and listed != from_environment:
        raise ConflictError(
            f"initial_peers is {','.join(listed)!r}, and the environment variable {INITIAL_PEERS} is "
            f"{','.join(from_environment)!r}: keep one of them"
        )
    addresses = [address.strip() for address in listed or from_environment]
    for address in addresses:
        if not (address.startswith("/") and "/p2p/" in address):
            raise RequestError(
                f"initial_peers has {address!r}, not an address of a peer: they look like "
                "'/ip4/192.0.2.1/tcp/40000/p2p/12D3Koo...', as the first peer prints them"
            )
    return addresses


def _check_sizes(target_batch_size: int | None, batch_size: int | None) -> None:
    if target_batch_size is None:
        raise MisuseError(
            "HivemindStrategy needs target_batch_size, the samples of an optimizer step of all peers together: "
            "Trainer(strategy=HivemindStrategy(target_batch_size=8192))"
        )
    for name, value in {"target_batch_size": target_batch_size, "batch_size": batch_size}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RequestError(f"{name}={value!r} must be a whole number of samples, at least 1")
    if batch_size is not None and batch_size > target_batch_size:
        raise RequestError(
            f"batch_size={batch_size!r} of this peer is larger than target_batch_size={target_batch_size!r} of all "
            "peers together: raise that, or use smaller batches"
        )


def _check_keywords(keywords: Mapping[str, Any], cls: type) -> None:
    possible = known_options()
    for name in keywords:
        if name in _SET_BY_STRATEGY:
            raise MisuseError(f"{cls.__name__} sets {name!r} of hivemind.Optimizer itself: leave it out")
        if name not in possible:
            near = nearest(name, [*possible, *inspect.signature(cls).parameters])
            advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"possible are {', '.join(possible)}"
            raise MisuseError(f"{cls.__name__} got {name!r}, which neither it nor hivemind.Optimizer knows; {advice}")


def _check_delays(step: bool, gradients: bool, state: bool, offload: bool | None) -> None:
    if gradients and not step:
        raise ConflictError("delay_grad_averaging=True delays the optimizer's step too: leave delay_optimizer_step out")
    if step and not state:
        raise ConflictError(
            "delay_optimizer_step or delay_grad_averaging needs delay_state_averaging=True, as parameters are averaged "
            "after the step"
        )
    if step and offload is False:
        raise ConflictError("a delayed optimizer step runs on the CPU: leave offload_optimizer=False out")


def _check_process() -> None:
    """Raise LaunchError where hivemind cannot start the processes of its DHT and averagers."""
    if multiprocessing.current_process().daemon:
        raise LaunchError(
            "hivemind starts processes, which a daemonic process of multiprocessing, such as a worker of a pool, must "
            "not: run the peer as a program by itself"
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("hivemind sets signal handlers, which only the main thread can: call fit there")
