"""What DDPStrategy's constructor takes, and what it refuses."""

import inspect
import pickle
from datetime import timedelta

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat_ddp import DDPSpawnStrategy, DDPStrategy


def local_sgd(start=2):
    return PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=start)


def test_the_signature_is_the_known_one():
    parameters = inspect.signature(DDPStrategy).parameters
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("accelerator", None),
        ("parallel_devices", None),
        ("cluster_environment", None),
        ("checkpoint_io", None),
        ("precision_plugin", None),
        ("ddp_comm_state", None),
        ("ddp_comm_hook", None),
        ("ddp_comm_wrapper", None),
        ("model_averaging_period", None),
        ("process_group_backend", None),
        ("timeout", timedelta(seconds=1800)),
        ("start_method", "popen"),
        ("activation_checkpointing", None),
        ("activation_checkpointing_policy", None),
        ("activation_offload", False),
        ("kwargs", inspect.Parameter.empty),
    ]


def test_given_parts_are_kept():
    accelerator, precision = CPUAccelerator(), TruePrecision("32-true")
    devices = [torch.device("cpu")] * 2
    strategy = DDPStrategy(accelerator, devices, precision_plugin=precision, timeout=timedelta(seconds=5))
    assert strategy.accelerator is accelerator
    assert strategy.precision_plugin is precision
    assert strategy.parallel_devices == tuple(devices)
    assert strategy.timeout == timedelta(seconds=5)


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("find_unused_parameter", "did you mean 'find_unused_parameters'?"),
        ("gradient_as_bucket_views", "did you mean 'gradient_as_bucket_view'?"),
        ("ddp_com_hook", "did you mean 'ddp_comm_hook'"),
        ("stage", "possible are"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(keyword, meant):
    with pytest.raises(MisuseError) as refused:
        DDPStrategy(**{keyword: True})
    assert f"DDPStrategy got {keyword!r}, which neither it nor torch's DistributedDataParallel knows; " in str(
        refused.value
    )
    assert meant in str(refused.value)


@pytest.mark.parametrize("keyword", ["device_ids", "output_device"])
def test_devices_are_not_given_twice(keyword):
    with pytest.raises(MisuseError, match=f"DDPSpawnStrategy sets {keyword!r} itself"):
        DDPSpawnStrategy(**{keyword: [0]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ddp_comm_hook": "fp61_compress"}, RequestError, "did you mean 'fp16_compress'"),
        ({"ddp_comm_hook": "zzz"}, RequestError, "ddp_comm_hook 'zzz' is not one of allreduce, batched_powerSGD"),
        ({"ddp_comm_hook": 3}, MisuseError, "ddp_comm_hook 3 must be callable, or one of"),
        (
            {"ddp_comm_hook": "allreduce", "ddp_comm_wrapper": "fp8"},
            RequestError,
            "ddp_comm_wrapper 'fp8' is not one of bf16_compress, fp16_compress",
        ),
        ({"ddp_comm_state": object()}, ConflictError, "ddp_comm_state needs a ddp_comm_hook"),
        ({"ddp_comm_wrapper": "fp16_compress"}, ConflictError, "ddp_comm_wrapper needs a ddp_comm_hook"),
        ({"ddp_comm_hook": "post_localSGD"}, ConflictError, "got ddp_comm_state None, and must know when it starts"),
        (
            {"ddp_comm_hook": "post_localSGD", "ddp_comm_state": local_sgd()},
            ConflictError,
            "lets the ranks drift apart: give model_averaging_period",
        ),
        ({"model_averaging_period": 4}, ConflictError, "model_averaging_period=4 averages parameters where gradients"),
        (
            {"ddp_comm_hook": "post_localSGD", "ddp_comm_state": local_sgd(), "model_averaging_period": 0},
            RequestError,
            "model_averaging_period 0 must be a number of steps, at least 1",
        ),
    ],
)
def test_communication_that_makes_no_sense_is_refused(options, error, message):
    with pytest.raises(error) as refused:
        DDPStrategy(**options)
    assert message in str(refused.value)


def test_a_strategy_with_a_state_pickles_before_there_is_a_process_group():
    state = PowerSGDState(process_group=None, matrix_approximation_rank=3, start_powerSGD_iter=7)
    strategy = DDPStrategy(ddp_comm_hook="powerSGD", ddp_comm_state=state, ddp_comm_wrapper="fp16_compress")
    copied = pickle.loads(pickle.dumps(strategy))._comm_hook
    assert copied.hook is strategy._comm_hook.hook
    assert copied.wrapper is strategy._comm_hook.wrapper
    assert (copied.state.matrix_approximation_rank, copied.state.start_powerSGD_iter) == (3, 7)
    other = pickle.loads(pickle.dumps(DDPStrategy(ddp_comm_hook="allreduce", ddp_comm_state=("any", 1))))
    assert other._comm_hook.state == ("any", 1)
