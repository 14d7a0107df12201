"""Choosing the cluster environment: where the job runs, by the evidence in the environment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, DstratError
from dstrat.resolve.choose import Chosen, chosen_as_given
from dstrat.resolve.part import automatic_parts, part_of_offer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.plugins.catalog import Catalog
    from dstrat.resolve.part import Part
    from dstrat.resolve.request import Requested

LOCAL = "local"
"""The cluster environment of a job that dstrat starts itself."""


def choose_cluster(given: Requested | None, catalog: Catalog, environ: Mapping[str, str]) -> Chosen[ClusterEnvironment]:
    """Choose the cluster environment.

    Args:
        given: What the user gave; None takes the first for which there is evidence, or else the local one.
        catalog: What there is.
        environ: The environment variables.

    Raises:
        ClusterError: One of them cannot make sense of the environment.
        RequestError: It is no cluster environment.
        CatalogError: Nothing usable has that alias.
    """
    if given is not None:
        return chosen_as_given("cluster_environment", given, catalog, environ)
    for part in automatic_parts("cluster_environment", catalog):
        with reading_environment(part):
            evidence = part.cls.evidence(environ)
        if evidence is not None:
            return _chosen(part, evidence, environ)
    local = part_of_offer(catalog.find_default("cluster_environment", LOCAL), catalog)
    return _chosen(local, "nothing else started this process", environ)


def num_started(cluster: Chosen[ClusterEnvironment]) -> int:
    """Return how many processes of the job exist already; 1 where dstrat starts them.

    Raises:
        ClusterError: The environment does not say.
    """
    with reading_environment(cluster.part):
        return cluster.live.world_size if cluster.live.creates_processes_externally else 1


def check_cluster(cluster: Chosen[ClusterEnvironment], *, processes_per_node: int, num_nodes: int) -> None:
    """Check the environment against what is to run.

    Raises:
        ClusterError: It contradicts that, or itself.
    """
    with reading_environment(cluster.part):
        cluster.live.validate(num_devices=processes_per_node, num_nodes=num_nodes)


@contextmanager
def reading_environment(part: Part[ClusterEnvironment]) -> Iterator[None]:
    """Turn whatever a cluster environment raises over variables that it did not expect into a ClusterError.

    Passing it over instead might start the whole job once more in each of its processes.
    """
    try:
        yield
    except DstratError:
        raise
    except Exception as error:
        raise ClusterError(
            f"{part.title} cannot make sense of the environment variables ({type(error).__name__}: {error}): "
            "correct them, or give another cluster environment as a plugin"
        ) from error


def _chosen(part: Part[ClusterEnvironment], reason: str, environ: Mapping[str, str]) -> Chosen[ClusterEnvironment]:
    with reading_environment(part):
        return Chosen(part=part, reason=reason, live=part.construct(environ))
