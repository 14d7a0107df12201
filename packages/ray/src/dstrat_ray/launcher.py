"""Launcher that starts the ranks as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
import ray.cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RuntimeEnvSetupError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dstrat.errors import LaunchError, RequestError
from dstrat.interfaces.launcher import Launcher
from dstrat.launch.failures import Failure
from dstrat.launch.job import JOB_VARIABLE, LOOPBACK, PID_VARIABLE, RESTART_VARIABLE, describe_unpicklable
from dstrat.launch.task import RankOutcome, RankTask, make_rank_tasks, remove_job_folder, result_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

_GRACE = 2.0  # seconds for ranks that fail by themselves at about the same time
_GRACE_FOR_PRIMARY = 90.0  # the cause of a lost connection; Ray's health checks notice a dead machine within 65 s
_CLEANUP_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_OF_THE_JOB = (JOB_VARIABLE, PID_VARIABLE, RESTART_VARIABLE)

_log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """Starts one actor of a Ray cluster for each rank, and supervises them from the calling process.

    The calling process runs no rank itself.  A script or notebook is not run again: the function is sent to the
    actors, with classes of the script or notebook by value.  If one rank fails or dies, all actors are killed, and
    the error names that rank.  Actors have no restarts, and end with the calling process.

    Args:
        address: Address of the Ray cluster; by default that of ``ray.init()`` in this program, of ``RAY_ADDRESS``, or
            of the cluster that this machine belongs to.
        cpus_per_rank: Number of CPUs that Ray reserves for a rank.
        gpus_per_rank: Number of GPUs that Ray reserves for a rank, 0 or 1; a rank sees those of its machine's ranks.
        runtime_env: Ray's runtime environment of the actors, such as ``{"working_dir": "."}``.
        timeout: Seconds to wait until the resources are free and all actors have started.
        autoscaling: Whether the cluster adds machines by itself, so that those that it lacks are waited for.

    Raises:
        RequestError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        cpus_per_rank: float = 1,
        gpus_per_rank: int = 0,
        runtime_env: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        autoscaling: bool = False,
    ) -> None:
        # A rank has one device: with a share of a GPU, or several, local ranks would not be indices of GPUs.
        if not 0 < cpus_per_rank < math.inf or gpus_per_rank not in (0, 1) or not 0 < timeout < math.inf:
            raise RequestError(
                f"RayLauncher(cpus_per_rank={cpus_per_rank!r}, gpus_per_rank={gpus_per_rank!r}, timeout={timeout!r}) "
                "needs some CPU, some seconds, and no or one GPU: give cpus_per_rank=1, gpus_per_rank=0 or 1"
            )
        self.address = address
        self.cpus_per_rank, self.gpus_per_rank = cpus_per_rank, gpus_per_rank
        self.runtime_env = dict(runtime_env or {})
        self.timeout, self.autoscaling = timeout, autoscaling

    @property
    def runs_here(self) -> bool:
        return False

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        call = _dump_call(function, args, kwargs)
        with _connection(self.address):
            self._check_capacity()
            with self._started_ranks() as ranks:
                first = ranks[0].host
                address = (LOOPBACK, 0) if self.num_nodes == 1 else (first.address, first.port)
                tasks = make_rank_tasks(self, b"", address=address[0], port=address[1])
                try:
                    outcomes = _run_ranks(ranks, tasks, ray.put(call))
                    return cast("T", _load(result_of_ranks(outcomes, len(tasks))))
                finally:
                    # Before the folders are removed, to which ranks may still write.
                    for rank in ranks:
                        ray.kill(rank.actor)
                    _remove_folders({rank.host.node_id for rank in ranks}, tasks[0], self._options)

    # Resources

    @property
    def _resources_per_machine(self) -> dict[str, float]:
        resources = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        return {name: number * self.processes_per_node for name, number in resources.items() if number}

    @property
    def _required(self) -> str:
        machines = "1 machine" if self.num_nodes == 1 else f"{self.num_nodes} machines"
        return (
            f"launcher 'ray' needs {machines} with {_listed(self._resources_per_machine)} for "
            f"{self.processes_per_node} rank{'s' if self.processes_per_node > 1 else ''} each"
        )

    def _check_capacity(self) -> None:
        """Check that the cluster has the resources, free or not; Ray would wait for them without end.

        Raises:
            LaunchError: It has too few.
        """
        required = self._resources_per_machine
        machines = [node for node in ray.nodes() if node["Alive"]]
        fitting = [
            node
            for node in machines
            if all(node["Resources"].get(name, 0) >= number for name, number in required.items())
        ]
        if len(fitting) >= self.num_nodes or self.autoscaling:
            return
        raise LaunchError(
            f"{self._required}, and the Ray cluster has {_listed_machines(machines)}: ask for fewer devices or "
            "num_nodes, start more machines with `ray start --address=...`, or pass "
            "plugins=RayLauncher(autoscaling=True) if the cluster adds machines by itself"
        )

    # Actors

    @contextlib.contextmanager
    def _started_ranks(self) -> Iterator[list[_Rank]]:
        """Start the actors, by rank; all have ended after the block.

        Raises:
            LaunchError: The resources were not free in time, or an actor could not be started.
        """
        deadline = time.monotonic() + self.timeout
        bundles = [self._resources_per_machine] * self.num_nodes
        group = placement_group(bundles, strategy="STRICT_SPREAD" if self.num_nodes > 1 else "STRICT_PACK")
        actors: list[Any] = []
        try:
            if not group.wait(self.timeout):
                free = {name: number for name, number in ray.available_resources().items() if name in ("CPU", "GPU")}
                raise LaunchError(
                    f"{self._required}, which were not free within {self.timeout:g} s; free in the whole cluster: "
                    f"{_listed(free)}. Wait until other jobs have ended (`ray status` shows them), or pass "
                    "plugins=RayLauncher(timeout=...) with more seconds"
                )
            for node_rank in range(self.num_nodes):
                actors += [self._start_actor(group, node_rank) for _ in range(self.processes_per_node)]
            hosts = self._hosts(actors, deadline)
            yield [_Rank(actor=actor, host=host) for actor, host in zip(actors, hosts, strict=True)]
        finally:
            for actor in actors:  # again without effect; these may include ones that never started
                ray.kill(actor)
            remove_placement_group(group)

    def _start_actor(self, group: Any, node_rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node_rank)
        resources = {"num_cpus": self.cpus_per_rank, "num_gpus": self.gpus_per_rank}
        return ray.remote(RankActor).options(scheduling_strategy=strategy, **resources, **self._options).remote()

    @property
    def _options(self) -> dict[str, Any]:
        return {"runtime_env": self.runtime_env} if self.runtime_env else {}  # an empty one would replace ray.init's

    def _hosts(self, actors: Sequence[Any], deadline: float) -> list[_Host]:
        """Return the machine of each actor, when all actors have started."""
        try:
            remaining = max(1.0, deadline - time.monotonic())
            return cast("list[_Host]", ray.get([actor.host.remote() for actor in actors], timeout=remaining))
        except GetTimeoutError:
            raise LaunchError(
                f"the actors of launcher 'ray' did not start within {self.timeout:g} s: see the logs of the raylets, "
                "or pass plugins=RayLauncher(timeout=...) with more seconds"
            ) from None
        except (RayActorError, RuntimeEnvSetupError, RayError) as error:
            raise LaunchError(
                f"an actor of launcher 'ray' could not be started: install the same packages on all machines of the "
                f"cluster, dstrat-ray among them, or pass plugins=RayLauncher(runtime_env=...). Ray says: {error}"
            ) from error


