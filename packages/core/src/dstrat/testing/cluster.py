"""The suite for cluster environments."""

from __future__ import annotations

import pickle
from types import MappingProxyType
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.suite import Suite, fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.cluster import ClusterEnvironment

_RANKS = 3


class ClusterEnvironmentSuite(Suite):
    """Standard tests of a cluster environment; most need :meth:`rank_environ`."""

    kind = "cluster_environment"
    settings = Suite.settings | {"rank_environ"}

    @staticmethod
    def rank_environ(rank: int, world_size: int) -> Mapping[str, str] | None:  # noqa: ARG004 - those that replace it do
        """Return what the scheduler sets in a rank of one machine, as a static method; None where that is unknown."""
        return None

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("basic", "evidence")
    def test_it_is_not_found_where_nothing_is_set(self) -> None:
        evidence = self._class.evidence({"PATH": "/usr/bin", "HOME": "/root"})
        if evidence is not None:
            fail(f"evidence() returned {evidence!r} for an environment without a scheduler's variables: return None")

    @standard("optional", "evidence")
    def test_it_says_by_what_it_is_found(self) -> None:
        evidence = self._class.evidence(self._environ(0))
        if not isinstance(evidence, str) or not 0 < len(evidence) < 80:
            fail(
                f"evidence() returned {evidence!r} in a rank's environment",
                expected='a few words that say why, such as "SLURM_STEP_ID is set".',
            )
        variables = self.offer.component.evidence_variables
        if variables and self._environ(0).keys().isdisjoint(variables):
            fail(
                f"a rank's environment has no variable of the record's evidence_variables={variables!r}",
                fix="declare a variable that each rank has.",
            )

    @standard("optional", "ranks")
    def test_it_knows_every_rank(self) -> None:
        for rank in range(_RANKS):
            cluster = self._cluster(rank)
            expected = {"world_size": _RANKS, "global_rank": rank, "local_rank": rank, "node_rank": 0}
            for name, value in expected.items():
                if getattr(cluster, name) != value:
                    fail(f"{name} is {getattr(cluster, name)!r} in rank {rank} of {_RANKS}, and should be {value}")

    @standard("optional", "ranks")
    def test_all_ranks_agree_where_they_meet(self) -> None:
        addresses = {(cluster.main_address, cluster.main_port) for cluster in map(self._cluster, range(_RANKS))}
        if len(addresses) != 1:
            fail(f"the ranks would meet at {len(addresses)} addresses: {', '.join(map(str, sorted(addresses)))}")
        address, port = next(iter(addresses))
        if not isinstance(address, str) or not address or not isinstance(port, int) or not 0 < port < 65536:
            fail(f"the ranks would meet at {address!r}, port {port!r}, which is not an address")

    @standard("optional", "ranks")
    def test_it_refuses_a_request_for_another_number_of_ranks(self) -> None:
        cluster = self._cluster(0)
        cluster.validate(num_devices=_RANKS, num_nodes=1)
        try:
            cluster.validate(num_devices=_RANKS + 1, num_nodes=1)
        except ClusterError:
            return
        fail(
            f"validate(num_devices={_RANKS + 1}, num_nodes=1) passed in a job of {_RANKS} ranks",
            fix="raise ClusterError, which says how to start as many as were asked for.",
        )

    @standard("optional", "ranks")
    def test_it_can_be_pickled(self) -> None:
        cluster = self._class(dict(self._environ(1)))  # a MappingProxyType cannot be pickled
        if pickle.loads(pickle.dumps(cluster)).global_rank != 1:  # noqa: S301 - our own bytes
            fail("a copy of it in another process has another rank: it must travel with the environ that it was given")

    @property
    def _class(self) -> type[ClusterEnvironment]:
        return get_catalog().load(self.offer)

    def _environ(self, rank: int) -> Mapping[str, str]:
        environ = type(self).rank_environ(rank, _RANKS)
        if environ is None:
            not_declared(f"{type(self).__name__} declares no rank_environ(rank, world_size)")
        return MappingProxyType(dict(environ))  # read-only: a getter must not write to the environment

    def _cluster(self, rank: int) -> ClusterEnvironment:
        return self._class(self._environ(rank))
