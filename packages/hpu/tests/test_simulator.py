"""The simulator refuses what Gaudi refuses; where each rule comes from is in its README."""

import io
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from processes import run
from tests.ranks import in_ranks
from torch import nn

from dstrat.parallel.process_group import DEFAULT_TIMEOUT, open_process_group

htcore = pytest.importorskip("habana_frameworks.torch.core")
simulation = pytest.importorskip("habana_frameworks.simulation")


@pytest.fixture(autouse=True)
def _nothing_recorded():
    """What an earlier test of this process has recorded is no part of this test's graphs."""
    htcore.mark_step()


def counted(function):
    """Return what a function counts."""
    before = simulation.counters()
    function()
    return {name: value - before[name] for name, value in simulation.counters().items()}


# Memory and devices


def test_values_go_to_the_device_and_come_back():
    values = torch.randn(3, 4)
    assert torch.equal(values.to("hpu").cpu(), values)
    assert values.to("hpu").device == torch.device("hpu", 0)


def test_views_share_memory_with_their_base():
    base = torch.zeros(4, device="hpu")
    base.view(2, 2)[1].add_(1)
    assert base.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("mix", [torch.add, torch.matmul, lambda one, other: one.copy_(other) + other])
def test_tensors_of_the_cpu_cannot_be_mixed_in(mix):
    with pytest.raises(RuntimeError, match=r"same device|expecting an HPU tensor"):
        mix(torch.ones(2, 2, device="hpu"), torch.ones(2, 2))


def test_a_scalar_of_the_cpu_can_be_mixed_in():
    assert (torch.ones(2, device="hpu") * torch.tensor(3.0)).tolist() == [3, 3]


def test_the_only_index_of_a_device_is_zero():
    with pytest.raises(RuntimeError, match="habana active device: 1 != 0"):
        torch.ones(2, device="hpu:1")


def test_float64_is_kept_as_float32():
    assert torch.tensor(0.1, dtype=torch.float64, device="hpu").item() == torch.tensor(0.1).item()
    assert (torch.ones((), dtype=torch.float64, device="hpu") / 3).item() == (torch.ones(()) / 3).item()


def test_memory_in_use_is_counted():
    before = torch.hpu.memory_allocated()
    held = torch.empty(1000, device="hpu")
    assert torch.hpu.memory_allocated() - before == 4000
    assert torch.hpu.max_memory_allocated() >= torch.hpu.memory_allocated()
    del held
    assert torch.hpu.memory_allocated() == before


def test_pinned_memory_of_the_host_stays_pinned():
    values = torch.ones(3).pin_memory()
    assert values.is_pinned()
    assert values.pin_memory() is values
    assert not torch.ones(3).is_pinned()


USING = "import torch, habana_frameworks.torch; torch.ones(1, device='hpu')"


def test_a_device_in_use_cannot_be_acquired_by_another_process(tmp_path):
    torch.ones(1, device="hpu")
    refused = run(USING, HLS_MODULE_ID=str(simulation.module_id()))  # which this process holds
    assert "Device acquire failed." in refused.stderr
    for _ in range(2):  # it is released when its process ends
        assert run(USING, HLS_MODULE_ID="3", HABANA_SIMULATOR_MACHINE=str(tmp_path)).returncode == 0


def test_more_modules_than_the_machine_has_cannot_be_acquired():
    refused = run(USING, HLS_MODULE_ID="8")
    assert "Device acquire failed." in refused.stderr


def test_saved_tensors_do_not_load_without_the_device():
    saved = io.BytesIO()
    torch.save(torch.ones(2, device="hpu"), saved)
    program = f"import io, torch; torch.load(io.BytesIO({saved.getvalue()!r}))"
    refused = run(program, PYTHONPATH="")
    assert "on a CPU-only machine, please use torch.load with map_location" in refused.stderr


def test_another_version_of_torch_is_refused():
    refused = run("import habana_frameworks.torch", HABANA_SIMULATOR_TORCH="2.5.1")
    assert "Compile-time major/minor PyTorch version 2.5.1 differs" in refused.stderr


def test_lazy_mode_needs_the_torch_of_the_vendor():
    refused = run("import habana_frameworks.torch", HABANA_SIMULATOR_STOCK_TORCH="1")
    assert "is not supported in Lazy mode" in refused.stderr
    assert run("import habana_frameworks.torch", HABANA_SIMULATOR_STOCK_TORCH="1", PT_HPU_LAZY_MODE="0").returncode == 0


DEFAULT_MODE = """
from habana_frameworks.torch.utils.internal import is_lazy
os.environ["PT_HPU_LAZY_MODE"] = "1"
print(torch.hpu.is_available(), is_lazy(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
"""


