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

from dstrat.errors import ConflictError, MisuseError, PeerError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import canonical_buffers, canonical_name
from dstrat.parallel.process_group import DEFAULT_TIMEOUT, select_interface
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_torchft.history import History
from dstrat_torchft.replicas import GROUP, LIGHTHOUSE, NUM_GROUPS, ReplicaOptions, Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import RunningTraining, StepName, TrainerLike
    from dstrat_torchft.replicas import UnitName

_DEFAULT_WAIT = timedelta(seconds=60)

START_AGAIN = "start it again, and it joins them with their state; Trainer(max_restarts=...) does so"

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
        self._buffers: dict[str, Tensor] = {}  # those of the latest step of the groups, while a batch changes them

    _unit: UnitName = "step"
    _why_no_averages = "has an average of weights that a joining group lacks: leave it out, or train by 'ddp'"

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
        # Gradients, joined, and buffers of the module, copied and joined.
        buffers = training.module_buffers + self._joined_buffers(training) if self.steps_with_other_jobs else 0
        return dataclasses.replace(training.replicated, buffers=training.trainable_parameters + buffers)

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        gradients = training.trainable_parameters
        collectives = [*self._group_collectives(training), self._exchange_between_groups(training, gradients)]
        if self.steps_with_other_jobs and (buffers := self._joined_buffers(training)):
            collectives.append(self._exchange_between_groups(training, buffers))
        divisions = (training.world_size > 1) + (self.options.num_groups > 1)
        return CommunicationLayout(
            collectives=tuple(collectives),
            copied=(4 + 2 * divisions) * gradients,  # joined, and written back
            allocated=gradients,
            assumption="" if self.options.lighthouse else f"a lighthouse runs, whose URL is in {LIGHTHOUSE}",
        )

    @property
    def steps_with_other_jobs(self) -> bool:  # type: ignore[override]  # it depends on the number of groups
        """Whether there are several groups."""
        return self.options.num_groups > 1

    def _group_collectives(self, training: TrainingSize) -> list[Collective]:
        """Return the collectives of the ranks of a group: gradients, and buffers of the first one."""
        if training.world_size == 1:
            return []
        gradients = Collective(
            kind="all_reduce", bytes=training.trainable_parameters, messages=1, ranks=training.world_size
        )
        buffers = Collective(kind="broadcast", bytes=training.module_buffers, messages=1, ranks=training.world_size)
        return [gradients, buffers] if buffers.bytes else [gradients]

    def _joined_buffers(self, training: TrainingSize) -> int:
        return 2 * training.module_buffers  # in float64, and most are in float32

    def _exchange_between_groups(self, training: TrainingSize, num_bytes: int, steps: int = 1) -> Collective:
        """Return an average over the groups, of which there is one in so many steps."""
        return Collective(
            kind="all_reduce",
            bytes=num_bytes // steps,
            messages=1 / steps,
            ranks=self.options.num_groups,
            stride=training.world_size,
        )

    # The life cycle

    def setup(self, trainer: TrainerLike) -> None:
        averages = [one for one in getattr(trainer, "callbacks", ()) if getattr(one, "averages_weights", False)]
        if averages and self.options.num_groups > 1:
            raise ConflictError(f"{type(averages[0]).__name__} {self._why_no_averages}")
        super().setup(trainer)

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        if not self.options.lighthouse:  # an evaluation needs none
            raise RequestError(
                "TorchFTStrategy needs the address of a lighthouse: start one with `torchft_lighthouse --min_replicas "
                f"1`, and set {LIGHTHOUSE}=http://HOST:29510 or pass lighthouse=...; `python -m dstrat_torchft "
                "--groups 2 train.py` starts lighthouse and groups"
            )
        self._check_optimizers()
        self._training, self._buffers = None, {}
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
            unit=self._unit,
        )

    def _check_optimizers(self) -> None:
        if self.options.num_groups > 1 and any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise MisuseError(
                "LBFGS decides by the loss how often it computes gradients in a step, and losses differ between "
                "replica groups: use another optimizer"
            )

    def join_training(self, training: RunningTraining) -> None:
        assert self._replicas is not None  # noqa: S101 - setup_optimizers has made it
        self._training = training
        # The quorum is that of the first step, in which groups that train already wait for this one.
        state = self._replicas.join()
        if state is not None:
            self._restore_training(state, training)

    def _restore_training(self, state: Mapping[str, Any], training: RunningTraining) -> None:
        self._warn_of_seed(state["seed"])
        training.restore(state["training"])
        if self.is_global_zero and self.current_step:
            _logger.warning(
                "replica group %d has joined after step %d, with the state of another group",
                self.options.group,
                self.current_step,
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
            self._buffers = {}
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
        if name == "training_step" and replicas is not None:
            self._before_training_step(replicas)
        return super().run_step(name, step, *args, **kwargs)

    def _before_training_step(self, replicas: Replicas) -> None:
        if self.steps_with_other_jobs and not self._buffers:
            self._buffers = self._copied_buffers()
        if not (self._is_accumulating or replicas.has_quorum):
            replicas.start()  # the lighthouse answers during the forward pass

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._replicas is not None and not self._is_accumulating:
            if self.world_size > 1:
                self.broadcast_tensors(self.module.buffers())
            self._synchronize(self._replicas)

    @property
    def weighs_losses(self) -> bool:
        return self.options.num_groups == 1  # groups average alike, whichever of them are alive

    def _synchronize(self, replicas: Replicas) -> None:
        """Average gradients and buffers over ranks and groups, as often as it takes until these agree on the step."""
        while True:
            if not replicas.has_quorum:
                replicas.start()
            has_received = replicas.wait()
            # Copies, made again for each attempt: after an error in the average their values mean nothing.
            # In the group first, as each rank averages with those of its number; also if it has received a state, as
            # another rank may have not.
            buckets = self._average_in_group()
            statistics = JoinedBuffers(self.module if self.steps_with_other_jobs else None)
            if not has_received:
                for tensor in (*buckets.tensors, *statistics.tensors):
                    replicas.average(tensor)
            if has_received:
                state = replicas.receive()
                if state is not None:
                    self._catch_up(state, replicas)
                    for parameter in self.module.parameters():
                        if parameter.requires_grad:
                            parameter.grad = None  # with which the optimizer's step does nothing
                    self._buffers = {}
                    return
            elif replicas.commit():
                break
        buckets.write()
        statistics.write()
        self._buffers = {}

    def _average_in_group(self) -> GradientBuckets:
        """Return the gradients, averaged over the ranks of this group; collective."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        buckets = GradientBuckets(parameters, self.from_host)
        if self.world_size > 1:
            for tensor in buckets.tensors:
                dist.all_reduce(tensor)
                tensor.div_(self.world_size)
        return buckets

    # State of another group

    def _capture(self) -> dict[str, Any]:
        """Return the state for a group that joins, or was left behind."""
        state = {
            "seed": torch.initial_seed(),
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
            "training": None if self._training is None else self._training.capture(),
        }
        # Not those that the forward pass changes, beside which the state is sent.
        buffers = self._buffers or self._copied_buffers()
        for module in (state["module"], (state["training"] or {}).get("state_dict", {})):
            module.update({name: buffers[key] for name in module if (key := canonical_name(name)) in buffers})
        return state

    def _catch_up(self, state: Mapping[str, Any], replicas: Replicas) -> None:
        """Load module and optimizers of another group, which has taken the current step already.

        Raises:
            PeerError: It has taken further steps, or has another history.
        """
        current, received = replicas.history, state["history"]
        # After one step, schedulers, counters and data follow with this batch; several they cannot skip, and callbacks
        # have seen the state that is replaced.
        if self._training is not None and not received.follows(current):
            raise PeerError(f"{describe_difference(self.options.group, current, received)}: {START_AGAIN}")
        replicas.history = received
        self.load_module_state_dict(state["module"])
        self.precision_plugin.load_state_dict(state["precision"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # Learning rates are this group's, as its own schedulers step after this batch.
            groups = saved["param_groups"] if self._training is None else optimizer.state_dict()["param_groups"]
            self.load_optimizer_state(optimizer, {**saved, "param_groups": groups})

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Return the context of an evaluation, in which the module has the buffers that all groups have."""
        with super().evaluation_context():
            current = self._copied_buffers() if self._buffers else {}
            self._write_buffers(self._buffers)  # within an accumulation those of this group are its own
            try:
                yield
            finally:
                self._write_buffers(current)

    def _copied_buffers(self) -> dict[str, Tensor]:
        return {canonical_name(name): buffer.detach().clone() for name, buffer in self.module.named_buffers()}

    @torch.no_grad()
    def _write_buffers(self, values: Mapping[str, Tensor]) -> None:
        buffers = canonical_buffers(self.module)
        for name in buffers.keys() & values.keys():
            buffers[name].copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the state, for which all groups have the same values."""
        return {} if self._replicas is None else {"torchft": self._replicas.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the identity; where groups have loaded different checkpoints, that with the most steps counts."""
        if self._replicas is not None and "torchft" in state:
            history = History.load(state["torchft"])
            # A group that joins loads the state of another one after it has begun.
            self._replicas.history = dataclasses.replace(history, has_begun=self._replicas.history.has_begun)


def describe_difference(group: int, current: History, received: History, unit: UnitName = "step") -> str:
    """Return why a group cannot go on with its state, where the others have another one."""
    behind = received.step - current.step
    if behind > 1:
        return (
            f"replica group {group} is {behind} steps behind the others, which continued without it, as it was slow or "
            "cut off"
        )
    num_peers = received.num_participants if behind == 0 else "others"
    return (
        f"replica group {group} has other weights than the others: its {unit} {current.step} was completed by "
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


class JoinedBuffers:
    """Copies of a module's floating-point buffers, such as statistics of batch norm, joined for an average.

    In float64 the mean of equal values is that value, also of a constant at the end of its range.

    Args:
        module: The module; None for no buffers.

    Attributes:
        tensors: The joined buffers, to be averaged in place; empty if there are none.
    """

    def __init__(self, module: Module | None) -> None:
        buffers = [] if module is None else [*module.buffers()]
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        pieces = [buffer.detach().reshape(-1).to(torch.float64) for buffer in self._buffers]
        self.tensors = [torch.cat(pieces)] if pieces else []

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the buffers."""
        for tensor in self.tensors:
            pieces = tensor.split([buffer.numel() for buffer in self._buffers])
            for buffer, piece in zip(self._buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))


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
