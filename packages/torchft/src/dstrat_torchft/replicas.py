"""Replica groups of a training: quorum, averages over the groups, and votes on steps, by torchft's Manager."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch.distributed as dist

from dstrat.errors import LaunchError, PeerError
from dstrat_torchft.history import History
from dstrat_torchft.internals import (
    GlooGroup,
    Manager,
    NCCLGroup,
    StateTransport,
    TrainingEnd,
    UnequalGroupsError,
    servers_on,
    silence_known_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from datetime import timedelta

    from torch import Tensor

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse; torchft's name."""
GROUP, NUM_GROUPS = "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
"""Environment variables with the number of this group, from 0, and how many there are; torchft's names."""

UnitName = Literal["step", "exchange"]

_PROBE = 2.0  # seconds in which a lighthouse accepts a connection
_PAUSE = 0.5  # seconds before the lighthouse is asked again for groups that are not there yet
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """Settings of a replica group.

    Attributes:
        lighthouse: URL of the lighthouse.
        group: Number of this group, from 0.
        num_groups: Number of groups that share the data.
        min_replica_size: Fewest groups with which a step is taken.
        timeout: Longest wait for the other groups within a step, and for the state of another group.
        quorum_timeout: Longest wait for the lighthouse, and for as many groups as are needed.
        hostname: Name under which other machines reach this one; None takes the loopback if the lighthouse is there.
    """

    lighthouse: str
    group: int
    num_groups: int
    min_replica_size: int
    timeout: timedelta
    quorum_timeout: timedelta
    hostname: str | None = None

    @property
    def address(self) -> str:
        """The name under which other groups reach this one."""
        return self.hostname or self.bind_address or socket.gethostname()

    @property
    def bind_address(self) -> str | None:
        """The address to which servers of this group bind: the loopback if the lighthouse is there; None for all."""
        return "127.0.0.1" if urlsplit(self.lighthouse).hostname in _LOOPBACK else None


