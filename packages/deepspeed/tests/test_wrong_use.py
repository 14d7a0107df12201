"""What cannot work is said before it starts, with what to do."""

import json
import logging
import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed_loop import Net, Run, parts, start
from tests.sharpness import Sam
from tests.warm_program import WarmProgram

from dstrat import Trainer
from dstrat.errors import ConflictError, RequestError
from dstrat.testing.ranks.team import LoopbackCluster
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.config import PATH_VARIABLE, Configuration, read_config
from dstrat_deepspeed.optimizers import check_named_optimizer
from dstrat_deepspeed.runtime import build_folder, check_lockable, check_prerequisites, load_deepspeed, log_level


def refused(error, match, **options):
    with pytest.raises(error, match=match):
        DeepSpeedStrategy(**options)


def test_a_stage_out_of_range():
    for stage in (4, -1, True, "2"):
        refused(RequestError, r"choose 0, 1, 2 or 3", stage=stage)
    refused(RequestError, r"choose 0, 1, 2 or 3", config={"zero_optimization": {"stage": 5}})


def test_an_option_that_does_not_exist():
    refused(RequestError, "did you mean 'offload_optimizer'", offload_optimiser=True)
    refused(RequestError, "pass what has no name here in config", xyz=1)


def test_a_device_or_a_level_that_does_not_exist():
    refused(RequestError, "logging_level 'loud' is not possible: give 'debug', 'info'", logging_level="loud")
    assert [log_level(level) for level in ("info", "WARNING", 15)] == [20, 30, 15]
    refused(RequestError, "choose 'cpu' or 'nvme'", stage=3, offload_optimizer=True, offload_optimizer_device="disk")


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "offload_optimizer": True},
        {"stage": 2, "offload_parameters": True},
        {"stage": 2, "remote_device": "cpu"},
        {"stage": 2, "offload_optimizer": True, "offload_optimizer_device": "nvme"},
        {"stage": 3, "queue_depth": 4},
    ],
)
def test_an_option_that_would_be_ignored(options):
    refused(ConflictError, "stage|nvme", **options)


def test_a_configuration_that_is_not_there(tmp_path):
    refused(RequestError, "No such file", config=tmp_path / "missing.json")
    refused(RequestError, "of the type int", config=3)


def test_a_configuration_that_is_not_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{stage: 2}")
    refused(RequestError, "config.json' is not JSON", config=path)
    path.write_text("[1]")
    refused(RequestError, "JSON list", config=str(path))


def test_the_environment_names_a_file_which_an_argument_goes_before(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    environ = {PATH_VARIABLE: str(path)}
    assert read_config(None, environ).values == {"zero_optimization": {"stage": 1}}
    assert read_config({"steps_per_print": 5}, environ).values == {"steps_per_print": 5}
    assert read_config(None, {}).values == {}
    with pytest.raises(RequestError, match=f"{PATH_VARIABLE}='nowhere.json' cannot be read"):
        read_config(None, {PATH_VARIABLE: "nowhere.json"})


def test_nvme_without_a_folder_that_can_be_written(tmp_path):
    strategy = DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_optimizer_device="nvme", nvme_path=str(tmp_path / "missing")
    )
    with pytest.raises(RequestError, match="is not a folder that can be written"):
        strategy.receive(parts())


def test_offloading_without_a_compiler_or_ninja(tmp_path):
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "nothing-like-it"}
    with pytest.raises(RequestError, match="no C\\+\\+ compiler 'nothing-like-it': apt install g"):
        check_prerequisites("cpu_adam", "offload_optimizer", environ)


NAMED = {
    "config, which names the optimizer 'AdamW', needs DeepSpeed's fused_adam.* no C\\+\\+ compiler": ("AdamW", "cpu"),
    "config, which names the optimizer 'Lion', .*there is no nvcc: install the CUDA toolkit": ("Lion", "cuda"),
    "names the optimizer 'Lamb', which DeepSpeed has for GPUs only": ("Lamb", "cpu"),
    "names the optimizer 'AdamX', with which DeepSpeed cannot train: did you mean 'Adam": ("AdamX", "cpu"),
    "names the optimizer 'LBFGS', with which DeepSpeed cannot train: name another one": ("LBFGS", "cpu"),
    "config says optimizer: {'type': None, 'params': {}}, and it must be": (None, "cpu"),
}


