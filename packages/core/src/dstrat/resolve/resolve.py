"""From a request to a plan, and from a plan to live objects."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError, RequestError
from dstrat.interfaces.strategy import Parts
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.choose import (
    Load,
    asked_strategy,
    choose_accelerator,
    choose_checkpoint_io,
    choose_devices,
    choose_precision,
    device_type,
    flag_of,
    precision_choice,
)
from dstrat.resolve.cluster import choose_cluster, num_started
from dstrat.resolve.compatibility import Constraints, choose_strategy
from dstrat.resolve.part import Hardware, constructed_strategy, part_from, part_of_offer
from dstrat.resolve.plan import Choice, Plan
from dstrat.resolve.processes import choose_launch, is_interactive, test_runner
from dstrat.resolve.request import SUBJECTS, given_parts, written

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.resolve.choose import Chosen, ChosenDevices
    from dstrat.resolve.compatibility import ChosenStrategy
    from dstrat.resolve.part import Part
    from dstrat.resolve.processes import ChosenLaunch
    from dstrat.resolve.request import Request


def make_plan(
    request: Request,
    *,
    catalog: Catalog | None = None,
    environ: Mapping[str, str] | None = None,
    interactive: bool | None = None,
) -> Plan:
    """Decide what will run.

    Args:
        request: What the user said.
        catalog: What there is; None is the catalog of this process.
        environ: The environment variables; None is those of this process.
        interactive: Whether this is a notebook or a prompt; None finds out, and whether it is a test.

    Returns:
        The plan; the same request, catalog and environment always give the same.

    Raises:
        RequestError: What was asked for contradicts itself or cannot be done.
        CatalogError: An alias cannot be used.
        MisuseError: A class cannot be constructed.
    """
    catalog = get_catalog() if catalog is None else catalog
    environ = os.environ if environ is None else environ
    num_nodes = _checked_num_nodes(request.num_nodes)
    asked = asked_strategy(request.strategy, catalog)
    given = given_parts(request, asked.part if asked is not None else None, catalog)
    if asked is not None and any(part.in_strategy for part in given.values()):
        asked = replace(asked, names=())  # another strategy would lack the parts that this one was given
    cluster = choose_cluster(given.get("cluster environment"), catalog, environ)
    started = num_started(cluster)
    accelerator = choose_accelerator(
        given.get("accelerator"), catalog, Load(asked=asked, device_type=device_type(given.get("devices")))
    )
    strategy_part, why = asked.on(accelerator, catalog) if asked is not None else (None, "")
    given = given_parts(request, strategy_part, catalog)  # once more, as it may be another strategy on the accelerator
    devices = choose_devices(
        given.get("devices"), accelerator.live, started=started, num_nodes=num_nodes, strategy=strategy_part
    )
    precision = choose_precision(given.get("precision"), accelerator, catalog)
    runner = test_runner() if interactive is None else None
    situation = Constraints(
        hardware=Hardware(part=accelerator.part, live=accelerator.live),
        precision=precision.part,
        num_devices=devices.count,
        num_nodes=num_nodes,
        cluster=cluster,
        started=started,
        interactive=is_interactive() and runner is None if interactive is None else interactive,
        test_runner=runner,
    )
    strategy = choose_strategy(strategy_part, why, catalog, situation)
    return _assembled(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        cluster=cluster,
        launch=choose_launch(strategy.part, situation),
        precision=precision,
        checkpoint_io=choose_checkpoint_io(given.get("checkpoint io"), catalog),
    )


def _assembled(
    *,
    strategy: ChosenStrategy,
    accelerator: Chosen[Accelerator],
    devices: ChosenDevices,
    num_nodes: int,
    cluster: Chosen[ClusterEnvironment],
    launch: ChosenLaunch,
    precision: Chosen[Precision],
    checkpoint_io: Chosen[CheckpointIO],
) -> Plan:
    parts = (strategy.part, accelerator.part, cluster.part, precision.part, checkpoint_io.part)
    return Plan(
        choices=(
            strategy.choice,
            accelerator.choice("accelerator"),
            devices.choice,
            *_nodes_choice(num_nodes),
            cluster.choice("cluster"),
            launch.choice,
            precision_choice(precision),
            checkpoint_io.choice("checkpoint io"),
        ),
        strategy=strategy.part.name,
        strategy_alias=strategy.part.alias,
        accelerator=accelerator.part.name,
        cluster_environment=cluster.part.name,
        precision=flag_of(precision),
        checkpoint_io=checkpoint_io.part.name,
        device_indices=devices.indices or (),
        num_devices=devices.count,
        num_nodes=num_nodes,
        processes_per_node=launch.processes_per_node,
        world_size=launch.world_size,
        started_by=launch.started_by,
        start_method=launch.start_method,
        catalog_names=tuple((part.kind, part.catalog_name) for part in parts if part.catalog_name),
    )


def _checked_num_nodes(num_nodes: object) -> int:
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise RequestError(f"num_nodes={num_nodes!r} is not a number of machines: give 1 or more")
    return num_nodes


def _nodes_choice(num_nodes: int) -> list[Choice]:
    return [Choice(subject="nodes", value=str(num_nodes), reason="asked for")] if num_nodes > 1 else []


# From a plan to live objects.


def build(
    plan: Plan, request: Request, *, catalog: Catalog | None = None, environ: Mapping[str, str] | None = None
) -> Strategy:
    """Construct the strategy and its parts; no device is touched and no process started.

    Args:
        plan: What will run.
        request: What the plan was made from; it holds what the user constructed.
        catalog: What there is; None is the catalog of this process.
        environ: The environment variables; None is those of this process.

    Returns:
        The strategy with all its parts; the user's own where the request holds one.

    Raises:
        CatalogError: The catalog has changed since the plan was made, or a record is wrong about its devices.
        MisuseError: A class cannot be constructed.
    """
    catalog = get_catalog() if catalog is None else catalog
    environ = os.environ if environ is None else environ
    parts = _planned_parts(plan, request, catalog)
    strategy: Strategy = parts["strategy"].construct()
    accelerator: Accelerator = parts["accelerator"].construct()
    cluster: ClusterEnvironment = parts["cluster_environment"].construct(environ)
    strategy.receive(
        Parts(
            accelerator=accelerator,
            parallel_devices=_devices(plan, parts["accelerator"], accelerator),
            cluster_environment=cluster,
            checkpoint_io=parts["checkpoint_io"].construct(),
            precision_plugin=_precision(plan, parts["precision"], strategy, accelerator),
            launcher=_launcher(plan, cluster, environ),
        )
    )
    return strategy


def _planned_parts(plan: Plan, request: Request, catalog: Catalog) -> dict[Kind, Part[Any]]:
    """Return every part of the plan: from the catalog, or what the user gave."""
    planned: dict[Kind, Part[Any]] = {
        kind: part_of_offer(catalog.find(kind, name), catalog) for kind, name in plan.catalog_names
    }
    asked = dict(plan.catalog_names).get("strategy", request.strategy)
    planned["strategy"] = constructed_strategy(asked, catalog, place=written("strategy", asked))
    given = given_parts(request, planned["strategy"], catalog)
    for kind, subject in SUBJECTS.items():
        if kind not in planned:
            planned[kind] = part_from(kind, given[subject].value, catalog, place=given[subject].place)
    return planned


def _devices(plan: Plan, part: Part[Accelerator], accelerator: Accelerator) -> tuple[torch.device, ...] | None:
    devices = tuple(accelerator.get_parallel_devices(plan.device_indices))
    declared = part.record.device_type if part.catalog_name and part.record is not None else None
    others = {device.type for device in devices} - {declared}
    if declared is not None and others:
        raise BrokenComponentError(
            f"{part.title} cannot be used: its record says device_type={declared!r}, and its devices are of the type "
            f"{', '.join(map(repr, sorted(others)))}"
        )
    return devices or None


def _precision(plan: Plan, part: Part[Precision], strategy: Strategy, accelerator: Accelerator) -> Precision:
    """Return the precision for a flag: the strategy's, else the accelerator's, else the catalog's."""
    if not part.catalog_name:
        return part.construct()
    return strategy.precision_for(plan.precision) or accelerator.precision_for(plan.precision) or part.construct()


def _launcher(plan: Plan, cluster: ClusterEnvironment, environ: Mapping[str, str]) -> Launcher | None:
    if plan.start_method is not None:
        from dstrat.launch.local import LocalLauncher  # slow to import; most plans need none

        if plan.num_nodes > 1:  # what the user has set comes first; the cluster environment knows the rest
            place = {"MASTER_ADDR": cluster.main_address, "NODE_RANK": str(cluster.node_rank)}
            environ = {"MASTER_PORT": str(cluster.main_port), **place, **environ}
        return LocalLauncher(
            num_processes=plan.processes_per_node,
            start_method=plan.start_method,
            num_nodes=plan.num_nodes,
            environ=environ,
        )
    if plan.started_by == "cluster":
        from dstrat.launch.external import ExternalLauncher

        return ExternalLauncher(environ)
    return None
