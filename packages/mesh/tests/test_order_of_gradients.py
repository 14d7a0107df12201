"""A stage sends its last gradient before it reduces its own: the stage before it goes on meanwhile."""

import time
from unittest import mock

import torch.distributed as dist
from packages.mesh.tests import context_fits
from tests.ranks import in_ranks

from dstrat_mesh import MeshStrategy

MICROBATCHES = 4
REDUCES = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # older torch
SECONDS = 20.0  # for a message that is on its way already


def receives_before_reductions(cluster, folder):
    """Return whether the stage before this one had every gradient at each reduction; nothing for the first stage."""
    strategy = MeshStrategy(pp=2, microbatches=MICROBATCHES)
    received, found = [], []
    recv, reduce_scatter = dist.recv, getattr(dist, REDUCES)

    def stages():
        return dist.get_process_group_ranks(strategy.device_mesh["pp"].get_group())

    def noting(*arguments, **options):
        source = recv(*arguments, **options)
        received.append(source)
        if len(received) == MICROBATCHES:
            (folder / str(dist.get_rank())).touch()
        return source

    def awaiting(*arguments, **options):
        first, last = stages()
        if dist.get_rank() == last and all(found):
            deadline = time.monotonic() + SECONDS
            while not (arrived := (folder / str(first)).exists()) and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append(arrived)
        return reduce_scatter(*arguments, **options)

    with mock.patch.object(dist, "recv", noting), mock.patch.object(dist, REDUCES, awaiting):
        context_fits.fit(strategy, cluster.world_size, 8, max_steps=1, plugins=[cluster])
    return found


def test_a_stage_sends_its_last_gradient_before_it_reduces(tmp_path):
    results = in_ranks(receives_before_reductions, 4, folder=tmp_path)
    of_last_stages = [found for found in results if found]
    assert len(of_last_stages) == 2
    assert all(map(all, of_last_stages)), results