@pytest.mark.parametrize("match", NAMED)
def test_an_optimizer_by_name_that_deepspeed_cannot_make_is_refused_before_the_start(match, tmp_path):
    name, device_type = NAMED[match]
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "nothing-like-it", "CUDA_HOME": str(tmp_path)}
    config = {"optimizer": {"type": name, "params": {}}}
    with pytest.raises(RequestError, match=match):
        check_named_optimizer(config, device_type, environ, "config")


def test_an_optimizer_by_name_that_torch_has_needs_no_compiler(tmp_path):
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "nothing-like-it"}
    for section in ({"type": "SGD", "params": {"lr": 0.1}}, {"type": "AdamW", "params": {"torch_adam": True}}):
        check_named_optimizer({"optimizer": section}, "cpu", environ, "config")


def test_an_optimizer_by_name_is_looked_at_when_the_strategy_receives_its_devices():
    with pytest.raises(RequestError, match="names the optimizer 'Lamb'"):
        DeepSpeedStrategy(config={"optimizer": {"type": "Lamb"}}).receive(parts())


def test_a_lock_for_which_torch_would_wait_is_logged_with_what_to_do(tmp_path, caplog):
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    lock = build_folder("cpu_adam", environ) / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):  # as the process that compiles
        check_prerequisites("cpu_adam", "offload_optimizer", environ)
    assert caplog.messages == []
    check_prerequisites("cpu_adam", "offload_optimizer", environ)
    assert caplog.messages == [f"{lock} exists: a process is compiling, or was killed; if none is, rm {lock}"]


TRAINING = """
import logging
import sys
import torch
import dstrat
logging.basicConfig(stream=sys.stdout, format="%(message)s")
def train(loop):
    loop.setup(torch.nn.Linear(2, 1), lambda net: torch.optim.AdamW(net.parameters()))
dstrat.OwnLoop(dstrat.build(strategy="deepspeed", accelerator="cpu", devices=1)).launch(train)
"""