def test_eager_is_the_default_and_torch_loads_the_plugin():
    begin = "import os, sys, torch\nassert 'dstrat_hpu' not in sys.modules\n"  # a program that is not a copy
    environ = {name: value for name, value in os.environ.items() if name != "PT_HPU_LAZY_MODE"}
    command = [sys.executable, "-c", begin + DEFAULT_MODE]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert printed.stdout == "True False localhost 12345\n"
    assert run(begin.splitlines()[0] + DEFAULT_MODE, PT_HPU_LAZY_MODE=None).stdout == printed.stdout
    assert "module 'torch' has no attribute 'hpu'" in run("import torch; torch.hpu").stderr
    assert run("import torch; torch.hpu", PT_HPU_AUTOLOAD="1").returncode == 0


LEFT = """
import os, torch, habana_frameworks.torch
torch.hpu.set_device(2)
del os.environ["HLS_MODULE_ID"]
with torch.hpu.device(0):
    pass
print(os.environ["HLS_MODULE_ID"])
"""


def test_leaving_a_device_writes_the_last_module():
    assert run(LEFT).stdout == "7\n"


# Graphs


def test_a_graph_lasts_from_one_mark_step_to_the_next():
    values = torch.ones(3, device="hpu")
    htcore.mark_step()

    def two_graphs():
        for _ in range(2):
            values.add_(1).mul_(2)
            htcore.mark_step()
            htcore.mark_step()  # nothing is recorded, so that nothing runs

    found = counted(two_graphs)
    assert (found["graphs"], found["compiled"], found["to_host"]) == (2, 1, 0)


def test_a_value_that_is_read_ends_the_graph():
    values = torch.ones(3, device="hpu")
    htcore.mark_step()
    for read in (
        lambda tensor: tensor.sum().item(),
        lambda tensor: (tensor + 1).cpu(),
        lambda tensor: tensor.nonzero(),
    ):
        found = counted(lambda read=read: read(values))
        assert found["to_host"] == 1
        assert found["pending"] <= 1
    assert counted(lambda: values.exp().tolist())["graphs"] == 1


def test_another_shape_compiles_another_graph():
    def step(size):
        torch.ones(size, device="hpu").add_(1).sqrt_()
        htcore.mark_step()

    step(5)
    assert counted(lambda: step(5))["compiled"] == 0
    assert counted(lambda: step(6))["compiled"] == 1


def test_eager_mode_has_no_graphs():
    program = """
import torch, habana_frameworks.torch.core as htcore
from habana_frameworks import simulation
torch.ones(3, device="hpu").add_(1)
htcore.mark_step()
print(simulation.counters()["graphs"], simulation.counters()["operations"] > 0)
"""
    assert run(program, PT_HPU_LAZY_MODE="0").stdout == "0 True\n"


# HPU graphs


def test_a_captured_graph_is_replayed_in_the_same_memory():
    values, result = torch.ones(3, device="hpu"), torch.zeros(3, device="hpu")
    graph = torch.hpu.HPUGraph()
    with torch.hpu.graph(graph):
        doubled = values * 2
        result.copy_(doubled + 1)
    values.fill_(4)
    found = counted(graph.replay)
    assert (result.tolist(), doubled.tolist()) == ([9, 9, 9], [8, 8, 8])
    # The change of the values, and the graph, which the host has not recorded anew.
    assert (found["graphs"], found["compiled"], found["operations"]) == (2, found["compiled"], 0)


def test_values_cannot_be_read_while_a_graph_is_captured():
    values = torch.ones(3, device="hpu")
    for read in (lambda: values.sum().item(), values.cpu, values.nonzero):
        with pytest.raises(RuntimeError, match="is not supported during hpu graph capturing"):
            captured(read)


def test_eager_mode_has_no_hpu_graphs():
    refused = run("import torch\ntorch.hpu.HPUGraph().capture_begin()", PT_HPU_LAZY_MODE="0")
    assert "HPU graphs are supported in lazy mode only" in refused.stderr


