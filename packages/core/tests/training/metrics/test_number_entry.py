from __future__ import annotations

import math
import random
import sys
import weakref

import pytest
import torch

from dstrat.errors import MisuseError
from dstrat.training.metrics.reduction import Options
from dstrat.training.metrics.values import NumberEntry


def entry(*, on_step=False, on_epoch=True, reduce_fx="mean"):
    options = Options(
        prog_bar=False, logger=True, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduce_fx, enable_graph=False,
        sync_dist=None, sync_dist_group=None, add_dataloader_idx=True, metric_attribute=None, rank_zero_only=False,
    )  # fmt: skip
    return NumberEntry("x", options, in_step=True, training=True)


def test_a_mean_of_many_values_is_exact():
    numbers = [random.Random(seed).uniform(-1e3, 1e3) for seed in range(20_000)]
    weights = [1 + seed % 7 for seed in range(20_000)]
    kept = entry()
    for number, weight in zip(numbers, weights, strict=True):
        kept.take(torch.tensor(number, dtype=torch.float64), weight)
    exact = math.fsum(n * w for n, w in zip(numbers, weights, strict=True)) / sum(weights)
    assert kept.local_epoch_value == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max", "min"])
def test_a_tensor_on_a_device_is_never_read_back(reduce_fx):
    """A tensor on the meta device has no value: whatever reads one raises."""
    kept = entry(on_step=True, reduce_fx=reduce_fx)
    with torch.inference_mode():
        kept.take(torch.ones((), device="meta"), 2)
    kept.take(torch.ones(1, device="meta", requires_grad=True), 2)
    kept.take(3.0, 1)
    assert kept.local_epoch_value.device.type == "meta"
    kept.take(torch.ones((), device="meta"), 2)
    assert kept.local_latest.device.type == "meta"
    assert not kept.local_latest.requires_grad
    with pytest.raises(RuntimeError):
        kept.local_latest.item()


def test_no_tensor_is_kept_but_the_latest():
    kept = entry(on_step=True)
    values = [torch.ones(()) for _ in range(100)]
    references = [weakref.ref(value) for value in values]
    for value in values:
        kept.take(value, 1)
    values.clear()
    del value
    assert not any(reference() is not None for reference in references)


def test_a_value_that_is_changed_afterwards_counts_as_it_was():
    kept, running = entry(on_step=True), torch.zeros(())
    for _ in range(3):
        running += 1
        kept.take(running, 1)
    running.zero_()
    assert kept.local_epoch_value == 2.0
    assert kept.local_latest == 3.0


def test_a_value_on_a_device_that_is_changed_before_it_is_read_is_an_error():
    kept, running = entry(on_step=True), torch.zeros((), device="meta")
    kept.take(running, 1)
    running.add_(1)
    with pytest.raises(MisuseError, match=r"logged as 'x' has been changed in place since: log a copy, x\.clone\(\)"):
        _ = kept.step_value


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_stays_nan(values, reduce_fx):
    kept = entry(reduce_fx=reduce_fx)
    for value in values:
        kept.take(value, 1)
    assert math.isnan(kept.local_epoch_value)


def test_no_weight_at_all_gives_no_mean():
    kept = entry()
    kept.take(1.0, 0)
    assert math.isnan(kept.local_epoch_value)


@pytest.mark.parametrize("value", [True, 2, torch.tensor(3), torch.tensor([4.0]), torch.tensor(True)])
def test_numbers_and_tensors_of_any_type_count(value):
    kept = entry(reduce_fx="sum")
    kept.take(value, 1)
    kept.take(value, 1)
    assert kept.local_epoch_value == 2 * float(value)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_outputs_of_cuda_graphs_are_copied_as_a_replay_overwrites_them(has_graphs, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    if has_graphs:
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", sys)
    kept, output = entry(on_step=True), torch.ones((), device="meta")
    kept.take(output, 1)
    output.add_(1)  # as a replay does, of which the tensor's version knows nothing
    if has_graphs:
        assert kept.local_latest.device.type == "meta"
    else:
        with pytest.raises(MisuseError, match="has been changed in place"):
            kept.local_latest  # noqa: B018 - it raises
