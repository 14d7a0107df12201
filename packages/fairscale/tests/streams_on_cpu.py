"""FairScale's FullyShardedDataParallel on CPUs: what CUDA orders by streams is in order there by itself."""

import contextlib
from functools import cache

import torch
import torch.distributed as dist

from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fairscale import DDPFullyShardedStrategy
from dstrat_fairscale.internals import FullyShardedDataParallel


class Stream:
    """A stream whose work has ended as soon as it is begun."""

    def wait_stream(self, stream):
        pass


STREAM = Stream()


@cache
def use_cpus():
    """Let FairScale in this process do without CUDA's streams."""
    set_up = FullyShardedDataParallel._setup_streams

    def with_streams(self):
        set_up(self)
        self._streams.update(dict.fromkeys(["fp32_to_fp16", "all_gather", "post_backward"], STREAM))

    FullyShardedDataParallel._setup_streams = with_streams
    torch.cuda.current_stream = lambda: STREAM
    torch.cuda.synchronize = lambda: None
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, _: None
    reduce_scatter = dist._reduce_scatter_base  # of which Gloo takes inputs of one dimension
    dist._reduce_scatter_base = lambda output, inputs, group: reduce_scatter(output, inputs.flatten(), group=group)


class OnCPUs(DDPFullyShardedStrategy):
    """Shards on CPUs."""

    def set_components(self, components):
        use_cpus()
        ParallelStrategy.set_components(self, components)
