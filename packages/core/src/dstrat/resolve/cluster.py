"""Choice of the cluster environment: where the job runs, by the evidence in the environment variables."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, DstratError
from dstrat.resolve.selection import automatic_offers, select, select_offer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.request import Requested
    from dstrat.resolve.selection import Selection

LOCAL = "local"
"""The cluster environment of a job that dstrat starts itself."""


def choose_cluster(
    requested: Requested | None, catalog: Catalog, environ: Mapping[str, str]
) -> Selection[ClusterEnvironment]:
    """Choose the cluster environment.

    Args:
        requested: The user's; None takes the first for which there is evidence, or else the local one.
        catalog: All components.
        environ: The environment variables.

    Raises:
        ClusterError: One of them cannot make sense of the environment.
        RequestError: It is no cluster environment.
        CatalogError: No usable cluster environment has that alias.
    """
    if requested is not None:
        return select("cluster_environment", requested, catalog, environ)
    for offer in automatic_offers("cluster_environment", catalog):
        variables = offer.component.evidence_variables
        if variables and environ.keys().isdisjoint(variables):
            continue
        try:
            catalog.check_requirements(offer)
            cls = catalog.load(offer)  # not constructed: only the one with evidence reads the environment
        except DstratError:  # nobody requested this one; `dstrat doctor` reports it
            continue
        with reading_environment(offer):
            evidence = cls.evidence(environ)
            if evidence is not None:
                return select_offer(offer, catalog, environ, reason=evidence)
    local = catalog.find_default("cluster_environment", LOCAL)
    with reading_environment(local):
        return select_offer(local, catalog, environ, reason="nothing else started this process")


def check_cluster(cluster: Selection[ClusterEnvironment], *, processes_per_node: int, num_nodes: int) -> None:
    """Check the environment against the processes and machines of the plan.

    Raises:
        ClusterError: It contradicts that, or itself.
    """
    with reading_environment(cluster):
        cluster.instance.validate(num_devices=processes_per_node, num_nodes=num_nodes)


@contextmanager
def reading_environment(source: Offer | Selection[ClusterEnvironment]) -> Iterator[None]:
    """Turn any error of a cluster environment over variables that it did not expect into a ClusterError."""
    try:
        yield
    except DstratError:
        raise
    except Exception as error:
        # Passing over this cluster environment instead might start the whole job once more in each of its processes.
        raise ClusterError(
            f"{source.title} cannot make sense of the environment variables ({type(error).__name__}: {error}): "
            "correct them, or give another cluster environment as a plugin"
        ) from error
