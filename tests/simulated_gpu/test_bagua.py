"""Exchanges of bagua between simulated GPUs over gloo, which sends from the memory of the host only."""

from __future__ import annotations

import torch
from tests.ranks import in_ranks

from dstrat.parallel.process_group import DEFAULT_TIMEOUT, open_process_group
from dstrat.testing import simulated_gpu
from dstrat_bagua.communication import Ranks


def exchanged(cluster):
    simulated_gpu.load()
    rank, device = cluster.global_rank, torch.device("simgpu", cluster.global_rank)
    open_process_group(cluster, backend="gloo", timeout=DEFAULT_TIMEOUT)
    ranks = Ranks(0, hierarchical=False, timeout=DEFAULT_TIMEOUT)
    values = torch.full((3,), float(rank), device=device)
    received = ranks.exchange(values, [1 - rank])
    ranks.release()
    return {peer: (buffer.tolist(), str(buffer.device)) for peer, buffer in received.items()}


def test_over_gloo_ranks_exchange_tensors_of_their_devices():
    assert in_ranks(exchanged) == [{1: ([1, 1, 1], "simgpu:0")}, {0: ([0, 0, 0], "simgpu:1")}]
