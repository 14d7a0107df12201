"""Several Gaudis, simulated: hpu_parallel and hpu_fsdp have the losses of one device, in graphs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hpu_fit import ON_CPU, SavesAt, fitted
from tests.hand_loop import BlockNet, NoCheckpoints, losses_of, share, start, train
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

from dstrat import Callback
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError
from dstrat.interfaces.strategy import Parts
from dstrat_hpu import HPUGraphs

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


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.variant)])
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
    train(strategy, steps=8)  # after which ranks of shards compare their blocks in step 16 only
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
        self.losses = trainer.strategy.reduce(torch.stack(module.losses)).cpu()


if __name__ == "__main__":
    from habana_frameworks import simulation
    from dstrat_hpu import HPUAccelerator

    def losses(**options):
        keeping = Keeping()
        options["callbacks"] = [keeping, *options.get("callbacks", [])]
        fitted(None, data(batch_size=4), strategy="hpu_parallel", devices=[4, 5], **options)
        return keeping.losses

    whole = losses(callbacks=[SavesAt(8, sys.argv[1])])
    resumed = losses(ckpt_path=sys.argv[1])
    inherited = [os.environ.get(name) for name in ("HLS_MODULE_ID", "ID")]
    facts = (simulation.module_id(), HPUAccelerator.is_lazy(), inherited, os.environ["MASTER_PORT"])
    same = torch.equal(resumed, whole[8:])
    sys.stdout.write(f"rank {os.environ['RANK']} {(*facts, same)}\\n")  # whole, as the other rank writes too
    sys.stdout.flush()
"""


