"""Several Gaudis, simulated: hpu_parallel and hpu_fsdp have the losses of one device, in graphs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.hand_loop import BlockNet, NoCheckpoints, losses_of, share, start, train
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.interfaces.strategy import Parts

OPTIONS = {
    "plain": ("HPUParallelStrategy", {}),
    "static graph": ("HPUParallelStrategy", {"static_graph": True}),
    "bucket views": ("HPUParallelStrategy", {"gradient_as_bucket_view": True}),
    "unused parameters": ("HPUParallelStrategy", {"find_unused_parameters": True}),
    "small buckets": ("HPUParallelStrategy", {"bucket_cap_mb": 0.0001}),
    "gradients sharded": ("HPUFSDPStrategy", {"sharding_strategy": "SHARD_GRAD_OP"}),
    "of dstrat-ddp": ("DDPStrategy", {}),
    "offloading": ("HPUFSDPStrategy", {"cpu_offload": True}),
}


def hpu_parts(cluster, precision="32-true"):
    """The parts of a rank on a simulated machine of its job."""
    os.environ["HABANA_SIMULATOR_MACHINE"] = f"{os.environ['HABANA_SIMULATOR_MACHINE']}/job-{cluster.main_port}"
    from dstrat_hpu import HPUAccelerator

    return Parts(
        accelerator=HPUAccelerator(),
        parallel_devices=tuple(torch.device("hpu", index) for index in range(cluster.world_size)),
        cluster_environment=cluster,
        checkpoint_io=NoCheckpoints(),
        precision_plugin=TruePrecision(precision) if precision.endswith("true") else MixedPrecision(precision),
    )


def hpu_losses(cluster, name, options, training, precision="32-true"):
    import dstrat_ddp
    import dstrat_hpu

    strategy = getattr(dstrat_hpu if name.startswith("HPU") else dstrat_ddp, name)
    return losses_of(strategy(**options), BlockNet(), hpu_parts(cluster, precision), **training)


@pytest.fixture(scope="module")
def expected():
    """Losses of one device of the CPU for each way of training."""
    return losses_of_one_device(BlockNet)


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_are_those_of_one_device(expected, world_size):
    strategies = ("HPUParallelStrategy", "HPUFSDPStrategy")
    cases = {
        (name, way): {"name": name, "options": {}, "training": training}
        for name in strategies
        for way, training in WAYS.items()
    }
    for losses in in_ranks(each, world_size, function=hpu_losses, cases=cases):
        assert losses == {(name, way): expected[way] for name, way in cases}


def test_options_leave_the_losses_as_they_are(expected):
    cases = {
        option: {"name": name, "options": options, "training": WAYS["accumulation and clipping"]}
        for option, (name, options) in OPTIONS.items()
    }
    for losses in in_ranks(each, function=hpu_losses, cases=cases):
        assert losses == dict.fromkeys(cases, expected["accumulation and clipping"])


def graphs_of_steps(cluster, name):
    """Return what is counted in each step after the first ones, and on which device this was."""
    from habana_frameworks import simulation
    from hpu_fit import counters, since

    import dstrat_hpu

    strategy, module = getattr(dstrat_hpu, name)(), BlockNet()
    start(strategy, module, hpu_parts(cluster))
    train(strategy, steps=2)
    before = counters()
    optimizer = strategy.optimizers[0]
    batch = strategy.batch_to_device(share(strategy, (torch.randn(8, 6), torch.randn(8, 3))))
    for index in range(5):

        def closure(index=index):
            optimizer.zero_grad()
            loss = strategy.training_step(batch, index)
            strategy.backward(loss)
            strategy.accelerator.end_graph("backward")

        strategy.optimizer_step(optimizer, closure, strategy.model)
        strategy.accelerator.end_graph("optimizer_step")
    found = since(before), simulation.module_id(), str(strategy.root_device)
    strategy.teardown()
    return found


def test_each_rank_has_a_device_and_copies_nothing():
    for name in ("HPUParallelStrategy", "HPUFSDPStrategy"):
        for rank, (counted, module, device) in enumerate(in_ranks(graphs_of_steps, name=name)):
            assert (counted["to_host"], counted["to_device"]) == (0, 2)
            assert counted["graphs"] >= 10
            assert (module, device) == (rank, "hpu:0")


PROGRAM = """
import os
import sys
import torch
from hpu_fit import ON_HPU, Regression, SavesAt, data, fitted
from dstrat import Callback


class Keeping(Callback):
    def on_train_end(self, trainer, module):
        losses = trainer.strategy.reduce(torch.stack(module.losses))
        if trainer.is_global_zero:
            torch.save(losses.cpu(), sys.argv[2])
        if sys.argv[5] == "hpu":
            from habana_frameworks import simulation
            from dstrat_hpu import HPUAccelerator

            inherited = [os.environ.get(name) for name in ("HLS_MODULE_ID", "ID")]
            facts = (simulation.module_id(), HPUAccelerator.is_lazy(), inherited, os.environ["MASTER_PORT"])
            sys.stdout.write(f"rank {trainer.global_rank} {facts}\\n")  # whole, as the other rank writes too
            sys.stdout.flush()


if __name__ == "__main__":
    options = {"strategy": sys.argv[1], "accelerator": sys.argv[5], "devices": eval(sys.argv[6])}
    path = sys.argv[3]
    callbacks = [Keeping(), SavesAt(8, path)]
    fitted(None, data(batch_size=4), callbacks=callbacks, ckpt_path=sys.argv[4] or None, **options)
"""


def run(tmp_path, strategy, *, saves, resumes="", lazy="1", accelerator="hpu", devices="2"):
    """Train on two devices, as a user would; return the losses of all steps, and what the ranks print."""
    program, losses = tmp_path / "program.py", tmp_path / f"losses of {saves.name}"
    program.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}")
    arguments = [strategy, losses, saves, resumes, accelerator, devices]
    ended = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=170,
        env={**os.environ, "HABANA_SIMULATOR_MACHINE": str(tmp_path / "machine"), "PT_HPU_LAZY_MODE": lazy},
    )
    facts = {}
    for line in ended.stdout.splitlines():
        if line.startswith("rank "):
            _, rank, fact = line.split(maxsplit=2)
            facts[int(rank)] = ast.literal_eval(fact)
    return torch.load(losses, weights_only=True), facts


@pytest.mark.parametrize(("strategy", "lazy"), [("ddp", "0"), ("fsdp", "1")])
def test_resume_is_exact_and_checkpoints_move(tmp_path, strategy, lazy):
    of_hpu = {"ddp": "hpu_parallel", "fsdp": "hpu_fsdp"}[strategy]
    whole, facts = run(tmp_path, strategy, saves=tmp_path / "whole", lazy=lazy, devices="[4, 5]")
    assert [facts[rank][:3] for rank in (0, 1)] == [(module, lazy == "1", [None, None]) for module in (4, 5)]
    assert facts[0][3] == facts[1][3] != "12345"  # the vendor's default, which all jobs of the machine would have
    resumed, _ = run(tmp_path, of_hpu, saves=tmp_path / "none", resumes=tmp_path / "whole", lazy=lazy)
    assert torch.equal(resumed, whole[8:])
    on_cpu, _ = run(tmp_path, strategy, saves=tmp_path / "cpu", resumes=tmp_path / "whole", accelerator="cpu")
    torch.testing.assert_close(on_cpu, whole[8:], rtol=1e-5, atol=0)