class Replicas:
    """The replica groups, seen from one rank of a group.

    A step, or an exchange of groups that train apart between two of them, is :meth:`start`, which asks the lighthouse
    in the background, :meth:`wait`, :meth:`average` and :meth:`commit`, or :meth:`receive` if the group is behind.
    Ranks of a group call these together, and get the same answers.

    Args:
        options: The settings.
        rank: Rank of this process in its group.
        world_size: Number of ranks of the group.
        backend: Backend of torch.distributed, ``"gloo"`` or ``"nccl"``.
        share: Returns the object of rank 0 of the group on all of its ranks; collective.
        agree: Returns whether the argument is true on all ranks of the group; collective.
        capture: Returns the state of the training, for a group that joins; called in another thread.
        unit: What the groups take together, for messages.

    Attributes:
        history: Identity of the state that this group has.

    Raises:
        LaunchError: The lighthouse cannot be reached.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        *,
        rank: int,
        world_size: int,
        backend: str,
        share: Callable[[Any], Any],
        agree: Callable[[bool], bool],
        capture: Callable[[], dict[str, Any]],
        unit: UnitName = "step",
    ) -> None:
        self.options = options
        self.history = History.of_first_values(options.group)
        self._share, self._agree, self._unit = share, agree, unit
        self._received: Mapping[str, Any] | None = None
        self._refused_since = math.inf
        self._quorum: Future[None] | None = None
        self._quorum_address = self._quorum_name = ""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dstrat_quorum")
        # Rank 0's answer on all ranks: one that raised alone would leave the others waiting.
        if not share(_accepts_connections(options.lighthouse)):
            self._executor.shutdown()
            raise LaunchError(
                f"no lighthouse answers at {options.lighthouse}: start one there with `torchft_lighthouse "
                f"--min_replicas {options.min_replica_size}`, or let `python -m dstrat_torchft` start lighthouse and "
                f"groups; the address is that of lighthouse=... or {LIGHTHOUSE}"
            )
        silence_known_warnings()
        self._store = _open_store(options) if rank == 0 else None  # it serves as long as this object keeps it
        port = share(None if self._store is None else self._store.port)
        store_address = share(options.address)
        self._process_group = (NCCLGroup if backend == "nccl" else GlooGroup)(timeout=options.timeout)
        try:
            with servers_on(options.bind_address):
                self._manager = Manager(
                    pg=self._process_group,
                    load_state_dict=self._receive,
                    # Called beside the forward pass, in which the history does not change.
                    state_dict=lambda: {**capture(), "history": self.history},
                    min_replica_size=options.min_replica_size,
                    # A group that joins takes part in the first step, with the state that it has received before.
                    use_async_quorum=False,
                    # Without it ranks of a group take first values of different groups; histories order these, too.
                    init_sync=False,
                    timeout=options.timeout,
                    quorum_timeout=options.quorum_timeout,
                    connect_timeout=options.quorum_timeout,
                    rank=rank,
                    world_size=world_size,
                    store_addr=store_address,
                    store_port=port,
                    lighthouse_addr=options.lighthouse,
                    replica_id=f"group_{options.group}",
                    hostname=options.address,
                    checkpoint_transport=StateTransport(
                        timeout=options.timeout, hostname=options.address, address=options.bind_address
                    ),
                )
        except (RuntimeError, TimeoutError) as error:
            self._executor.shutdown()
            raise LaunchError(f"torchft's Manager did not start: {error}") from error

    @property
    def current_step(self) -> int:
        """Number of steps, or of exchanges, that the groups have taken."""
        return self.history.step

    @property
    def num_groups(self) -> int:
        """Number of groups in the latest quorum."""
        return int(self._manager.num_participants())

    @property
    def has_quorum(self) -> bool:
        """Whether a quorum was asked for that no vote has ended yet."""
        return self._quorum is not None

    @property
    def has_failed(self) -> bool:
        """Whether an error has occurred since the latest quorum, after which no vote of this rank passes."""
        return self._manager.errored() is not None

    # A step

    def start(self) -> None:
        """Ask the lighthouse which groups take the next step, in the background."""
        self._received = None
        # torchft sends the state with the highest step to the groups that have another one.
        self._set_step(self.history.version)
        # torchft's own background mode leaves a group that joins out of its first step.
        self._quorum = self._executor.submit(self._manager.start_quorum)

    def wait(self) -> bool:
        """Wait for the quorum, and return whether a state has arrived, which :meth:`receive` returns.

        Raises:
            PeerError: The lighthouse does not answer, or other groups are not there in time.
        """
        assert self._quorum is not None  # noqa: S101 - start has been called
        try:
            self._quorum.result()
        except Exception as error:  # torchft's extension raises whatever its server has returned
            raise PeerError(self._describe_no_quorum(error)) from error
        self._set_step(self.history.step)  # torchft's log lines name it
        if self._manager.errored():
            self._leave_quorum()
        return self._received is not None

    def receive(self) -> Mapping[str, Any] | None:
        """Return the state of another group, if all ranks of this one have got it, or else None; ask again then.

        The quorum stays that of the next step.

        Raises:
            PeerError: The step was refused for too long.
        """
        quorum, state = self._quorum, self._received
        if not self._vote():
            self._leave_quorum()
            return None
        self._quorum, self._received = quorum, None
        return state

    def average(self, tensor: Tensor) -> None:
        """Average a tensor over the groups, in place; after an error its values mean nothing, and no vote passes."""
        self._manager.allreduce(tensor).wait()

    def refuse(self, reason: str) -> None:
        """Let this rank vote against the step, unless an error does."""
        if not self.has_failed:
            self._manager.report_error(RuntimeError(reason))

    def commit(self) -> bool:
        """Return whether the step is taken, as all ranks of this group agree.

        Raises:
            PeerError: The step was refused for too long, or another group has completed the training.
        """
        if not self._vote():
            return False
        if not self.history.has_begun:  # in a loop of one's own, which does not join before
            self._check_that_training_goes_on()
        if self._process_group.quorum != self._quorum_address:  # new on all ranks; the name is that of rank 0
            self._quorum_address = self._process_group.quorum
            self._quorum_name = self._share(self._quorum_address)
        self.history = self.history.take_step(self._quorum_name, self.num_groups)
        return True

    def _leave_quorum(self) -> None:
        """Disconnect this rank, which averages nothing in this quorum: others would wait for it until a timeout."""
        self._process_group.abort(errored=False)

    def _set_step(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def _vote(self, attempt: str | None = None) -> bool:
        self._quorum = None
        try:
            # Longer than an average takes to fail in another rank.
            if self._manager.should_commit(timeout=2 * self.options.timeout):
                self._refused_since = math.inf
                return True
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(
                f"the ranks of replica group {self.options.group} did not vote on a step: {error}"
            ) from error
        self._after_refusal(attempt or f"{self._unit} {self.current_step + 1}")
        return False

    def _after_refusal(self, attempt: str) -> None:
        options, present = self.options, self.num_groups
        error = self._manager.errored() or "an error in another rank of the group"
        if isinstance(cause := getattr(error, "original_exception", None), UnequalGroupsError):
            raise PeerError(str(cause))
        limit = options.quorum_timeout.total_seconds()
        self._refused_since = min(self._refused_since, time.monotonic())
        is_too_long = time.monotonic() - self._refused_since > limit
        if present < options.min_replica_size:  # the lighthouse's own --min_replicas may be lower
            if is_too_long:
                raise PeerError(
                    f"replica group {options.group} has waited for min_replica_size={options.min_replica_size} groups "
                    f"for quorum_timeout={limit:g} s, and {present} of them came to the lighthouse "
                    f"{options.lighthouse}: start the others, or lower min_replica_size"
                )
            time.sleep(_PAUSE)
            return
        if is_too_long:
            raise PeerError(
                f"{attempt} was refused for quorum_timeout={limit:g} s, at last because of: {_first_line(error)}"
            )
        _logger.warning("%s is repeated with the groups that are left: %s", attempt, _first_line(error))

    def _receive(self, state: Mapping[str, Any]) -> None:
        self._received = state  # loaded by the main thread, as this one runs beside the forward pass

    # Begin and end of a training

    def join(self) -> Mapping[str, Any] | None:
        """Ask for the first quorum, and return the state of another group; None if this one has the newest.

        Where no other group trains yet, all are waited for, as long as the lighthouse may take; then those that are
        there begin.

        Raises:
            PeerError: As of :meth:`wait` and :meth:`commit`.
        """
        deadline = time.monotonic() + self.options.quorum_timeout.total_seconds()
        state = None
        while True:
            self.start()
            has_received = self.wait()
            # No vote, with which a group stops sending its state.
            if not self._agree(self._manager.errored() is None):
                self._leave_quorum()
                # Refused by all ranks, so that the lighthouse connects the groups anew.
                self._vote(f"the start of replica group {self.options.group}")
                continue
            if has_received:
                state, self._received = self._received, None
                assert state is not None  # noqa: S101 - it has been received
                self.history = state["history"]
            # A state that has not begun is that of a group which waits, too.
            if self.history.has_begun or self.num_groups >= self.options.num_groups:
                self.history = self.history.begin()
                self._refused_since = math.inf
                return state
            if self._share(time.monotonic() > deadline):
                self._check_that_training_goes_on()
                _logger.warning(
                    "replica group %d begins with %d of %d groups, as the others did not come within "
                    "quorum_timeout=%g s",
                    self.options.group,
                    self.num_groups,
                    self.options.num_groups,
                    self.options.quorum_timeout.total_seconds(),
                )
                self.history = self.history.begin()  # by the next quorum, in which those that wait see it
            else:
                time.sleep(_PAUSE)

    def confirm_start(self) -> bool:
        """End the quorum of :meth:`join`, and return whether all of its groups have their states, or else join again.

        Raises:
            PeerError: The start was refused for too long.
        """
        if self._vote(f"the start of replica group {self.options.group}"):
            return True
        # Others of the same version may have begun, and be ahead within their round: this group takes their state.
        self.history = replace(self.history, has_begun=False)
        return False

    def _check_that_training_goes_on(self) -> None:
        """Raise a PeerError if a few groups would repeat what others have completed without them; collective."""
        options = self.options
        if self.num_groups >= options.num_groups:  # another training with the same lighthouse
            return
        end: TrainingEnd | None = self._share(TrainingEnd.find_newest(options.lighthouse))
        if end is None or self.current_step >= end.step:
            return
        # Also if this group has completed it: it may have been killed after that, and started again.
        raise PeerError(
            f"the training has ended: replica group {end.group} has completed it after {self._unit} {end.step}, and "
            f"replica group {options.group}, at {self._unit} {self.current_step}, would train the rest without it. Use "
            f"the weights or the checkpoint of that group; for another training start all {options.num_groups} groups, "
            f"or start the lighthouse {options.lighthouse} again"
        )

    def mark_end(self) -> None:
        """Record at the lighthouse that this group has completed the training."""
        if self.options.num_groups > 1:
            end = TrainingEnd(digest=self.history.digest, step=self.current_step, group=self.options.group)
            with contextlib.suppress(RuntimeError, TimeoutError):  # the training is complete without a lighthouse, too
                end.record(self.options.lighthouse)

    def _describe_no_quorum(self, error: Exception) -> str:
        options = self.options
        if not _accepts_connections(options.lighthouse):
            return (
                f"the lighthouse {options.lighthouse} does not answer any more ({_first_line(error)}): start it again, "
                "and then this group, which continues from its checkpoint, or from the state of a group that runs"
            )
        return (
            f"replica group {options.group} got no quorum from the lighthouse {options.lighthouse} within "
            f"quorum_timeout={options.quorum_timeout.total_seconds():g} s ({_first_line(error)}): it waits for as many "
            "groups as its --min_replicas says, and for those that are alive; start the others, or raise quorum_timeout"
        )

    def close(self, *, waits: bool) -> None:
        """Leave the other groups.

        Args:
            waits: Whether requests that are under way are waited for.
        """
        with contextlib.suppress(RuntimeError):  # of a Manager whose lighthouse or peers are gone
            self._manager.shutdown(wait=waits)
        self._executor.shutdown(wait=waits)
        self._store = None


def _open_store(options: ReplicaOptions) -> dist.TCPStore:
    """Open the store over which the ranks of this group, and groups that communicate with it, meet."""
    with socket.socket() as listener:
        listener.bind((options.bind_address or "", 0))
        port = listener.getsockname()[1]
        # Given a socket, torch does not listen on every address.
        return dist.TCPStore(
            options.address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _accepts_connections(lighthouse: str) -> bool:
    url = urlsplit(lighthouse)
    try:
        with socket.create_connection((url.hostname or "", url.port or 80), timeout=_PROBE):
            return True
    except OSError:
        return False


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