class Layers(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return super().forward(x)


def gradients(batches, *, cached=False, **options):
    """Return the sum of the gradients of some batches."""
    module = Layers().to("hpu")
    if cached:
        torch.hpu.ModuleCacher(max_graphs=2)(model=module, **options)
    for index, batch in enumerate(batches):
        if options.get("have_grad_accumulation"):
            module.set_iteration_count(index)
        module(batch.to("hpu")).square().mean().backward()
    return torch.cat([parameter.grad.flatten().cpu() for parameter in module.parameters()])


def test_a_cached_module_has_the_same_gradients():
    batches = [torch.randn(5, 4), torch.randn(3, 4), torch.randn(2, 4)]  # the last one is of a third shape
    for batch in batches:
        torch.testing.assert_close(gradients([batch], cached=True), gradients([batch]), rtol=1e-5, atol=1e-7)


def test_a_replay_compiles_nothing_and_records_little():
    batch, found = torch.randn(5, 4).to("hpu"), {}
    for cached in (False, True):
        module = Layers().to("hpu")
        if cached:
            torch.hpu.ModuleCacher()(model=module)

        def step(module=module):
            module.zero_grad()
            module(batch).mean().backward()
            htcore.mark_step()

        for _ in range(3):
            found[cached] = counted(step)
    assert found[True]["compiled"] == 0
    assert found[True]["operations"] < found[False]["operations"]


def test_accumulated_gradients_need_a_graph_for_the_first_batch():
    batches = [torch.randn(5, 4) for _ in range(4)]
    expected = gradients(batches)
    accumulated = gradients(batches, cached=True, have_grad_accumulation=True)
    torch.testing.assert_close(accumulated, expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(gradients(batches, cached=True), expected, rtol=1e-2)


def test_a_wrapper_of_torch_cannot_be_cached():
    with pytest.raises(AssertionError, match="only after wrapping with ModuleCacher"):
        torch.hpu.ModuleCacher()(model=nn.DataParallel(nn.Linear(2, 2)))


# Random numbers and autocast


def test_the_device_has_random_numbers_of_its_own():
    torch.manual_seed(3)
    first = torch.rand(3, device="hpu").tolist()
    torch.manual_seed(3)  # seeds both, as the vendor's does
    torch.rand(5)
    assert torch.rand(3, device="hpu").tolist() == first
    state = torch.hpu.get_rng_state()
    following = torch.rand(3, device="hpu").tolist()
    torch.hpu.set_rng_state(state)
    assert torch.rand(3, device="hpu").tolist() == following


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'hpu' device type for generator"):
        torch.rand(3, device="hpu").normal_(generator=torch.Generator())


def test_autocast_computes_products_in_bfloat16():
    layer, values = nn.Linear(3, 2).to("hpu"), torch.ones(4, 3, device="hpu")
    with torch.autocast("hpu", dtype=torch.bfloat16):
        assert layer(values).dtype is torch.bfloat16
        assert values.sum().dtype is torch.float32
    assert layer(values).dtype is torch.float32


def train(device):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 2)
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        values = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (net(values) - values[:, 0, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_gives_the_losses_of_the_cpu():
    assert train("hpu") == pytest.approx(train("cpu"), rel=1e-6)


# Collectives


def captured(call):
    with torch.hpu.graph(torch.hpu.HPUGraph()):
        call()


def collectives(cluster):
    os.environ["HLS_MODULE_ID"] = str(cluster.local_rank)
    import habana_frameworks.torch  # noqa: F401 - registers hccl

    open_process_group(cluster, backend="hccl", timeout=DEFAULT_TIMEOUT)
    own = torch.full((2,), float(cluster.global_rank + 1), device="hpu")
    refused = {}
    for name, call in {
        "mean": lambda: dist.all_reduce(own.clone(), op=dist.ReduceOp.AVG),
        "a tensor of the cpu": lambda: dist.all_reduce(own.cpu()),
        "captured": lambda: captured(lambda: dist.all_reduce(own)),
    }.items():
        with pytest.raises(RuntimeError) as error:
            call()
        refused[name] = str(error.value).splitlines()[0]
    found = {}
    for name in ("SUM", "MIN", "MAX", "PRODUCT"):
        value = own.clone()
        dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
        found[name] = value.tolist()
    large = torch.tensor([2**24 + 1], device="hpu")
    dist.all_reduce(large)
    found["large integers"] = large.tolist()
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    found["gathered"] = torch.cat(gathered).tolist()
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()
    return refused, found, torch.hpu.current_device()


def test_hccl_sums_and_has_no_mean():
    for refused, found, device in in_ranks(collectives):
        assert refused["mean"] == "Unsupported ReduceOp for HCCL process group"
        assert refused["captured"] == "collective nonSFG is not supported during hpu graph capturing"
        assert "No backend type associated with device type cpu" in refused["a tensor of the cpu"]
        assert found["SUM"] == [3, 3]
        assert (found["MIN"], found["MAX"], found["PRODUCT"]) == ([1, 1], [2, 2], [2, 2])
        assert found["large integers"] == [2 * 2**24]  # as they are summed in float32
        assert found["gathered"] == [1, 1, 2, 2]
        assert device == 0
