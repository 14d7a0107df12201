"""Options that make no sense, or none together, and what is said of those without effect."""

import logging
import os

import pytest
import torch
from deepspeed_fit import Model, fit, trainer_of
from deepspeed_loop import parts

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.config import from_options
from dstrat_deepspeed.options import read_options
from dstrat_deepspeed.runtime import build_folder, check_prerequisites

NO_SUCH = {
    r"loss_scale -1 is not possible: give a number from 0 on": {"loss_scale": -1},
    r"initial_scale_power 'x' is not possible": {"initial_scale_power": "x"},
    r"hysteresis 0 is not possible: give a whole number from 1 on": {"hysteresis": 0},
    r"reduce_bucket_size -1 is not possible: give a whole number from 1 on": {"reduce_bucket_size": -1},
    r"sub_group_size 2.5 is not possible: give a whole number from 0 on": {"stage": 3, "sub_group_size": 2.5},
    r"overlap_comm 'yes' is not possible: give True or False": {"overlap_comm": "yes"},
    r"save_native 'yes' is not possible": {"save_native": "yes"},
    r"nvme_path 3 is not possible: give the path of a folder": {"nvme_path": 3},
    r"stage 2.0 of ZeRO is not possible: choose 0, 1, 2 or 3": {"stage": 2.0},
    r"logging_batch_size_per_gpu 2.5 is not possible: give a whole number": {"logging_batch_size_per_gpu": 2.5},
    r"config says zero_optimization: None, and it must be a section": {"config": {"zero_optimization": None}},
}
CONFLICTS = {
    r"loss_scale=128 is the scale of the whole training, and hysteresis say": {"loss_scale": 128, "hysteresis": 3},
    r"contiguous_memory_optimization needs partition_activations=True": {"contiguous_memory_optimization": True},
    r"offload_optimizer_device='nvme' changes nothing without offload_optimizer=True": {
        "stage": 3,
        "offload_optimizer_device": "nvme",
    },
    r"nvme_path='/fast' changes nothing without": {"stage": 3, "offload_optimizer": True, "nvme_path": "/fast"},
    r"pin_memory=True changes nothing without offload_optimizer=True or": {"pin_memory": True},
    r"max_in_cpu=5 changes nothing without parameters": {"stage": 3, "offload_parameters": True, "max_in_cpu": 5},
    r"remote_device='nvme' makes parameters in files": {"stage": 3, "remote_device": "nvme"},
    r"sub_group_size needs stage=3, not stage=2": {"sub_group_size": 1000},
    r"zero_optimization=False needs stage=0, not stage=3": {"stage": 3, "zero_optimization": False},
    r"exclude_frozen_parameters is about DeepSpeed's own files": {"exclude_frozen_parameters": True},
}


@pytest.mark.parametrize("match", NO_SUCH)
def test_a_value_that_is_not_possible_is_refused_at_once(match):
    with pytest.raises(RequestError, match=match):
        DeepSpeedStrategy(**NO_SUCH[match])


@pytest.mark.parametrize("match", CONFLICTS)
def test_options_that_contradict_each_other_are_refused_at_once(match):
    with pytest.raises(ConflictError, match=match):
        DeepSpeedStrategy(**CONFLICTS[match])


def test_activations_are_not_moved_to_where_they_are():
    with pytest.raises(ConflictError, match="where the accelerator 'cpu' has them already"):
        trainer_of(DeepSpeedStrategy(cpu_checkpointing=True))


def test_offloading_to_nvme_without_a_path():
    strategy = DeepSpeedStrategy(config={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    with pytest.raises(RequestError, match="pass nvme_path='/path/on/nvme'"):
        strategy.receive(parts())


def test_clipping_by_value_is_refused_before_the_first_step():
    module = Model()
    with pytest.raises(RequestError, match="clips by norm only"):
        fit(module, DeepSpeedStrategy(), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert all(torch.equal(mine, new) for mine, new in zip(module.parameters(), Model().parameters(), strict=True))


RANKS = {
    "config says zero_optimization.zero_hpz_partition_size: 2, which does not divide the 3 ranks: give one that does": {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}
    },
    "config says sequence_parallel_size: 3, with which 3 ranks read the same data": {"sequence_parallel_size": 3},
    "config says tensor_parallel.autotp_size: 3, with which 3 ranks read the same data": {
        "tensor_parallel": {"autotp_size": 3}
    },
}


def test_what_is_said_of_files_reaches_deepspeed_by_its_names_there_and_sizes_may_be_written_as_powers():
    files = {"offload_parameters": True, "offload_params_device": "nvme", "thread_count": 2, "queue_depth": 4}
    config = from_options(read_options({"stage": 3, "params_buffer_size": 5e8, **files}), 3)
    assert config["aio"]["intra_op_parallelism"] == 2
    assert "thread_count" not in config["aio"]
    assert repr(config["zero_optimization"]["offload_param"]["buffer_size"]) == "500000000"


def said_of_ranks(cluster):
    """Return what is said of each configuration on three ranks, and the losses of one that is possible."""

    def said_of(config):
        with pytest.raises(RequestError) as caught:
            fit(Model(), DeepSpeedStrategy(config=config), cluster)
        return str(caught.value)

    groups = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}
    return [said_of(config) for config in RANKS.values()], fit(Model(), DeepSpeedStrategy(config=groups), cluster)


def test_ranks_that_cannot_be_divided_so_are_an_error_and_those_that_can_give_the_losses_of_one_device(ranks):
    expected = fit(Model(), "single_device")
    for said, losses in ranks(said_of_ranks, 3):
        assert len(said) == len(RANKS)
        for message, start in zip(said, RANKS, strict=True):
            assert message.startswith(start)
        assert losses == pytest.approx(expected, rel=1e-5, abs=0)


def test_an_option_without_effect_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        DeepSpeedStrategy(load_full_weights=True)
    assert "load_full_weights=True changes nothing" in caplog.text


def test_that_an_operation_is_compiled_for_minutes_is_logged_until_it_is_there(tmp_path, caplog):
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    folder = build_folder("cpu_adam", environ)
    with caplog.at_level(logging.INFO):
        check_prerequisites("cpu_adam", "offload_optimizer", environ)
    assert caplog.messages == [
        f"offload_optimizer needs DeepSpeed's cpu_adam, which is compiled into {folder}, for some minutes"
    ]
    caplog.clear()
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").touch()
    with caplog.at_level(logging.INFO):
        check_prerequisites("cpu_adam", "offload_optimizer", environ)
    assert caplog.messages == []
