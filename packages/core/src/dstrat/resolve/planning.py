"""From a request to a plan: every choice in its order, each made by a function of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dstrat.errors import RequestError
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.ability import Hardware
from dstrat.resolve.accelerator import Load, choose_accelerator
from dstrat.resolve.asked import asked_strategy
from dstrat.resolve.checkpoint_io import choose_checkpoint_io
from dstrat.resolve.choice import Choice
from dstrat.resolve.cluster import choose_cluster, num_started
from dstrat.resolve.devices import choose_devices, device_type
from dstrat.resolve.given import given_parts
from dstrat.resolve.interactive import is_interactive, test_runner
from dstrat.resolve.launcher import choose_launch
from dstrat.resolve.obstacles import Situation
from dstrat.resolve.plan import Plan
from dstrat.resolve.precision import choose_precision, flag_of, precision_choice
from dstrat.resolve.strategy import choose_strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.precision import Precision
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.chosen import Chosen
    from dstrat.resolve.devices import ChosenDevices
    from dstrat.resolve.launcher import ChosenLaunch
    from dstrat.resolve.request import Request
    from dstrat.resolve.strategy import ChosenStrategy


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
    situation = Situation(
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