# Connection to the cluster


@contextlib.contextmanager
def _connection(address: str | None) -> Iterator[None]:
    """Connect this program to the cluster, unless the user has done so.

    Raises:
        LaunchError: There is no cluster.
    """
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise LaunchError(
                f"RayLauncher(address={address!r}) is another cluster than {connected!r}, to which this program is "
                "connected: leave the address out, or call ray.shutdown() before"
            )
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"launcher 'ray' cannot connect to a Ray cluster at address {address!r} ({str(error).strip()}): start one "
            "with `ray start --head`, set RAY_ADDRESS, or call ray.init() before, which starts one on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Check that something listens at the address of a cluster, for which Ray would try for minutes.

    Raises:
        OSError: Nothing does.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def _listed(resources: Mapping[str, float]) -> str:
    shown = (f"{number:g} {name}{'' if number == 1 else 's'}" for name, number in sorted(resources.items()))
    return " and ".join(shown) or "nothing"


def _listed_machines(machines: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        f"{node['NodeManagerAddress']} ({_listed({name: node['Resources'].get(name, 0) for name in ('CPU', 'GPU')})})"
        for node in machines
    ]
    return f"{len(machines)}: {', '.join(shown)}"


# Function and result
#
# Ray's pickler sends classes of the script by value, which actors cannot import; torch.save shares no memory.


def _dump(value: object) -> bytes:
    import torch  # slow; not needed to construct the launcher

    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=ray.cloudpickle)
    return buffer.getvalue()


def _load(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)


def _dump_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return _dump(partial(_dumped_result, partial(function, *args, **kwargs)))
    except Exception as error:  # __reduce__ and __getstate__ of any class may raise anything
        objects = {
            "the function": function,
            **{f"argument {index}": value for index, value in enumerate(args)},
            **kwargs,
        }
        raise LaunchError(
            "launcher 'ray' sends the function and its arguments to actors, and "
            f"{describe_unpicklable(objects, dumps=ray.cloudpickle.dumps)} cannot be pickled ({error}): "
            "make it where it is used"
        ) from error


