"""Strategy of replica groups that train apart, and exchange what they have changed every few hundred steps."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.errors import PeerError, RequestError
from dstrat.interfaces.communication import CommunicationLayout
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_torchft.outer import OuterSettings, OuterWeights
from dstrat_torchft.strategy import START_AGAIN, TorchFTStrategy, describe_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import RunningTraining, TrainerLike
    from dstrat_torchft.replicas import Replicas

_DEFAULT_WAIT = timedelta(seconds=60)
_DEFAULT_QUORUM_WAIT = timedelta(minutes=5)
_HANG_MARGIN = timedelta(minutes=5)

_OUTER = "outer"
"""Key of the outer weights in a checkpoint."""


class TorchFTDiLoCoStrategy(TorchFTStrategy):
    """DiLoCo over replica groups, by torchft: a group that dies loses at most a round, and joins again.

    Each job is one replica group, of one or several ranks, and trains by itself, as by data parallelism.  After
    ``every`` optimizer steps the mean of what the groups have changed is the gradient of an outer SGD with Nesterov
    momentum, from whose weights all groups go on (DiLoCo, https://arxiv.org/abs/2311.08105).  Only for this exchange
    they need each other: it has a quorum and a vote, as each step of
    :class:`~dstrat_torchft.strategy.TorchFTStrategy` has, and is repeated without a group that dies in it.  A group
    that joins gets the state of another one in the next exchange.

    An evaluation within a round has the outer weights of the latest exchange, which all groups have; a checkpoint has
    those of the group, and the outer weights, so that it resumes exactly.  After a training all groups have the same.

    Args:
        every: Optimizer steps of a round; in manual optimization those of the first optimizer.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum; 0 for none.
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        lighthouse: URL of the lighthouse; by default that of the environment variable ``TORCHFT_LIGHTHOUSE``.
        replica_group: Number of this group, from 0; by default that of ``REPLICA_GROUP_ID``, or 0.
        num_replica_groups: Number of groups that share the training data, whether they are alive or not; by default
            that of ``NUM_REPLICA_GROUPS``, or 1.
        min_replica_size: Fewest groups with which an exchange is made; with fewer the others wait.
        replica_timeout: Longest wait for the other groups within an exchange, and for the state of another group.
        quorum_timeout: Longest wait for the lighthouse, and for min_replica_size groups, before the job fails; longer
            than a round, as a group that joins waits for the others' next exchange.
        hostname: Name under which other machines reach this one; by default that of the machine, or the loopback if the
            lighthouse is there.
        process_group_backend: Backend of torch.distributed, within the group and between groups; None takes the
            accelerator's.
        timeout: How long a rank waits for the other ranks of its group.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        RequestError: An argument or variable is out of range.
    """

    _unit = "exchange"
    _why_no_averages = (
        "averages the weights of each replica group by itself, which differ between exchanges: leave it out, as the "
        "outer weights are an average already"
    )

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        lighthouse: str | None = None,
        replica_group: int | None = None,
        num_replica_groups: int | None = None,
        min_replica_size: int = 1,
        replica_timeout: timedelta = _DEFAULT_WAIT,
        quorum_timeout: timedelta = _DEFAULT_QUORUM_WAIT,
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
            lighthouse=lighthouse,
            replica_group=replica_group,
            num_replica_groups=num_replica_groups,
            min_replica_size=min_replica_size,
            replica_timeout=replica_timeout,
            quorum_timeout=quorum_timeout,
            hostname=hostname,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._settings = OuterSettings(every=every, lr=outer_lr, momentum=outer_momentum)
        if self.hang_timeout is not None:  # a group that joins waits for a round of the others
            self.hang_timeout = max(self.hang_timeout, quorum_timeout + _HANG_MARGIN)
        self._reset()

    def _reset(self) -> None:
        self._outer: OuterWeights | None = None
        self._steps = 0
        self._in_exchange = False
        self._is_copy = False  # of a group that contributes the same changes to this exchange
        self._in_sync = True  # the module has the outer weights and buffers
        self._inner_values: dict[str, Tensor] = {}  # weights and buffers, while an evaluation has the outer ones

    @property
    def current_step(self) -> int:
        """Number of optimizer steps, the same in all groups at an exchange; 0 outside of a training."""
        return 0 if self._replicas is None else self._steps

    @property
    def weighs_losses(self) -> bool:
        return True  # gradients are averaged over the ranks of this group only

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        layout, changes = training.replicated, _changes(training)
        copies = 2 if self._settings.momentum else 1
        joined = training.trainable_parameters if training.world_size > 1 else 0  # gradients
        return dataclasses.replace(
            layout,
            buffers=joined + copies * changes + training.module_buffers,
            optimizer_temporaries=max(layout.optimizer_temporaries, 2 * changes),
        )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        within, every = self._group_collectives(training), self._settings.every
        exchange = self._exchange_between_groups(training, _changes(training) + training.module_buffers, steps=every)
        gradients = training.trainable_parameters if within else 0  # joined, divided, and written back
        return CommunicationLayout(
            collectives=(*within, exchange),
            copied=6 * gradients,
            allocated=gradients,
            assumption=f"the groups' exchange is that of a step, on average of {every}",
        )

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        self._reset()
        super().setup_optimizers(trainer)

    def _check_optimizers(self) -> None:
        """Accept every optimizer, as each steps in its own group."""

    def join_training(self, training: RunningTraining) -> None:
        assert self._replicas is not None  # noqa: S101 - setup_optimizers has made it
        self._training = training
        self._join(self._replicas)

    def _join(self, replicas: Replicas) -> None:
        """Begin with the other groups, or take the state of one that trains."""
        self._begin_outer()
        while True:
            state = replicas.join()
            if state is not None:
                self._take_over(state)
                if self._is_copy:
                    return  # its first step ends with the others' exchange, which waits for this group
            # The groups train apart from now on: none may change the state that another one is receiving.
            self._meet(replicas, exchanges=False)
            if replicas.confirm_start():
                return

    def _begin_outer(self) -> OuterWeights:
        if self._outer is None:
            self._outer = OuterWeights(self.module, self._settings)
        return self._outer

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if state["every"] != self._settings.every:
            raise RequestError(
                f"replica group {self.options.group} has every={self._settings.every}, and another one "
                f"every={state['every']}: groups exchange after the same steps, so give all the same number"
            )
        if self._training is not None:
            self._restore_training(state, self._training)
        else:
            self.load_module_state_dict(state["module"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                self.load_optimizer_state(optimizer, saved)
            self.load_state_dict(state["strategy"])
        self._is_copy = state["in_exchange"]

    def finish_training(self) -> None:
        replicas = self._replicas
        # A group that has joined in the others' last exchange is part of that, without a step of its own.
        if replicas is not None and (replicas.has_quorum or not self._in_sync):
            self._exchange(replicas, finishes=True)
        super().finish_training()

    def teardown(self) -> None:
        self._reset()
        super().teardown()

    # Steps

    def _before_training_step(self, replicas: Replicas) -> None:
        if not replicas.history.has_begun:  # in a loop of one's own, which does not join before
            self._join(replicas)
        self._in_sync = False  # it may change buffers, also where no optimizer step follows

    @override
    def _synchronize(self, replicas: Replicas) -> None:
        self._begin_outer().add_trained()  # before a step changes what was unfrozen
        if self.world_size > 1:
            self._average_in_group().write()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        if self._replicas is not None:
            self._begin_outer().add_trained()  # also where no backward pass has synchronized
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._in_sync = False
        # Whether or not it was skipped, such as after an overflow: the groups count alike.
        if self._replicas is not None and optimizer is self.optimizers[0]:
            if (self._steps + 1) % self._settings.every == 0:
                self._exchange(self._replicas)
            # After that: a group that gets the state in the exchange counts this step, too.
            self._steps += 1
        return output

    # An exchange

    def _exchange(self, replicas: Replicas, *, finishes: bool = False) -> None:
        """Average what the groups have changed, as often as it takes until they agree, and take the outer step.

        Args:
            replicas: The groups.
            finishes: Whether the training ends within the round: then the result is the mean of the weights.
        """
        outer, self._in_exchange = self._begin_outer(), True
        while True:
            if not replicas.has_quorum:
                replicas.start()
            if replicas.wait():
                state = replicas.receive()
                if state is not None:
                    self._catch_up(state, replicas)
                    outer = self._begin_outer()
                continue
            contributing, finishing = self._meet(replicas, exchanges=True, finishes=finishes)
            changes = outer.changes(are_zero=self._is_copy)
            replicas.average(changes)
            has_originals = contributing > 0 or replicas.has_failed
            if not has_originals:
                replicas.refuse("the group whose weights the others have copied has died")
            if replicas.commit():
                break
            if self._is_copy:  # decided by all ranks of this group, which may have seen different errors
                self._is_copy = self.reduce_boolean_decision(has_originals, all=False)
        # All are there in most exchanges: then nothing is rounded.
        outer.apply(changes.div_(contributing), averages=finishing == 1)
        self._in_exchange = self._is_copy = False
        self._in_sync = True

    def _meet(self, replicas: Replicas, *, exchanges: bool, finishes: bool = False) -> tuple[float, float]:
        """Return the shares of the groups that contribute changes, and that finish the training.

        Raises:
            RequestError: The groups have different settings.
        """
        settings = dataclasses.astuple(self._settings)
        flags = self.from_host(
            torch.tensor([exchanges, exchanges and not self._is_copy, finishes, *settings], dtype=torch.float)
        )
        replicas.average(flags)
        exchanging, contributing, finishing, *means = flags.tolist()
        of_groups = torch.tensor(means).allclose(torch.tensor(settings, dtype=torch.float))
        if not (of_groups or replicas.has_failed):
            every, lr, momentum = settings
            raise RequestError(
                f"replica group {self.options.group} has every={every}, outer_lr={lr} and outer_momentum={momentum}, "
                "and another group has others: give all groups the same"
            )
        if exchanging != exchanges:
            replicas.refuse("some groups begin, and others exchange")
        return contributing, finishing

    def _capture(self) -> dict[str, Any]:
        state = {"seed": torch.initial_seed(), "every": self._settings.every, "in_exchange": self._in_exchange}
        if self._training is not None:
            return {**state, "training": self._training.capture()}
        return {
            **state,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "strategy": self.state_dict(),
        }

    def _catch_up(self, state: Mapping[str, Any], replicas: Replicas) -> None:
        """Take the state of the others, which have made an exchange that this group has missed.

        Raises:
            PeerError: A Trainer runs, whose counters and callbacks cannot skip a round.
        """
        current, received = replicas.history, state["history"]
        if self._training is None:
            replicas.history = received
            self._take_over(state)
            return
        group, missed = self.options.group, received.step - current.step
        if missed == 0:
            raise PeerError(f"{describe_difference(group, current, received, self._unit)}: {START_AGAIN}")
        raise PeerError(
            f"replica group {group} has missed {missed} exchange{'s' * (missed > 1)} of the others, which continued "
            f"without it, as it was slow or cut off: {START_AGAIN}"
        )

    # The outer weights, for evaluations

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Return the context of an evaluation, in which the module has the outer weights."""
        with super().evaluation_context():
            outer = self._outer
            if outer is None or self._in_sync or self._inner_values:  # the module has them
                yield
                return
            self._inner_values = outer.inner_values()
            outer.write(outer.weights | outer.buffers)
            try:
                yield
            finally:
                inner, self._inner_values = self._inner_values, {}
                outer.write(inner)

    # State

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        self._outer, self._in_sync = None, True  # the round begins anew, unless load_state_dict follows
        super().load_sharded_module_state(state)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self._outer, self._in_sync = None, True
        super().load_module_state_dict(state, strict)

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the outer weights, these, and the group's own if the module has the outer ones."""
        state = super().state_dict()
        if self._outer is not None:
            counts = {"steps": self._steps, "in_sync": self._in_sync}
            state[_OUTER] = {**self._outer.state_dict(), **counts, "inner": dict(self._inner_values)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`."""
        super().load_state_dict(state)
        if self._replicas is not None and _OUTER in state:
            saved = state[_OUTER]
            outer = OuterWeights(self.module, self._settings)
            outer.load_state_dict(saved)
            outer.write(saved["inner"])
            self._outer, self._steps, self._in_sync = outer, saved["steps"], saved["in_sync"]


def _changes(training: TrainingSize) -> int:
    """Return the bytes of the changes of a round, which are at least in float32."""
    return max(4 * training.trainable_numel, training.trainable_parameters)
