"""Strategy of replica groups that train together, of which any may die and join again."""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.optim import LBFGS

from dstrat.errors import MisuseError, PeerError, RequestError
from dstrat.parallel.process_group import DEFAULT_TIMEOUT, select_interface
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_torchft.history import History
from dstrat_torchft.replicas import GROUP, LIGHTHOUSE, NUM_GROUPS, ReplicaOptions, Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import RunningTraining, StepName, TrainerLike

_DEFAULT_WAIT = timedelta(seconds=60)

_START_AGAIN = "start it again, and it joins them with their state; Trainer(max_restarts=...) does so"

_logger = logging.getLogger(__name__)


class TorchFTStrategy(ParallelStrategy):
    """Data parallelism over replica groups, by torchft: a group that dies costs a pause, and joins again.

    Each job is one replica group, of one or several ranks.  A lighthouse lists the groups that are alive.  In each step
    gradients are averaged over the groups that are there, and all ranks of a group vote whether it is taken.  A step
    that is refused, because a group has died in it, is repeated with the gradients that are there; no batch of a living
    group is lost.  A group that joins gets weights, optimizer state, schedulers, counters and the position in the data
    from a group that trains.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        lighthouse: URL of the lighthouse, such as ``"http://192.0.2.1:29510"``; by default that of the environment
            variable ``TORCHFT_LIGHTHOUSE``.
        replica_group: Number of this group, from 0; by default that of ``REPLICA_GROUP_ID``, or 0.
        num_replica_groups: Number of groups that share the training data, whether they are alive or not; by default
            that of ``NUM_REPLICA_GROUPS``, or 1.
        min_replica_size: Fewest groups with which a step is taken; with fewer the others wait.
        replica_timeout: Longest wait for the other groups within a step, and for the state of another group.
        quorum_timeout: Longest wait for the lighthouse, and for min_replica_size groups, before the job fails.
        hostname: Name under which other machines reach this one; by default that of the machine, or the loopback if the
            lighthouse is there.
        process_group_backend: Backend of torch.distributed, within the group and between groups; None takes the
            accelerator's.
        timeout: How long a rank waits for the other ranks of its group.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        RequestError: An argument or variable is out of range.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        lighthouse: str | None = None,
        replica_group: int | None = None,
        num_replica_groups: int | None = None,
        min_replica_size: int = 1,
        replica_timeout: timedelta = _DEFAULT_WAIT,
        quorum_timeout: timedelta = _DEFAULT_WAIT,
        hostname: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
        )
        self.options = read_options(
            os.environ,
            lighthouse=lighthouse,
            group=replica_group,
            num_groups=num_replica_groups,
            min_replica_size=min_replica_size,
            timeout=replica_timeout,
            quorum_timeout=quorum_timeout,
            hostname=hostname,
        )
        self._replicas: Replicas | None = None
        self._training: RunningTraining | None = None
        self._is_accumulating = False

    # Groups

    @property
    def num_live_groups(self) -> int:
        """Number of groups in the latest quorum, with this one; 0 outside of a training."""
        return 0 if self._replicas is None else self._replicas.num_groups

    @property
    def current_step(self) -> int:
        """Number of steps that the groups have taken together; 0 outside of a training."""
        return 0 if self._replicas is None else self._replicas.current_step

    @property
    def training_sampler_kwargs(self) -> dict[str, int]:
        # Each group evaluates all of the data by itself, so that all come to the same decisions.
        groups, rank = self.options.num_groups, self.options.group * self.world_size + self.global_rank
        return {"num_replicas": groups * self.world_size, "rank": rank}

    @property
    def reaches_other_jobs(self) -> bool:  # type: ignore[override]  # it depends on the lighthouse
        """Whether groups may be on other machines, as the lighthouse is not on the loopback."""
        return bool(self.options.lighthouse) and self.options.bind_address is None

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        return dataclasses.replace(training.replicated, buffers=training.trainable_parameters)  # gradients, joined

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        if not self.options.lighthouse:  # an evaluation needs none
            raise RequestError(
                "TorchFTStrategy needs the address of a lighthouse: start one with `torchft_lighthouse --min_replicas "
                f"1`, and set {LIGHTHOUSE}=http://HOST:29510 or pass lighthouse=...; `python -m dstrat_torchft "
                "--groups 2 train.py` starts lighthouse and groups"
            )
        if self.options.num_groups > 1 and any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise MisuseError(
                "LBFGS decides by the loss how often it computes gradients in a step, and losses differ between "
                "replica groups: use another optimizer"
            )
        self._training = None
        if self.reaches_other_jobs:  # the group's own address is the loopback, and chooses no interface
            lighthouse = urlsplit(self.options.lighthouse)
            select_interface(lighthouse.hostname or "", lighthouse.port or 80)
        self._replicas = Replicas(
            self.options,
            rank=self.global_rank,
            world_size=self.world_size,
            backend=self.process_group_backend or self.accelerator.process_group_backend or "gloo",
            share=self.broadcast,
            agree=self.reduce_boolean_decision,
            capture=self._capture,
        )

    def join_training(self, training: RunningTraining) -> None:
        assert self._replicas is not None  # noqa: S101 - setup_optimizers has made it
        self._training = training
        # The quorum is that of the first step, in which groups that train already wait for this one.
        state = self._replicas.join()
        if state is not None:
            self._warn_of_seed(state["seed"])
            training.restore(state["training"])
            if self.is_global_zero and self._replicas.current_step:
                _logger.warning(
                    "replica group %d has joined after step %d, with the state of another group",
                    self.options.group,
                    self._replicas.current_step,
                )

    def _warn_of_seed(self, seed: int) -> None:
        if seed != torch.initial_seed() and self.options.num_groups > 1 and self.is_global_zero:
            _logger.warning(
                "replica group %d has another seed than the others: if the training data is shuffled, call "
                "dstrat.seed_everything(...) with the same number in all groups, or they read some samples twice and "
                "others never",
                self.options.group,
            )

    def finish_training(self) -> None:
        super().finish_training()
        if self._replicas is not None and self.is_global_zero:
            self._replicas.mark_end()

    def close_communication(self, *, aborts: bool) -> None:
        if self._replicas is not None:
            self._replicas.close(waits=not aborts)  # in an abort a quorum may never come
            self._replicas = self._training = None
        super().close_communication(aborts=aborts)

    # Steps

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        was_accumulating, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = was_accumulating

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        replicas = self._replicas
        if name == "training_step" and replicas is not None and not (self._is_accumulating or replicas.has_quorum):
            replicas.start()  # the lighthouse answers during the forward pass
        return super().run_step(name, step, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._replicas is not None and not self._is_accumulating:
            self._synchronize(self._replicas)
            if self.world_size > 1:
                self.broadcast_tensors(self.module.buffers())

    @property
    def weighs_losses(self) -> bool:
        return self.options.num_groups == 1  # groups average alike, whichever of them are alive

    def _synchronize(self, replicas: Replicas) -> None:
        """Average the gradients over ranks and groups, as often as it takes until the groups agree on the step."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        while True:
            if not replicas.has_quorum:
                replicas.start()
            has_received = replicas.wait()
            # Copies, made again for each attempt: after an error in the average their values mean nothing.
            buckets = GradientBuckets(parameters, self.from_host)
            for tensor in buckets.tensors:
                # In the group first, as each rank averages with those of its number; also if it has received a state,
                # as another rank may have not.
                if self.world_size > 1:
                    dist.all_reduce(tensor)
                    tensor.div_(self.world_size)
                if not has_received:
                    replicas.average(tensor)
            if has_received:
                state = replicas.receive()
                if state is not None:
                    self._catch_up(state, replicas)
                    for parameter in parameters:
                        parameter.grad = None  # with which the optimizer's step does nothing
                    return
            elif replicas.commit():
                break
        buckets.write()

    # State of another group

    def _capture(self) -> dict[str, Any]:
        """Return the state for a group that joins, or was left behind."""
        return {
            "seed": torch.initial_seed(),
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "training": None if self._training is None else self._training.capture(),
        }

    def _catch_up(self, state: Mapping[str, Any], replicas: Replicas) -> None:
        """Load module and optimizers of another group, which has taken the current step already.

        Raises:
            PeerError: It has taken further steps, or has another history.
        """
        current, received = replicas.history, state["history"]
        # After one step, schedulers, counters and data follow with this batch; several they cannot skip, and callbacks
        # have seen the state that is replaced.
        if self._training is not None and not received.follows(current):
            raise PeerError(f"{_describe_difference(self.options.group, current, received)}: {_START_AGAIN}")
        replicas.history = received
        self.load_module_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # Learning rates are this group's, as its own schedulers step after this batch.
            groups = saved["param_groups"] if self._training is None else optimizer.state_dict()["param_groups"]
            self.load_optimizer_state(optimizer, {**saved, "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the state, for which all groups have the same values."""
        return {} if self._replicas is None else {"torchft": self._replicas.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the identity; where groups have loaded different checkpoints, that with the most steps counts."""
        if self._replicas is not None and "torchft" in state:
            history = History.load(state["torchft"])
            # A group that joins loads the state of another one after it has begun.
            self._replicas.history = dataclasses.replace(history, has_begun=self._replicas.history.has_begun)


def _describe_difference(group: int, current: History, received: History) -> str:
    behind = received.step - current.step
    if behind > 1:
        return (
            f"replica group {group} is {behind} steps behind the others, which continued without it, as it was slow or "
            "cut off"
        )
    num_peers = received.num_participants if behind == 0 else "others"
    return (
        f"replica group {group} has other weights than the others: its step {current.step} was completed by "
        f"{current.num_participants} of the groups, and theirs by {num_peers}, "
        "as a connection was lost at its end"
    )


class GradientBuckets:
    """Copies of the gradients, joined to one tensor for each dtype, with which of them there are.

    Args:
        parameters: The trainable parameters, the same on all ranks of all groups.
        from_host: Returns a small tensor of the CPU on the device, without waiting for that.

    Attributes:
        tensors: The joined gradients, to be averaged in place.

    Raises:
        MisuseError: A gradient is sparse.
    """

    def __init__(self, parameters: Sequence[Parameter], from_host: Callable[[Tensor], Tensor]) -> None:
        self._from_host = from_host
        self._by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for parameter in parameters:
            self._by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.tensors = [self._joined(members) for members in self._by_dtype.values()]

    def _joined(self, parameters: list[Parameter]) -> Tensor:
        pieces = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        if any(piece.is_sparse for piece in pieces):
            raise MisuseError("replica groups average dense gradients, and an embedding has sparse=True: leave it out")
        # A parameter may have a gradient in another rank or group only: then the mean of its flags is above 0.
        flags = torch.tensor([float(each.grad is not None) for each in parameters], dtype=pieces[0].dtype)
        return torch.cat([*(piece.reshape(-1) for piece in pieces), self._from_host(flags)])

    def write(self) -> None:
        """Overwrite the gradients of the parameters; those that have none in any rank of any group keep none."""
        for tensor, parameters in zip(self.tensors, self._by_dtype.values(), strict=True):
            *means, flags = tensor.split([*(parameter.numel() for parameter in parameters), len(parameters)])
            lacks = any(parameter.grad is None for parameter in parameters)
            # Read only where it matters, because reading synchronizes a GPU.
            is_used = flags.tolist() if lacks else [1.0] * len(parameters)
            for parameter, mean, used in zip(parameters, means, is_used, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean.view_as(parameter))
                elif used:
                    parameter.grad = mean.view_as(parameter).clone()


def read_options(
    environ: Mapping[str, str],
    *,
    lighthouse: str | None,
    group: int | None,
    num_groups: int | None,
    min_replica_size: int,
    timeout: timedelta,
    quorum_timeout: timedelta,
    hostname: str | None,
) -> ReplicaOptions:
    """Return the settings from arguments, or else from the environment.

    Raises:
        RequestError: A value is out of range.
    """
    address = lighthouse or environ.get(LIGHTHOUSE, "")
    url = urlsplit(address)
    if address and (url.scheme not in ("http", "https") or not url.hostname):
        raise RequestError(f"lighthouse={address!r} is no URL: it looks like 'http://192.0.2.1:29510'")
    group = _read_number(environ, GROUP, 0) if group is None else group
    num_groups = _read_number(environ, NUM_GROUPS, 1) if num_groups is None else num_groups
    if not 0 <= group < num_groups:
        raise RequestError(
            f"replica_group={group!r} is none of num_replica_groups={num_groups!r}: they count from 0; set {GROUP} and "
            f"{NUM_GROUPS}, or pass both"
        )
    if not 1 <= min_replica_size <= num_groups:
        raise RequestError(
            f"min_replica_size={min_replica_size!r} can never be reached, or is no number of groups: give 1 to "
            f"num_replica_groups={num_groups}"
        )
    for name, value in {"replica_timeout": timeout, "quorum_timeout": quorum_timeout}.items():
        if value <= timedelta():
            raise RequestError(f"{name}={value!r} is no time to wait: give a timedelta of some seconds")
    return ReplicaOptions(
        lighthouse=address,
        group=group,
        num_groups=num_groups,
        min_replica_size=min_replica_size,
        timeout=timeout,
        quorum_timeout=quorum_timeout,
        hostname=hostname,
    )


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise RequestError(f"{name} needs a whole number from 0, not {text!r}")
    return int(text)
