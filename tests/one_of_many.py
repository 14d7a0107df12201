"""A process of a job, without the job."""

from dstrat import SingleDeviceStrategy


class OneOfMany(SingleDeviceStrategy):
    """A process of a job whose other processes do the same, so that whatever is agreed on is what this one has."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(device="cpu")
        self._rank, self._world_size = rank, world_size

    world_size = property(lambda self: self._world_size)
    global_rank = property(lambda self: self._rank)
    is_global_zero = property(lambda self: self._rank == 0)

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self._world_size, "rank": self._rank}
