"""The precision of NVIDIA's Transformer Engine."""

import importlib.util

import pytest
import torch
from packages.torchao.tests.language_model import losses_of

from dstrat import Trainer
from dstrat.errors import DstratError, RequestError
from dstrat_torchao import TransformerEnginePrecision

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
without_engine = pytest.mark.skipif(HAS_ENGINE, reason="transformer-engine is installed")


@without_engine
def test_without_the_library_the_plan_names_the_command():
    with pytest.raises(DstratError) as caught:
        Trainer(precision="transformer-engine", accelerator="cpu")
    assert "transformer-engine>=1.11, which is not installed: pip install --no-build-isolation" in str(caught.value)


@without_engine
def test_without_the_library_the_class_names_the_command():
    with pytest.raises(RequestError, match=r"needs transformer_engine\.pytorch, which cannot be loaded"):
        TransformerEnginePrecision()


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_ENGINE, reason="transformer-engine is not installed")
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_losses_on_a_gpu_stay_near_those_of_bfloat16(strategy):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no products in 8 bits")
    expected = losses_of("bf16-true", strategy=strategy, device="cuda")
    assert losses_of("transformer-engine", strategy=strategy, device="cuda") == pytest.approx(expected, rel=0.1)