def _dumped_result(call: Callable[[], Any]) -> bytes:
    """Call the function in a rank; only the result of rank 0 is sent back."""
    result = call()
    return _dump(result) if os.environ["RANK"] == "0" else b""


# Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """Machine of an actor.

    Attributes:
        node_id: Its id in the cluster.
        address: Its address.
        port: A free port of it.
        gpus: Ids of the GPUs that Ray has reserved for the actor.
    """

    node_id: str
    address: str
    port: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    actor: Any
    host: _Host


class RankActor:
    """Process of a rank; its name is what Ray shows before each line of output."""

    def __init__(self) -> None:
        # Bound until the end of the process, so that no other program gets the port; torch can listen on it as well.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))

    def host(self) -> _Host:
        """Return the machine of this actor."""
        context = ray.get_runtime_context()
        return _Host(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            port=self._reserved.getsockname()[1],
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def run(self, task: RankTask, call: bytes, environ: Mapping[str, str]) -> RankOutcome:
        """Run the function as a rank."""
        os.environ.update(environ)
        return replace(task, call=call)()


def _run_ranks(ranks: Sequence[_Rank], tasks: Sequence[RankTask], call: Any) -> Iterator[RankOutcome]:
    """Yield the ends of ranks; without those that are still running some time after a failure."""
    pending = {}
    for rank, task in zip(ranks, tasks, strict=True):
        pending[rank.actor.run.remote(task, call, _environ(rank, ranks))] = (rank, task)
    deadline: float | None = None
    while pending and (deadline is None or time.monotonic() < deadline):
        done, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
        for reference in done:
            rank, task = pending.pop(reference)
            outcome = _outcome(reference, task)
            ray.kill(rank.actor)  # so that peers that wait for it fail at once
            if outcome.exit_code != 0:
                is_primary = outcome.failure is None or outcome.failure.kind == "error"
                end = time.monotonic() + (_GRACE if is_primary else _GRACE_FOR_PRIMARY)
                deadline = end if deadline is None else min(end, deadline)
            yield outcome


def _environ(rank: _Rank, ranks: Sequence[_Rank]) -> dict[str, str]:
    """Return the variables of a rank: dstrat's settings of this process, and the GPUs of its machine.

    Ray shows an actor its own GPUs only, and a local rank is the index of its GPU among those of the machine.
    """
    settings = {
        name: value for name, value in os.environ.items() if name.startswith("DSTRAT_") and name not in _OF_THE_JOB
    }
    gpus = {gpu for other in ranks if other.host.node_id == rank.host.node_id for gpu in other.host.gpus}
    return {**settings, "CUDA_VISIBLE_DEVICES": ",".join(sorted(gpus, key=_number_or_name))} if gpus else settings


def _number_or_name(gpu: str) -> tuple[bool, int, str]:
    return (not gpu.isdecimal(), int(gpu) if gpu.isdecimal() else 0, gpu)


def _outcome(reference: Any, task: RankTask) -> RankOutcome:
    try:
        return cast("RankOutcome", ray.get(reference))
    except RayError as error:  # the actor or its machine has died; Ray's text says which, and why
        text = str(error).strip()
        failure = Failure(
            kind="error",
            error=f"the process of rank {task.rank} on machine {task.node_rank} has died",
            message=text,
            traceback=text,
            time_ns=time.time_ns(),
        )
        return RankOutcome(rank=task.rank, exit_code=None, failure=failure, time_ns=failure.time_ns)


def _remove_folders(node_ids: set[str], task: RankTask, options: Mapping[str, Any]) -> None:
    """Remove the job's folder on each machine that is alive, in the runtime environment of the actors."""
    remove = ray.remote(num_cpus=0)(remove_job_folder)  # or it would wait for the CPU of a rank
    removals = {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] in node_ids:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            removal = remove.options(scheduling_strategy=strategy, **options).remote(task)
            removals[removal] = node["NodeManagerAddress"]
    if not removals:
        return
    _, unfinished = ray.wait(list(removals), num_returns=len(removals), timeout=_CLEANUP_SECONDS)
    for removal, address in removals.items():
        if error := _error_of(removal, is_finished=removal not in unfinished):  # must not hide the error of a rank
            _log.warning("the folder %s for temporary files remains on %s (%s)", task.folder, address, error)


def _error_of(removal: Any, *, is_finished: bool) -> str:
    if not is_finished:
        ray.cancel(removal, force=True)
        return f"not removed within {_CLEANUP_SECONDS:g} s"
    try:
        ray.get(removal)
    except RayError as error:
        return str(error).strip()
    return ""
