"""Requests that cannot work end with an error before anything starts."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from xla_fit import ON_XLA, trainer

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, DeviceError, MissingRequirementError
from dstrat.interfaces.strategy import Parts
from dstrat.resolve import Request, make_plan
from dstrat_xla import XLAStrategy, runtime


def plan(environ=None, **asked):
    return make_plan(Request(**asked), environ=environ or {})


def test_two_processes_need_collectives_that_the_cpu_backend_lacks():
    with pytest.raises(ConflictError, match="'xla_spmd', devices=1, or for tests XLAStrategy"):
        trainer(strategy="xla", devices=2)


def test_the_same_holds_for_processes_that_torchrun_started(monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {**ranks, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConflictError, match="collectives for 2 processes"):
        trainer(strategy="xla", devices=2)


@pytest.mark.parametrize(("kind", "is_possible"), [("v3-8", False), ("v4-8", True)])
def test_tpus_with_two_devices_in_a_process_need_spmd(monkeypatch, kind, is_possible):
    for name, value in {"PJRT_DEVICE": "TPU", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": kind}.items():
        monkeypatch.setenv(name, value)
    parts = Parts(
        parallel_devices=(torch.device("xla", 0), torch.device("xla", 1)), cluster_environment=LocalEnvironment({})
    )
    expected = pytest.raises(ConflictError, match="choose 'xla_spmd', which drives all devices from one process")
    with nullcontext() if is_possible else expected:
        XLAStrategy().receive(parts)


def test_torchrun_without_an_address_is_an_error():
    from dstrat.errors import ClusterError

    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    with pytest.raises(ClusterError, match="MASTER_ADDR is not set"):
        plan({**ranks, "TORCHELASTIC_RUN_ID": "x"}, strategy="xla", accelerator="xla", devices=2)


def test_a_single_device_strategy_takes_no_two():
    with pytest.raises(ConflictError, match="at most 1 device"):
        plan(strategy="single_xla", accelerator="xla", devices=2)


def test_a_strategy_that_never_cuts_the_graph_is_refused():
    with pytest.raises(ConflictError, match="where 'single_xla' serves 'single_device': give strategy='single_xla'"):
        plan(strategy=SingleDeviceStrategy(), accelerator="xla", devices=1)


def test_more_devices_than_can_be_had_are_an_error():
    with pytest.raises(DeviceError, match="more than there are"):
        plan(strategy="xla", accelerator="xla", devices=5000)


def test_a_type_of_device_that_contradicts_the_accelerator_is_named(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(DeviceError, match="PJRT_DEVICE is 'CPU'; unset it, or choose accelerator='xla'"):
        plan(strategy="xla", accelerator="tpu", devices=1)


@pytest.mark.parametrize("precision", ["16-mixed", "64-true"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ConflictError, match="only with '32-true', '16-true', 'bf16-true', 'bf16-mixed'"):
        plan(**ON_XLA, precision=precision)


def test_strategies_over_torch_distributed_say_what_xla_lacks():
    with pytest.raises(ConflictError, match=r"torch\.distributed, which does not support accelerator 'xla'"):
        plan(strategy="ddp", accelerator="xla", devices=2)


def test_general_aliases_are_served_by_those_of_xla():
    assert plan(strategy="single_device", accelerator="xla", devices=1).strategy == "single_xla"
    assert plan(strategy="ddp_spawn", accelerator="xla", devices=2).strategy == "xla"
    assert plan(accelerator="xla", devices=1).strategy == "single_xla"
    assert plan(strategy="single_tpu", accelerator="xla", devices=1).strategy == "single_xla"
    assert plan(strategy="tpu_spawn_debug", accelerator="xla", devices=1).strategy == "xla_debug"


@pytest.mark.without_torch_xla
def test_without_torch_xla_the_command_to_install_it_is_named(no_torch_xla):
    with pytest.raises(MissingRequirementError, match=r"pip install .*torch_xla"):
        plan(strategy="single_xla", accelerator="xla", devices=1)


@pytest.mark.without_torch_xla
def test_torch_xla_of_another_torch_is_named_with_both(no_torch_xla, tmp_path, monkeypatch):
    message = "libtorch_xla.so: undefined symbol: _ZN5torch8autograd"
    library = tmp_path / "torch_xla"
    library.mkdir()
    (library / "__init__.py").write_text(f"raise ImportError({message!r})")
    monkeypatch.syspath_prepend(tmp_path)
    expected = rf"cannot be loaded with torch {re.escape(torch.__version__)} \(ImportError: {message}\): install"
    with pytest.raises(DeviceError, match=expected):
        runtime.torch_xla()


@pytest.fixture
def no_torch_xla():
    import importlib.metadata

    try:
        importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return
    pytest.skip("torch_xla is installed here")


@pytest.mark.tpu
def test_ddp_spawn_on_a_tpu_is_one_process_for_each_device():
    planned = plan(strategy="ddp_spawn", accelerator="tpu", devices="auto")
    assert (planned.strategy, planned.world_size) == ("xla", planned.num_devices)


def test_processes_are_counted_where_gradients_are_averaged_on_the_host():
    strategy = XLAStrategy(reduce_on_host=True)
    assert trainer(strategy=strategy, devices=2).world_size == 2
