"""Proves with dstrat's standard tests that the cluster environment keeps its promises."""

from dstrat.testing import ClusterEnvironmentSuite


class TestRayTrainEnvironment(ClusterEnvironmentSuite):
    alias = "ray_train"

    @staticmethod
    def rank_environ(rank, world_size):
        """Return what a worker finds in its environment."""
        return {
            "RAY_JOB_ID": "01000000",
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