def test_ranks_of_a_script_hold_the_devices_and_resume_exactly(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}")
    environ = {name: value for name, value in os.environ.items() if name != "PT_HPU_LAZY_MODE"}
    ended = subprocess.run(
        [sys.executable, program, tmp_path / "checkpoint"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        env={**environ, "HABANA_SIMULATOR_MACHINE": str(tmp_path / "machine")},
    )
    lines = [line.split(maxsplit=2) for line in ended.stdout.splitlines() if line.startswith("rank ")]
    facts = {int(rank): ast.literal_eval(fact) for _, rank, fact in lines}
    for rank, module in ((0, 4), (1, 5)):
        assert facts[rank][:3] == (module, False, [None, None])
        assert facts[rank][4] is True
    assert facts[0][3] == facts[1][3] != "12345"  # the vendor's default, which all jobs of the machine would have


def trained(cluster, strategy, accelerator, **options):
    """Train in this rank; return the losses of all ranks' batches."""
    from hpu_fit import data, fitted

    import dstrat_bagua
    import dstrat_ddp
    import dstrat_deepspeed
    import dstrat_fairscale
    import dstrat_fsdp
    import dstrat_hpu

    families = (dstrat_hpu, dstrat_ddp, dstrat_fsdp, dstrat_bagua, dstrat_deepspeed, dstrat_fairscale)
    home = next(package for package in families if strategy in package.__all__)
    where = {"strategy": getattr(home, strategy)(start_method="fork"), "accelerator": accelerator, "devices": 2}
    keeping = Keeping()
    callbacks = [keeping, *options.pop("callbacks", [])]
    fitted(None, data(batch_size=4), callbacks=callbacks, plugins=[cluster], **where, **options)
    return keeping.losses


class Keeping(Callback):
    def on_train_end(self, trainer, module):
        self.losses = trainer.strategy.reduce(torch.stack(module.losses)).cpu()


NEEDS_HIVEMIND = pytest.mark.skipif(not find_spec("hivemind"), reason="needs hivemind")
ON_HPUS = ("HPUParallelStrategy", "HPUFSDPStrategy")
THIRD_PARTY = {"DeepSpeedStrategy": "deepspeed", "DDPShardedStrategy": "fairscale"}
ON_CPUS = (
    "DDPStrategy",
    "FSDPStrategy",
    "BaguaStrategy",
    *(name for name, package in THIRD_PARTY.items() if find_spec(package)),
)


def moves(cluster, folder):
    """Return differences of resumed losses, the largest one of all ways from one strategy to another."""
    os.environ["HABANA_SIMULATOR_MACHINE"] = f"{os.environ['HABANA_SIMULATOR_MACHINE']}/job-{cluster.main_port}"
    whole, found = {}, {}
    for strategy, accelerator in [*((name, "hpu") for name in ON_HPUS), *((name, "cpu") for name in ON_CPUS)]:
        path = f"{folder}/{strategy}-{accelerator}"
        whole[path] = trained(cluster, strategy, accelerator, callbacks=[SavesAt(8, path)])
    graphed = trained(cluster, "HPUParallelStrategy", "hpu", callbacks=[HPUGraphs()])
    found["HPUParallelStrategy", "HPU graphs"] = False, relative(graphed, whole[next(iter(whole))])
    with pytest.raises(ConflictError, match="HPUGraphs cannot capture modules that FSDPStrategy shards"):
        trained(cluster, "HPUFSDPStrategy", "hpu", callbacks=[HPUGraphs()])
    for strategy in ON_HPUS:
        for path, losses in whole.items():
            resumed = trained(cluster, strategy, "hpu", ckpt_path=path)
            is_same = path.endswith(f"{strategy}-hpu")
            found[strategy, Path(path).name] = is_same, relative(resumed, losses[8:])
    for strategy in ON_CPUS:
        for path in list(whole)[:2]:
            resumed = trained(cluster, strategy, "cpu", ckpt_path=path)
            found[strategy, Path(path).name] = False, relative(resumed, whole[path][8:])
    return found


def relative(losses, others):
    assert losses.shape == others.shape
    return float(((losses - others).abs() / others.abs()).max())


def test_resume_is_exact_checkpoints_move_and_graphs_change_nothing(tmp_path):
    for found in in_ranks(moves, folder=str(tmp_path)):
        assert len(found) == 1 + 4 * (1 + len(ON_CPUS))
        assert {way: difference for way, (is_same, difference) in found.items() if is_same and difference != 0} == {}
        assert max(difference for _, difference in found.values()) < 1e-5


# To and from strategies of one process.  poptorch's simulator must not be seen by other tests.

SIMULATOR_OF_IPUS = str(Path(__file__).parents[2] / "ipu" / "tests" / "simulator")


def in_one_process(cluster, family, start=None, save=None):
    """Train on two replicas of simulated IPUs, or as the only peer of a collaboration; return the losses."""
    from hpu_fit import Regression, data, fitted

    class OfCalls(Regression):  # its step runs once, while poptorch traces it
        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            loss = outputs["loss"]
            self.losses.append(loss.detach().mean())

    if family == "ipu":
        sys.path.insert(0, SIMULATOR_OF_IPUS)
        os.environ["POPTORCH_SIMULATED_IPUS"] = "2"
        where = {"strategy": "ipu_strategy", "accelerator": "ipu", "devices": 2}
    else:
        from dstrat_hivemind import HivemindStrategy

        alone = HivemindStrategy(8, matchmaking_time=0.5, averaging_timeout=2.0, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        where = {"strategy": alone, "accelerator": "cpu", "devices": 1}
    loader = data(batch_size=8 // where["devices"])
    callbacks = [SavesAt(8, save)] if save else []
    return torch.stack(fitted(OfCalls(), loader, ckpt_path=start, callbacks=callbacks, **where).losses)


def on_hpus(cluster, folder, start=None):
    """Train each strategy of Gaudi, from a checkpoint or to one of its own; return their losses."""
    os.environ["HABANA_SIMULATOR_MACHINE"] = f"{os.environ['HABANA_SIMULATOR_MACHINE']}/job-{cluster.main_port}"
    options = {"ckpt_path": start} if start else {}
    return [
        trained(cluster, name, "hpu", **options, callbacks=[] if start else [SavesAt(8, f"{folder}/{name}")])
        for name in ON_HPUS
    ]


@pytest.mark.parametrize("family", ["ipu", pytest.param("hivemind", marks=[NEEDS_HIVEMIND, pytest.mark.variant])])
def test_checkpoints_move_to_and_from_strategies_of_one_process(tmp_path, family):
    of_family = str(tmp_path / "of-family")
    of_hpus = in_ranks(on_hpus, folder=str(tmp_path))
    cases = {name: {"family": family, "start": str(tmp_path / name)} for name in ON_HPUS}
    cases["whole"] = {"family": family, "save": of_family}
    (found,) = in_ranks(each, 1, function=in_one_process, cases=cases)
    whole = found.pop("whole")
    for resumed in found.values():
        assert relative(resumed, whole[8:]) < 1e-5
    for losses in of_hpus:
        for of_strategy in losses:
            assert relative(of_strategy, whole) < 1e-5
    for losses in in_ranks(on_hpus, folder=str(tmp_path), start=of_family):
        for of_strategy in losses:
            assert relative(of_strategy, whole[8:]) < 1e-5


DEEPSPEED = """
import sys
import torch
import habana_frameworks.torch
from hpu_fit import Regression, data, fitted
from dstrat import Callback
from dstrat_deepspeed import DeepSpeedStrategy


class Keeping(Callback):
    def on_train_end(self, trainer, module):
        losses = trainer.strategy.reduce(torch.stack(module.losses)).tolist()
        if trainer.is_global_zero:
            sys.stdout.write(f"losses {[str(trainer.strategy.root_device), *losses]}\\n")
            sys.stdout.flush()


for stage in (1, 2):
    strategy = DeepSpeedStrategy(stage=stage, start_method="fork")
    fitted(None, data(batch_size=4), callbacks=[Keeping()], strategy=strategy, accelerator="hpu", devices=2)
"""


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_deepspeed_trains_on_gaudi_with_the_losses_of_one_device(tmp_path):
    expected = fitted(**ON_CPU).losses
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{DEEPSPEED}")
    ended = subprocess.run(
        [sys.executable, program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        env={**os.environ, "DS_ACCELERATOR": "hpu", "HABANA_SIMULATOR_MACHINE": str(tmp_path)},
    )
    lines = [ast.literal_eval(line[7:]) for line in ended.stdout.splitlines() if line.startswith("losses ")]
    assert [device for device, *_ in lines] == ["hpu:0"] * 2
    for _, *losses in lines:
        assert relative(torch.tensor(losses), torch.stack(expected)) < 1e-5
