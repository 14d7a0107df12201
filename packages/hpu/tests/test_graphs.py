"""HPU graphs and monitoring on one Gaudi, simulated: losses as without, and fewer operations that the host records."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hpu_fit import ON_CPU, Counting, Regression, counters, data, fitted, losses_of, since
from torch import nn

from dstrat import seed_everything
from dstrat.errors import ConflictError, RequestError
from dstrat.loggers import CSVLogger
from dstrat_hpu import HPUGraphs, HPUProfiler, HPUStatsMonitor
from dstrat_hpu import runtime as hpu_runtime


@pytest.fixture(scope="module")
def expected():
    """Losses without HPU graphs, by the number of accumulated batches."""
    return {accumulate: losses_of(fitted(accumulate_grad_batches=accumulate)) for accumulate in (1, 4)}


@pytest.mark.parametrize("modules", [(), ("blocks.0", "blocks.1")], ids=["whole", "blocks"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_are_those_without_graphs(expected, accumulate, modules):
    module = fitted(callbacks=[HPUGraphs(*modules)], accumulate_grad_batches=accumulate)
    torch.testing.assert_close(losses_of(module), expected[accumulate], rtol=1e-5, atol=0)


def test_graphs_are_captured_in_the_precision_of_autocast():
    plain, graphed = (
        losses_of(fitted(precision="bf16-mixed", callbacks=callbacks)) for callbacks in ([], [HPUGraphs()])
    )
    torch.testing.assert_close(graphed, plain, rtol=0.05, atol=0.05)


def test_validations_and_another_fit_run_with_the_same_module(expected):
    seed_everything(3, verbose=False)
    module = Regression()
    module.on_train_start = lambda: setattr(module, "of_the_user", [1])
    module.val_dataloader = lambda: data(40)
    fitted(module, callbacks=[HPUGraphs()], val_check_interval=5)
    assert not {"forward", "orig_forward", "set_iteration_count"} & vars(module).keys()
    assert module.of_the_user == [1]
    torch.testing.assert_close(losses_of(module), expected[1], rtol=1e-5, atol=0)
    fitted(module, callbacks=[HPUGraphs()])  # on other memory of the device
    assert losses_of(module)[20:].max() < expected[1][0]


def test_batches_of_further_shapes_run_without_graphs(expected):
    counting = Counting()
    module = fitted(loader=data(156), callbacks=[HPUGraphs(max_graphs=1), counting])  # the last batch has 4 samples
    torch.testing.assert_close(losses_of(module)[:19], expected[1][:19], rtol=1e-5, atol=0)
    assert counting.per_step(-2, -1)["graphs"] == 2  # as without; a graph that is captured or replayed is one more


def loop_by_hand(steps=20):
    """Count what a loop with the vendor's wrapper does in each step, after the first two."""
    import habana_frameworks.torch.core as htcore

    module = Regression(logs=False).to("hpu")
    torch.hpu.ModuleCacher(max_graphs=10)(model=module, inplace=True, have_grad_accumulation=True)
    optimizer = module.configure_optimizers()
    for step, (inputs, targets) in enumerate(data(8 * steps)):
        optimizer.zero_grad()
        module.set_iteration_count(0)
        nn.functional.mse_loss(module(inputs.to("hpu")), targets.to("hpu")).backward()
        htcore.mark_step()
        optimizer.step()
        htcore.mark_step()
        if step == 1:
            before = counters()
    return since(before)


def test_a_step_with_graphs_costs_what_it_costs_by_hand():
    plain, graphed = Counting(), Counting()
    fitted(Regression(logs=False), callbacks=[plain])
    fitted(Regression(logs=False), callbacks=[HPUGraphs(), graphed])
    found = graphed.per_step(1, -1)
    assert found == loop_by_hand()
    assert found == {"graphs": 18 * 5, "compiled": 0, "to_host": 0, "to_device": 18 * 2}  # as the README has it
    assert graphed.operations_per_step(1, -1) < plain.operations_per_step(1, -1)


def test_graphs_need_gaudi_lazy_mode_and_a_module_of_that_name(monkeypatch):
    with pytest.raises(ConflictError, match="HPUGraphs needs Gaudi, and the accelerator is CPUAccelerator"):
        fitted(callbacks=[HPUGraphs()], **ON_CPU)
    with pytest.raises(RequestError, match=r"HPUGraphs\('gone'\) names no submodule of Regression: choose among first"):
        fitted(callbacks=[HPUGraphs("gone")])
    monkeypatch.setattr(hpu_runtime, "is_lazy", lambda: False)
    with pytest.raises(RequestError, match="HPUGraphs needs lazy mode"):
        fitted(callbacks=[HPUGraphs()])


# Monitoring


def test_the_profiler_writes_a_trace(tmp_path, monkeypatch):
    monkeypatch.delenv("HABANA_PROFILE", raising=False)
    profiler = HPUProfiler(tmp_path, "table", wait=1, warmup=1, active=2)
    assert os.environ["HABANA_PROFILE"] == "1"
    fitted(profiler=profiler)
    (trace,) = tmp_path.glob("*.pt.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "aten::addmm" in (tmp_path / "fit-table-rank0.txt").read_text()


def test_statistics_of_gaudi_are_logged(tmp_path):
    fitted(callbacks=[HPUStatsMonitor()], logger=CSVLogger(tmp_path), log_every_n_steps=5)
    (logged,) = tmp_path.rglob("metrics.csv")
    header, *rows = logged.read_text().splitlines()
    assert {"device/memory_used", "device/graph_compilations"} <= {*header.split(",")}
    assert "host/" not in header
    compiled = [row.split(",")[header.split(",").index("device/graph_compilations")] for row in rows]
    assert float(max(filter(None, compiled), key=float)) > 0
