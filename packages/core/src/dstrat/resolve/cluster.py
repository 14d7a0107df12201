"""Choosing the cluster environment: where the job runs, by the evidence in the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import BrokenComponentError
from dstrat.resolve.chosen import Chosen, chosen_as_given
from dstrat.resolve.part import automatic_parts, part_of_offer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.given import Given
    from dstrat.resolve.part import Part

LOCAL = "local"
"""The cluster environment of a job that dstrat starts itself."""


def choose_cluster(given: Given | None, catalog: Catalog, environ: Mapping[str, str]) -> Chosen[ClusterEnvironment]:
    """Choose the cluster environment.

    Args:
        given: What the user gave; None takes the first for which there is evidence, or else the local one.
        catalog: What there is.
        environ: The environment variables.

    Raises:
        BrokenComponentError: One of them cannot tell.
        RequestError: It is no cluster environment.
        CatalogError: Nothing usable has that alias.
    """
    if given is not None:
        return chosen_as_given("cluster_environment", given, catalog, environ)
    for part in automatic_parts("cluster_environment", catalog):
        evidence = _evidence(part, environ)
        if evidence is not None:
            return Chosen(part=part, reason=evidence, live=part.construct(environ))
    part = part_of_offer(catalog.find("cluster_environment", LOCAL), catalog)
    return Chosen(part=part, reason="nothing shows that the job was started by others", live=part.construct(environ))


def _evidence(part: Part[ClusterEnvironment], environ: Mapping[str, str]) -> str | None:
    try:
        return part.cls.evidence(environ)
    except Exception as error:  # passing it over might start the whole job once in each of its processes
        cause = f"{type(error).__name__}: {error}"
        raise BrokenComponentError(
            f"{part.title} failed to tell whether it is the one that this process runs in ({cause}): "
            "give another one as a plugin, or disable its distribution with DSTRAT_DISABLE_PLUGINS"
        ) from error


def external_world_size(cluster: ClusterEnvironment) -> int:
    """Return how many processes of the job exist already; 1 where dstrat starts them.

    Raises:
        ClusterError: The environment does not say.
    """
    return cluster.world_size if cluster.creates_processes_externally else 1
