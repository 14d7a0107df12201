"""From a plan to live objects."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dstrat.errors import BrokenComponentError
from dstrat.interfaces.parts import Parts
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.given import SUBJECTS, given_parts, written
from dstrat.resolve.part import constructed_strategy, part_from, part_of_offer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.resolve.part import Part
    from dstrat.resolve.plan import Plan
    from dstrat.resolve.request import Request


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
        from dstrat.builtin.launchers.local import LocalLauncher  # slow to import; most plans need none

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
        from dstrat.builtin.launchers.external import ExternalLauncher

        return ExternalLauncher(environ)
    return None
