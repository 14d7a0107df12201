"""Options of the strategy, and the errors for those that cannot work."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.optimizers import Optimization
from dstrat.interfaces.strategy import Parts

pytest.importorskip("colossalai", reason="needs colossalai")

from dstrat_colossalai import (
    ColossalAILowLevelZeroStrategy,
    ColossalAIStrategy,
    ColossalAITorchDDPStrategy,
    ColossalAITorchFSDPStrategy,
)
from dstrat_colossalai.options import gemini_options, trainer_options

OF_LIGHTNING = {
    "use_chunk": True,
    "chunk_size": None,
    "enable_distributed_storage": True,
    "placement_policy": "auto",
    "force_outputs_fp32": False,
    "gpu_margin_mem_ratio": 0.0,
    "chunk_search_range": 64 * 1024**2,
    "chunk_search_n_grids": 4096,
    "min_chunk_size": None,
    "initial_scale": 2**16,
}


def test_options_of_lightning_become_those_of_gemini():
    assert gemini_options(OF_LIGHTNING) == {
        "placement_policy": "auto",
        "search_range_m": 64,
        "force_outputs_fp32": False,
        "gpu_margin_mem_ratio": 0.0,
        "initial_scale": 2**16,
    }
    offloaded = gemini_options({**OF_LIGHTNING, "placement_policy": "cpu", "min_chunk_size": 2**20})
    assert (offloaded["offload_optim_frac"], offloaded["offload_param_frac"], offloaded["min_chunk_size_m"]) == (
        1,
        1,
        1,
    )
    replicated = {**OF_LIGHTNING, "placement_policy": "static", "enable_distributed_storage": False}
    assert gemini_options(replicated)["shard_param_frac"] == 0.0


def test_the_plugin_gets_the_arguments_of_the_trainer():
    gemini = trainer_options("gemini", "16-mixed", 0.5, "norm", 4, 1)
    assert gemini == {"precision": "fp16", "max_norm": 0.5, "enable_gradient_accumulation": True}
    assert trainer_options("low_level_zero", "32-true", None, "norm", 1, 2) == {"precision": "fp32", "max_norm": 0.0}
    assert trainer_options("torch_ddp", "32-true", 0.5, "value", 4, 1) == {}
    with pytest.raises(ConflictError, match="accumulate_grad_batches=2 cannot be combined with stage=2"):
        trainer_options("low_level_zero", "32-true", None, "norm", 2, 2)
    with pytest.raises(ConflictError, match="gradient_clip_algorithm='value' cannot be combined with the plugin"):
        trainer_options("gemini", "16-mixed", 0.5, "value", 1, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"use_chunk": False}, RequestError, "use_chunk=False is of Colossal-AI before 0.3"),
        ({"placement_policy": "gpu"}, RequestError, "placement_policy='gpu' is not one of 'auto', 'static'"),
        ({"enable_distributed_storage": False}, RequestError, "needs placement_policy='static'"),
        ({"stage": 2}, MisuseError, "got 'stage', which neither it nor Colossal-AI's GeminiPlugin knows"),
        ({"max_norm": 1.0}, MisuseError, "sets 'max_norm' by the Trainer's gradient_clip_val"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_start(options, error, message):
    with pytest.raises(error, match=message):
        ColossalAIStrategy(**options)
    with pytest.raises(MisuseError, match="did you mean 'find_unused_parameters'"):
        ColossalAITorchDDPStrategy(find_unused=True)


@pytest.mark.parametrize(
    "cls", [ColossalAIStrategy, ColossalAILowLevelZeroStrategy, ColossalAITorchFSDPStrategy], ids=lambda cls: cls.plugin
)
def test_on_a_cpu_the_error_names_what_runs_there(cls):
    with pytest.raises(ConflictError, match=r"trains on CUDA devices only.*use strategy='colossalai_torch_ddp'"):
        cls().receive(Parts(parallel_devices=(torch.device("cpu"),)))


def caller(*optimizers):
    return SimpleNamespace(configure_optimizers=lambda: Optimization(optimizers=optimizers))


def test_wrong_optimizers_are_refused_before_the_first_step():
    module = nn.Linear(2, 1)

    def connected(strategy):
        strategy.receive(Parts(cluster_environment=LocalEnvironment()))
        strategy.connect(module)
        return strategy

    adam = torch.optim.AdamW(module.parameters())
    with pytest.raises(MisuseError, match="returned AdamW, and Gemini steps in chunks with HybridAdam, CPUAdam, Fused"):
        connected(ColossalAIStrategy()).setup_optimizers(caller(adam))
    with pytest.raises(MisuseError, match="returned 2 optimizers, and Colossal-AI's booster takes one"):
        connected(ColossalAITorchDDPStrategy()).setup_optimizers(caller(adam, adam))
    groups = torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}], lr=0.1)
    with pytest.raises(MisuseError, match="returned 2 groups of parameters"):
        connected(ColossalAITorchFSDPStrategy()).setup_optimizers(caller(groups))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x).mean()


@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [(ColossalAITorchDDPStrategy(), True), (ColossalAITorchDDPStrategy(find_unused_parameters=True), False)],
)
def test_unused_parameters_are_refused_before_a_run(strategy, is_refused):
    setup = TrainingSetup(
        module=Unused(), batch=torch.zeros(2, 4), make_optimizers=lambda net: torch.optim.SGD(net.parameters())
    )
    training = measure_training(lambda: setup, TruePrecision(), device_type="cpu", world_size=2, ranks_per_machine=2)
    with pytest.raises(RequestError, match=r"unused\.weight, unused\.bias") if is_refused else nullcontext():
        strategy.check_training(training)
