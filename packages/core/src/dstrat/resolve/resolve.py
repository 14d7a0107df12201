"""Resolution of a request: one pass that makes the plan and composes the strategy."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError, ConflictError, RequestError
from dstrat.interfaces.strategy import Components
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster, reading_environment
from dstrat.resolve.compatibility import Constraints
from dstrat.resolve.hardware import choose_accelerator, choose_devices, choose_precision
from dstrat.resolve.plan import Plan, PlanRow
from dstrat.resolve.processes import choose_launch, is_interactive, test_runner
from dstrat.resolve.request import requested_components, with_components_of
from dstrat.resolve.selection import automatic_offers, select, usable
from dstrat.resolve.strategies import choose_strategy, requested_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.hardware import DeviceSelection
    from dstrat.resolve.processes import LaunchSelection
    from dstrat.resolve.request import Request, Requested, Subject
    from dstrat.resolve.selection import Selection


def resolve_request(
    request: Request,
    *,
    catalog: Catalog | None = None,
    environ: Mapping[str, str] | None = None,
    interactive: bool | None = None,
) -> tuple[Plan, Strategy]:
    """Make the plan and construct its components; no device is touched and no process started.

    Args:
        request: The user's request.
        catalog: All components; None is the catalog of this process.
        environ: The environment variables; None is those of this process.
        interactive: Whether this is a notebook, a prompt, or the worker of another program; None finds
            out, and whether it is a test.

    Returns:
        The plan, which the same request, catalog and environment always give, and the strategy with all its components:
        the user's own instances where the request holds them.

    Raises:
        RequestError: The request contradicts itself or cannot be done.
        CatalogError: An alias cannot be used, or a record is wrong about its class.
        MisuseError: A class cannot be constructed.
    """
    plan, compose = _decide(request, catalog, environ, interactive=interactive)
    return plan, compose()


def make_plan(
    request: Request,
    *,
    catalog: Catalog | None = None,
    environ: Mapping[str, str] | None = None,
    interactive: bool | None = None,
) -> Plan:
    """Return the plan of :func:`resolve_request`, with the same arguments and errors; the strategy is not composed."""
    return _decide(request, catalog, environ, interactive=interactive)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hardware:
    """The hardware of a run, and everything else that is known before its strategy.

    Attributes:
        strategy: The strategy that the user requested, or the one that serves its alias on the accelerator; None for
            any.
        requested: The components that the user requested.
        cluster: The cluster environment.
        accelerator: The accelerator.
        devices: The devices of each machine.
        precision: The precision.
        num_nodes: Number of machines.
        num_started: Number of processes that exist already.
    """

    strategy: Selection[Strategy] | None
    requested: Mapping[Subject, Requested]
    cluster: Selection[ClusterEnvironment]
    accelerator: Selection[Accelerator]
    devices: DeviceSelection
    precision: Selection[Precision]
    num_nodes: int
    num_started: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Software:
    """The rest of a run, which depends on the hardware.

    Attributes:
        strategy: The strategy.
        launch: Who starts the processes.
        launcher: The launcher that the user requested; None for one of dstrat's.
        checkpoint_io: The checkpoint io.
    """

    strategy: Selection[Strategy]
    launch: LaunchSelection
    launcher: Selection[Launcher] | None
    checkpoint_io: Selection[CheckpointIO]


def _decide(
    request: Request, catalog: Catalog | None, environ: Mapping[str, str] | None, *, interactive: bool | None
) -> tuple[Plan, Callable[[], Strategy]]:
    """Return the plan, and a function that composes its strategy."""
    catalog = get_catalog() if catalog is None else catalog
    environ = os.environ if environ is None else environ
    num_nodes: Any = request.num_nodes
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise RequestError(f"num_nodes={num_nodes!r} is not a number of machines: give 1 or more")
    hardware = _choose_hardware(request, catalog, environ)
    software = _choose_software(request, catalog, hardware, interactive=interactive)
    plan = _plan_of(request, hardware, software)
    # A plan can be made without composing, which changes a strategy that the user has constructed.
    return plan, partial(_compose, plan, hardware, software, environ)


def _choose_hardware(request: Request, catalog: Catalog, environ: Mapping[str, str]) -> _Hardware:
    wanted = requested_strategy(request.strategy, catalog)
    strategy = None if wanted is None else wanted.selection
    beside_strategy = requested_components(request, catalog)
    requested = with_components_of(strategy, beside_strategy)
    wanted = None if wanted is None else wanted.with_arguments(requested)
    # Before the devices: in a job that a scheduler has started, the number of processes decides how many there are.
    cluster = choose_cluster(requested.get("cluster environment"), catalog, environ)
    with reading_environment(cluster):
        started = cluster.instance.num_started if cluster.instance.creates_processes_externally else 1
    accelerator = choose_accelerator(requested.get("accelerator"), catalog, wanted)
    if wanted is not None and (strategy := wanted.on(accelerator, catalog)) is not wanted.selection:
        requested = with_components_of(strategy, beside_strategy)  # the accelerator's strategy may preset others
    devices = choose_devices(
        requested.get("devices"),
        accelerator.instance,
        num_started=started,
        num_nodes=request.num_nodes,
        strategy=strategy,
    )
    return _Hardware(
        strategy=strategy,
        requested=requested,
        cluster=cluster,
        accelerator=accelerator,
        devices=devices,
        precision=choose_precision(requested.get("precision"), accelerator, catalog),
        num_nodes=request.num_nodes,
        num_started=started,
    )


def _choose_software(request: Request, catalog: Catalog, hardware: _Hardware, *, interactive: bool | None) -> _Software:
    requested = hardware.requested
    launcher = select("launcher", requested["launcher"], catalog) if "launcher" in requested else None
    interactive = False if launcher is not None else interactive  # its processes need no script
    runner = test_runner() if interactive is None else None
    constraints = Constraints(
        accelerator=hardware.accelerator,
        precision=hardware.precision,
        num_devices=hardware.devices.count,
        num_nodes=hardware.num_nodes,
        cluster=hardware.cluster,
        num_started=hardware.num_started,
        interactive=is_interactive() and runner is None if interactive is None else interactive,
        test_runner=runner,
    )
    strategy = choose_strategy(hardware.strategy, catalog, constraints)
    return _Software(
        strategy=strategy,
        launch=choose_launch(
            strategy, constraints, launcher=launcher, max_restarts=request.max_restarts, elastic=request.elastic
        ),
        launcher=launcher,
        checkpoint_io=_choose_checkpoint_io(requested.get("checkpoint io"), catalog),
    )


def _plan_of(request: Request, hardware: _Hardware, software: _Software) -> Plan:
    strategy, launch, launcher = software.strategy, software.launch, software.launcher
    accelerator, cluster, precision = hardware.accelerator, hardware.cluster, hardware.precision
    flag = getattr(precision.instance, "flag", precision.name)  # a user's class may have none
    selections = (strategy, accelerator, cluster, precision, software.checkpoint_io, launcher)
    offers = [one.offer for one in selections if one is not None and one.offer is not None]
    strategy_row = strategy.row("strategy")
    rows = [strategy_row, accelerator.row("accelerator"), hardware.devices.row]
    if hardware.num_nodes > 1:
        rows.append(PlanRow(subject="nodes", value=str(hardware.num_nodes), reason="asked for"))
    rows.append(cluster.row("cluster"))
    if launcher is not None:
        rows.append(launcher.row("launcher"))
    rows.append(launch.row)
    rows += (
        PlanRow(subject=subject, value=value, reason=reason, owner=strategy_row.owner)
        for subject, value, reason in strategy.instance.describe_layout(launch.world_size, launch.processes_per_node)
    )
    rows.append(precision.row("precision", flag if precision.offer is not None else f"{precision.name} ({flag})"))
    rows.append(software.checkpoint_io.row("checkpoint io"))
    return Plan(
        choices=tuple(rows),
        strategy=strategy.name,
        strategy_alias=strategy.alias,
        accelerator=accelerator.name,
        cluster_environment=cluster.name,
        precision=flag,
        checkpoint_io=software.checkpoint_io.name,
        device_indices=hardware.devices.indices,
        num_devices=hardware.devices.count,
        num_nodes=hardware.num_nodes,
        processes_per_node=launch.processes_per_node,
        world_size=launch.world_size,
        started_by=launch.started_by,
        start_method=launch.start_method,
        catalog_names=tuple((offer.component.kind, offer.full_alias) for offer in offers),
        max_restarts=launch.max_restarts if launcher is None else request.max_restarts,
        elastic=request.elastic,
        preemption_deadline=request.preemption_deadline,
    )


def _compose(plan: Plan, hardware: _Hardware, software: _Software, environ: Mapping[str, str]) -> Strategy:
    strategy, cluster = software.strategy.instance, hardware.cluster.instance
    accelerator, precision = hardware.accelerator, hardware.precision
    checkpoint_io = software.checkpoint_io.instance
    launcher = None if software.launcher is None else software.launcher.instance
    if launcher is None:
        launcher = _launcher(plan, strategy, cluster, checkpoint_io, environ)
    else:
        launcher.receive(processes_per_node=plan.processes_per_node, num_nodes=plan.num_nodes)
    precision_plugin: Precision | None = None
    if precision.offer is not None:  # a flag, for which a strategy or an accelerator may have an implementation
        precision_plugin = strategy.precision_for(plan.precision) or accelerator.instance.precision_for(plan.precision)
        if precision_plugin is not None and precision.offer.options:
            raise ConflictError(
                f"{precision.title}: {plan.strategy} on {plan.accelerator} computes {plan.precision!r} with its own "
                f"{type(precision_plugin).__name__}, which these options do not reach: leave them out, or construct "
                "the precision that is to be used, and give the instance"
            )
    strategy.set_components(
        Components(
            accelerator=accelerator.instance,
            parallel_devices=_parallel_devices(plan, accelerator),
            cluster_environment=cluster,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin or precision.instance,
            launcher=launcher,
        )
    )
    if plan.elastic:
        strategy.check_elastic()
    used = strategy.launcher  # a strategy may replace it
    if used is not None and used.max_restarts != plan.max_restarts:
        raise ConflictError(
            f"max_restarts={plan.max_restarts} needs a launcher that restarts processes, and {plan.strategy} has "
            f"{type(used).__name__}, which does not: leave it out, or choose another strategy or launcher"
        )
    return strategy


def _choose_checkpoint_io(requested: Requested | None, catalog: Catalog) -> Selection[CheckpointIO]:
    if requested is not None:
        return select("checkpoint_io", requested, catalog)
    for selection in usable(automatic_offers("checkpoint_io", catalog), catalog):
        # torch.load of other programs needs files.
        reason = "the default, folders" if selection.instance.is_collective else "the default"
        return replace(selection, reason=reason)
    raise RequestError("no checkpoint io is installed that may be chosen automatically: give one as a plugin")


# Components that depend on the whole plan


def _parallel_devices(plan: Plan, accelerator: Selection[Accelerator]) -> tuple[torch.device, ...] | None:
    devices = tuple(accelerator.instance.get_parallel_devices(plan.device_indices))
    record = accelerator.record
    declared = record.device_type if accelerator.offer is not None and record is not None else None
    others = {device.type for device in devices} - {declared}
    if declared is not None and others:
        raise BrokenComponentError(
            f"{accelerator.title} cannot be used: its record says device_type={declared!r}, and its devices are of the "
            f"type {', '.join(map(repr, sorted(others)))}"
        )
    return devices or None


def _launcher(
    plan: Plan, strategy: Strategy, cluster: ClusterEnvironment, checkpoint_io: CheckpointIO, environ: Mapping[str, str]
) -> Launcher | None:
    if plan.start_method is not None:
        from dstrat.checkpoint.formats import recover_checkpoint  # slow to import; most plans need none
        from dstrat.launch.job import JobSettings
        from dstrat.launch.local import LocalLauncher

        if plan.num_nodes > 1:  # variables that the user has set come first
            address = {"MASTER_ADDR": cluster.main_address, "MASTER_PORT": str(cluster.main_port)}
            environ = {**address, "NODE_RANK": str(cluster.node_rank), **environ}
        settings = JobSettings(
            num_processes=plan.processes_per_node,
            start_method=plan.start_method,
            num_nodes=plan.num_nodes,
            environ=environ,
            max_restarts=plan.max_restarts,
            elastic=plan.elastic,
            recovers_checkpoint=partial(recover_checkpoint, io=checkpoint_io),
            hang_timeout=strategy.hang_timeout,
            preemption_deadline=plan.preemption_deadline,
            reaches_other_jobs=strategy.reaches_other_jobs,
        )
        return LocalLauncher(settings)
    if plan.started_by == "cluster":
        from dstrat.launch.external import ExternalLauncher

        return ExternalLauncher(environ)
    return None
