"""Resolution of a request: one pass that makes the plan and composes the strategy."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError, ConflictError, RequestError
from dstrat.interfaces.strategy import Parts
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster, num_started
from dstrat.resolve.compatibility import Constraints
from dstrat.resolve.hardware import choose_accelerator, choose_devices, choose_precision, precision_flag
from dstrat.resolve.plan import Plan, PlanRow
from dstrat.resolve.processes import choose_launch, is_interactive, test_runner
from dstrat.resolve.request import requested_components
from dstrat.resolve.selection import automatic_offers, select_requested, usable
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
    from dstrat.resolve.request import Request, Requested
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


def _decide(
    request: Request, catalog: Catalog | None, environ: Mapping[str, str] | None, *, interactive: bool | None
) -> tuple[Plan, Callable[[], Strategy]]:
    """Return the plan, and a function that composes its strategy."""
    catalog = get_catalog() if catalog is None else catalog
    environ = os.environ if environ is None else environ
    num_nodes: Any = request.num_nodes
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise RequestError(f"num_nodes={num_nodes!r} is not a number of machines: give 1 or more")
    wanted = requested_strategy(request.strategy, catalog)
    strategy = None if wanted is None else wanted.selection
    requested = requested_components(request, strategy, catalog)
    wanted = None if wanted is None else wanted.with_arguments(requested)
    # Before the devices: in a job that a scheduler has started, the number of processes decides how many there are.
    cluster = choose_cluster(requested.get("cluster environment"), catalog, environ)
    started = num_started(cluster)
    accelerator = choose_accelerator(requested.get("accelerator"), catalog, wanted)
    if wanted is not None and (strategy := wanted.on(accelerator, catalog)) is not wanted.selection:
        requested = requested_components(request, strategy, catalog)  # the accelerator's strategy may preset others
    devices = choose_devices(
        requested.get("devices"), accelerator.instance, num_started=started, num_nodes=num_nodes, strategy=strategy
    )
    precision = choose_precision(requested.get("precision"), accelerator, catalog)
    launcher = select_requested("launcher", requested["launcher"], catalog) if "launcher" in requested else None
    interactive = False if launcher is not None else interactive  # its processes need no script
    runner = test_runner() if interactive is None else None
    constraints = Constraints(
        accelerator=accelerator,
        precision=precision,
        num_devices=devices.count,
        num_nodes=num_nodes,
        cluster=cluster,
        num_started=started,
        interactive=is_interactive() and runner is None if interactive is None else interactive,
        test_runner=runner,
    )
    strategy = choose_strategy(strategy, catalog, constraints)
    launch = choose_launch(strategy, constraints, launcher=launcher, max_restarts=request.max_restarts)
    checkpoint_io = _choose_checkpoint_io(requested.get("checkpoint io"), catalog)
    flag = precision_flag(precision)
    plan = Plan(
        choices=(
            strategy.row("strategy"),
            accelerator.row("accelerator"),
            devices.row,
            *([PlanRow(subject="nodes", value=str(num_nodes), reason="asked for")] if num_nodes > 1 else []),
            cluster.row("cluster"),
            *([] if launcher is None else [launcher.row("launcher")]),
            launch.row,
            *(
                PlanRow(subject=subject, value=value, reason=reason, owner=strategy.owner)
                for subject, value, reason in strategy.instance.describe_layout(
                    launch.world_size, launch.processes_per_node
                )
            ),
            precision.row("precision", flag if precision.from_catalog else f"{precision.name} ({flag})"),
            checkpoint_io.row("checkpoint io"),
        ),
        strategy=strategy.name,
        strategy_alias=strategy.alias,
        accelerator=accelerator.name,
        cluster_environment=cluster.name,
        precision=flag,
        checkpoint_io=checkpoint_io.name,
        device_indices=devices.indices,
        num_devices=devices.count,
        num_nodes=num_nodes,
        processes_per_node=launch.processes_per_node,
        world_size=launch.world_size,
        started_by=launch.started_by,
        start_method=launch.start_method,
        catalog_names=tuple(
            (selection.kind, selection.catalog_name)
            for selection in (strategy, accelerator, cluster, precision, checkpoint_io, launcher)
            if selection is not None and selection.from_catalog
        ),
        max_restarts=launch.max_restarts if launcher is None else request.max_restarts,
        preemption_deadline=request.preemption_deadline,
    )
    # A plan can be made without composing, which changes a strategy that the user has constructed.
    return plan, partial(
        _compose,
        plan,
        strategy=strategy.instance,
        accelerator=accelerator,
        cluster=cluster.instance,
        checkpoint_io=checkpoint_io.instance,
        precision=precision,
        launcher=None if launcher is None else launcher.instance,
        environ=environ,
    )


def _compose(
    plan: Plan,
    *,
    strategy: Strategy,
    accelerator: Selection[Accelerator],
    cluster: ClusterEnvironment,
    checkpoint_io: CheckpointIO,
    precision: Selection[Precision],
    launcher: Launcher | None,
    environ: Mapping[str, str],
) -> Strategy:
    if launcher is None:
        launcher = _launcher(plan, strategy, cluster, checkpoint_io, environ)
    else:
        launcher.receive(processes_per_node=plan.processes_per_node, num_nodes=plan.num_nodes)
    precision_plugin: Precision | None = None
    if precision.from_catalog:  # a flag, for which a strategy or an accelerator may have an implementation
        flag = precision_flag(precision)
        precision_plugin = strategy.precision_for(flag) or accelerator.instance.precision_for(flag)
        if precision_plugin is not None and precision.options:
            raise ConflictError(
                f"{precision.title}: {plan.strategy} on {plan.accelerator} computes {flag!r} with its own "
                f"{type(precision_plugin).__name__}, which these options do not reach: leave them out, or construct "
                "the precision that is to be used, and give the instance"
            )
    strategy.receive(
        Parts(
            accelerator=accelerator.instance,
            parallel_devices=_parallel_devices(plan, accelerator),
            cluster_environment=cluster,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin or precision.instance,
            launcher=launcher,
        )
    )
    used = strategy.launcher  # a strategy may replace it
    if used is not None and used.max_restarts != plan.max_restarts:
        raise ConflictError(
            f"max_restarts={plan.max_restarts} needs a launcher that restarts processes, and {plan.strategy} has "
            f"{type(used).__name__}, which does not: leave it out, or choose another strategy or launcher"
        )
    return strategy


def _choose_checkpoint_io(requested: Requested | None, catalog: Catalog) -> Selection[CheckpointIO]:
    if requested is not None:
        return select_requested("checkpoint_io", requested, catalog)
    for selection in usable(automatic_offers("checkpoint_io", catalog), catalog):
        return selection.because("the default")
    raise RequestError("no checkpoint io is installed that may be chosen automatically: give one as a plugin")


# Components that depend on the whole plan


def _parallel_devices(plan: Plan, accelerator: Selection[Accelerator]) -> tuple[torch.device, ...] | None:
    devices = tuple(accelerator.instance.get_parallel_devices(plan.device_indices))
    record = accelerator.record
    declared = record.device_type if accelerator.from_catalog and record is not None else None
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
        from dstrat.launch.local import LocalLauncher

        if plan.num_nodes > 1:  # variables that the user has set come first
            address = {"MASTER_ADDR": cluster.main_address, "MASTER_PORT": str(cluster.main_port)}
            environ = {**address, "NODE_RANK": str(cluster.node_rank), **environ}
        return LocalLauncher(
            num_processes=plan.processes_per_node,
            start_method=plan.start_method,
            num_nodes=plan.num_nodes,
            environ=environ,
            max_restarts=plan.max_restarts,
            recovers_checkpoint=partial(recover_checkpoint, io=checkpoint_io),
            hang_timeout=strategy.hang_timeout,
            preemption_deadline=plan.preemption_deadline,
        )
    if plan.started_by == "cluster":
        from dstrat.launch.external import ExternalLauncher

        return ExternalLauncher(environ)
    return None