def test_a_lock_that_deepspeed_waits_for_when_it_starts_is_named(tmp_path):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    lock = build_folder("deepspeed_shm_comm", {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) / "lock"
    lock.parent.mkdir()
    lock.touch()
    process = WarmProgram(script, environ={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    (line,) = process.next_lines(1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert line == f"{lock} exists: a process is compiling, or was killed; if none is, rm {lock}\n"


def test_nvme_without_libaio(tmp_path):
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CPATH": "", "LIBRARY_PATH": ""}
    if (Path("/usr/include") / "libaio.h").exists():
        pytest.skip("libaio is installed here")
    with pytest.raises(RequestError, match="there is no libaio: apt install libaio-dev"):
        check_prerequisites("async_io", "offload_param on 'nvme'", environ)
    (tmp_path / "include").mkdir()
    for name in ("libaio.h", "libaio.so"):
        (tmp_path / "include" / name).touch()
    environ.update(CPATH=f"{tmp_path}/include", LIBRARY_PATH=f"{tmp_path}/include")
    check_prerequisites("async_io", "offload_param on 'nvme'", environ)


def test_more_locked_memory_than_is_allowed():
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        pytest.skip("every process may lock any amount of memory here")
    locks = partial(check_lockable, 2**60, "offload_param on 'nvme'", "pass less")
    before = os.geteuid()
    if before == 0:
        locks()
        os.seteuid(65534)
    try:
        with pytest.raises(RequestError, match=r"MiB are allowed: raise the limit \(ulimit -l.*or pass less"):
            locks()
    finally:
        os.seteuid(before)


def test_16_mixed_on_cpus():
    with pytest.raises(ConflictError, match="on the accelerator 'cpu', where DeepSpeed has no float16"):
        Trainer(strategy="deepspeed", accelerator="cpu", devices=2, precision="16-mixed", logger=False)


def test_another_precision():
    with pytest.raises(ConflictError, match="cannot run with precision '64-true'"):
        Trainer(strategy="deepspeed", accelerator="cpu", devices=2, precision="64-true", logger=False)


def test_a_loss_scale_without_a_loss_to_scale():
    strategy = DeepSpeedStrategy(loss_scale=128)
    with pytest.raises(ConflictError, match="loss_scale scale the loss of precision '16-mixed'"):
        strategy.receive(parts())


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Sharp(Net):
    def configure_optimizers(self):
        return Sam(self.parameters(), lr=0.1)


class Nothing(Net):
    def configure_optimizers(self):
        return None


class Two(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.1)]


CASES = {
    "LBFGS computes the loss several times": ("Lbfgs", {}, {}),
    "Sam computes the loss several times in one step, which DeepSpeed's engine cannot do": ("Sharp", {}, {}),
    "returned 2 optimizers, and DeepSpeed trains with one": ("Two", {}, {}),
    "config says gradient_clipping: 1.0, and the Trainer's gradient_clip_val=None": (
        "Net",
        {"config": {"gradient_clipping": 1.0}},
        {},
    ),
    "config says gradient_accumulation_steps: 4, and the Trainer's accumulate_grad_batches=2": (
        "Net",
        {"config": {"gradient_accumulation_steps": 4}},
        {"accumulate": 2},
    ),
    "config says bf16.enabled: True, and precision='32-true'": ("Net", {"config": {"bf16": {"enabled": True}}}, {}),
    "config says fp16.enabled: True, and precision='32-true'": ("Net", {"config": {"fp16": {"enabled": True}}}, {}),
    "config has the key 'gradient_cliping', which DeepSpeed does not know, did you mean 'gradient_clipping'?": (
        "Net",
        {"config": {"gradient_cliping": 1.0}},
        {},
    ),
    "DeepSpeed does not take the configuration (config): Zero stag=2: Extra inputs": (
        "Net",
        {"config": {"zero_optimization": {"stag": 2}}},
        {},
    ),
    "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 7 != 3 * 2 * 1": (
        "Net",
        {"config": {"train_batch_size": 7}},
        {"accumulate": 2},
    ),
    "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 8 != 3 * 1 * 1": (
        "Net",
        {"config": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}},
        {},
    ),
    "world_size 8 != 4 * 1 * 1": ("Net", {"logging_batch_size_per_gpu": 4, "config": {"train_batch_size": 8}}, {}),
    "config has an 'optimizer', and configure_optimizers returned AdamW": (
        "Net",
        {"config": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}},
        {},
    ),
    "configure_optimizers returned no optimizer, and stage 2 of ZeRO shards one: return one": ("Nothing", {}, {}),
    "config, in its section activation_checkpointing, has the key 'partition_activation', which DeepSpeed does not": (
        "Net",
        {"config": {"activation_checkpointing": {"partition_activation": True}}},
        {},
    ),
    "config, in its section flops_profiler, has the key 'enabledd', which DeepSpeed does not know, did you mean": (
        "Net",
        {"config": {"flops_profiler": {"enabledd": True}}},
        {},
    ),
    "config, in its section data_efficiency, has the key 'sed', which": (
        "Net",
        {"config": {"data_efficiency": {"sed": 1}}},
        {},
    ),
    "config, in its section aio, has the key 'block_sizee', which": (
        "Net",
        {"config": {"aio": {"block_sizee": 1}}},
        {},
    ),
    "config says train_micro_batch_size_per_gpu: 4, and logging_batch_size_per_gpu=3 says otherwise": (
        "Net",
        {"logging_batch_size_per_gpu": 3, "config": {"train_micro_batch_size_per_gpu": 4}},
        {},
    ),
    "config has a 'scheduler', which DeepSpeed would step by itself": (
        "Net",
        {"config": {"scheduler": {"type": "WarmupLR"}}},
        {},
    ),
}


CREATION = {
    "DeepSpeed does not take the configuration (config): Zero stag=2: Extra inputs": {"zero_optimization": {"stag": 2}},
    "(config): Zero offload_param.devic='cpu': Extra inputs": {
        "zero_optimization": {"offload_param": {"devic": "cpu"}}
    },
    "(config): Zero offload_param.buffer_count=-1: Input should be greater": {
        "zero_optimization": {"offload_param": {"device": "cpu", "buffer_count": -1}}
    },
    "(config): DeepSpeedConfigError: MiCS ZeRO-3 sharding has been removed": {
        "zero_optimization": {"mics_shard_size": 2}
    },
    "config says fp16.enabled: True, and precision='32-true' says otherwise": {"fp16": {"enabled": True}},
    "config has the key 'gradient_cliping'": {"gradient_cliping": 1.0},
    "config says bf16: None, and it must be a section: {...}": {"bf16": None},
    "(config): TypeError: ": {"tensor_parallel": None},
    "zero_hpz_partition_size: 3, which does not divide the 2 ranks": {
        "zero_optimization": {"zero_hpz_partition_size": 3}
    },
    "config says sequence_parallel_size: 2, with which 2 ranks read the same data": {"sequence_parallel_size": 2},
}


def said_of_cases(cluster):
    """Return what is said of each case, before anything is opened, and when layers are made in stage 3."""
    load_deepspeed("cpu", logging.WARNING)
    Configuration({"stage": 3}, {"train_batch_size": 7}, "auto").for_creation(
        "32-true", 2
    )  # which is about the training
    created = [
        said_by(partial(Configuration({"stage": 3}, config, "auto").for_creation, "32-true", 2))
        for config in CREATION.values()
    ]
    return [said_of(*case) for case in CASES.values()], created


def said_of(kind, options, run):
    strategy = DeepSpeedStrategy(**options)
    strategy.receive(parts(LoopbackCluster(0, 2, 0, None)))
    strategy.connect(globals()[kind]())
    with pytest.raises(RequestError) as caught:
        strategy.setup(Run(strategy.module, **run))
    return str(caught.value)


def test_what_contradicts_the_trainer_or_is_unknown_is_an_error_that_names_both_places(ranks):
    [(of_runs, of_creation)] = ranks(said_of_cases, 1)
    for expected, said in zip([*CASES, *CREATION], of_runs + of_creation, strict=True):
        assert expected in said


def said_by(attempt):
    with pytest.raises(Exception) as caught:
        attempt()
    return str(caught.value)


def during_training(cluster):
    strategy = DeepSpeedStrategy()
    start(strategy, Net(), parts(cluster))
    found = [
        said_by(lambda: strategy.clip_gradients(strategy.optimizers[0], 1.0, "value")),
        said_by(strategy.grad_norm),
    ]
    strategy.teardown()
    return found


def test_what_shows_in_the_first_step(ranks):
    value, norm = ranks(during_training)[0]
    assert "gradient_clip_algorithm='value' is not possible with DeepSpeed" in value
    assert "the norm of the last gradients is not known" in norm


def logged(cluster):
    """Log through DeepSpeed; return what arrives where, and what is said of other hardware."""
    load_deepspeed("cpu", logging.INFO)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    logger = logging.getLogger("DeepSpeed")
    logger.info("something")
    logger.warning("**** You are using ZeRO with an untested optimizer, proceed with caution *****")
    logger.warning("[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.")
    os.environ.pop("DS_ACCELERATOR", None)
    said = said_by(lambda: load_deepspeed("cuda", logging.INFO))
    return logger.handlers, [record.getMessage() for record in records], said


def test_deepspeed_says_nothing_on_stdout_and_its_log_follows_ours(ranks):
    [(own_handlers, messages, said)] = ranks(logged, 1)
    assert own_handlers == []
    assert messages == ["something"]
    assert "DeepSpeed was imported for 'cpu' before" in said
