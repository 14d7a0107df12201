"""transformers' Trainer with strategies of dstrat: the losses, checkpoints and files of its own DDP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
from tests.warm_ranks import run_in_ranks
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.xdist_group("hf_trainer"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

PROGRAMS = Path(__file__).parent / "programs"
SAVING = {"save_strategy": "steps", "save_steps": 5}
SCENARIOS = {
    "plain": SAVING,
    "accumulated": {"gradient_accumulation_steps": 4},  # of 6 batches in an epoch
    "unclipped": {"max_grad_norm": 0.0, "max_steps": 4, "eval_strategy": "no", "include_num_input_tokens_seen": True},
    "smoothed": {"label_smoothing_factor": 0.1, "max_steps": 4, "gradient_accumulation_steps": 2},
    "other loss": {"has_loss": True, "max_steps": 4, "gradient_accumulation_steps": 2},
    "adapters": {"adapters": True, **SAVING},
    # The worst model is that of the first epoch.
    "best": {"load_best_model_at_end": True, "save_strategy": "epoch", "greater_is_better": True},
}
REPORTED = {"reported": {"report_to": "tensorboard", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}}
STRATEGIES = (
    *("ddp", "fsdp", "deepspeed_stage_3", "mesh(tp=2)", "mesh(pp=2)", "mesh(cp=2)"),
    pytest.param("deepspeed_stage_2", marks=pytest.mark.variant),
)
# Its state is of rows and columns of whole matrices.
ADAFACTOR = {"adafactor": {"optim": "adafactor", "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}}
HAS_ADAFACTOR = ("ddp", "fsdp", "mesh(tp=2)", "mesh(cp=2)", "mesh(pp=2)")
HAS_ADAPTERS = ("ddp", "fsdp", "deepspeed_stage_3", "deepspeed_stage_2", "mesh(cp=2)")


def run(folder, strategy, scenarios, devices=2, program="train.py", *, by_torchrun=False):
    """Run trainings in one program, and return the folder with their results."""
    folder.mkdir(exist_ok=True)
    arguments = [str(folder), strategy, str(devices), json.dumps(scenarios)]
    if by_torchrun:
        start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}", PROGRAMS / program]
        ended = subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=280, check=False)
    else:
        environ = {"ACCELERATE_USE_CPU": "true"} if strategy == "own" else {}
        ended = run_in_ranks(PROGRAMS / program, *arguments, devices=devices, **environ)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def result(folder, name=""):
    return json.loads((folder / name / "result.json").read_text())


def of_strategy(strategy, scenarios):
    """Return the scenarios for a strategy whose processes read the same batch, or as they are."""
    if not strategy.startswith("mesh"):
        return scenarios
    size = 4 if "dp_shard" in strategy else 8
    batch = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    can_have = {name: one for name, one in scenarios.items() if strategy in HAS_ADAPTERS or not one.get("adapters")}
    return {name: {**batch, **options} for name, options in can_have.items()}


# TrainingArguments takes bf16 on the CPU only with use_cpu.
IN_BFLOAT16 = {"bf16": {"bf16": True, "use_cpu": True, "max_steps": 4, "lr_scheduler_type": "constant"}}


# What depends on how many samples a process, or a group of processes that share them, reads at once.
BY_READER = {
    # Each divides by the number of its own labels.
    "by process": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2, "max_steps": 4},
    # Samples of similar lengths are those of one reader.
    "grouped": {"is_ragged": True, "train_sampling_strategy": "group_by_length", "eval_strategy": "no"},
    # The last batch of an evaluation has fewer samples, which is known at its end only.
    "stream": {"evaluates_stream": True, "max_steps": 2, "eval_strategy": "no"},
}


ACCUMULATED = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "eval_strategy": "no"}
SMALLER = {"smaller": {**ACCUMULATED, "per_device_train_batch_size": 3}}


@pytest.fixture(scope="module")
def own_ddp(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("own"),
        "own",
        {**SCENARIOS, **REPORTED, **IN_BFLOAT16, **SMALLER, **BY_READER, **ADAFACTOR},
    )


@pytest.fixture(scope="module")
def own_process(tmp_path_factory):
    batch = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    scenarios = {name: {**batch, **one} for name, one in BY_READER.items()}
    return run(tmp_path_factory.mktemp("one"), "own", scenarios, devices=1)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request):
    if request.param.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    return request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory, strategy, own_ddp):
    folder = tmp_path_factory.mktemp("run")
    resumed = {
        "resumed": {"resume": str(folder / "plain" / "checkpoint-5")},
        "resumed_from_own": {"resume": str(own_ddp / "plain" / "checkpoint-5")},
        "resumed_adapters": {"adapters": True, "resume": str(folder / "adapters" / "checkpoint-5")},
    }
    if strategy in HAS_ADAFACTOR:
        resumed |= ADAFACTOR
        resumed["resumed_adafactor"] = {**ADAFACTOR["adafactor"], "resume": str(folder / "adafactor" / "checkpoint-3")}
    return run(
        folder, strategy, of_strategy(strategy, {**SCENARIOS, **REPORTED, **IN_BFLOAT16, **BY_READER, **resumed})
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_is_that_of_its_own_ddp(own_ddp, trained, strategy, name):
    if not (trained / name).exists():
        pytest.skip("split layers have no adapters")
    expected, seen = result(own_ddp, name), result(trained, name)
    assert seen["world_size"] == 2
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert seen["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-6)
    assert seen["sum"] == pytest.approx(expected["sum"], rel=1e-5)  # of all logits
    if not strategy.startswith("deepspeed"):  # which computes the norm within its step
        assert seen["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for key in ("rates", "predicted", "number", "events", "accuracy", "tokens", "operations", "speeds"):
        assert seen[key] == expected[key], key


@pytest.mark.parametrize("name", ["adafactor", "resumed_adafactor"])
def test_adafactor_steps_whole_matrices(own_ddp, trained, strategy, name):
    if strategy not in HAS_ADAFACTOR:
        pytest.skip("DeepSpeed steps flat pieces of them")
    assert result(trained, name)["losses"] == pytest.approx(result(own_ddp, "adafactor")["losses"], rel=1e-6)


def reported(folder):
    """Return the values of a training in TensorBoard's files, which one process writes, without those of the clock."""
    from tensorboardX.proto.event_pb2 import Event

    of_files = []
    for path in folder.rglob("events.out.tfevents.*"):
        content, start, values = path.read_bytes(), 0, {}
        while start < len(content):  # a record has its length, a checksum of it, an event and its checksum
            size = int.from_bytes(content[start : start + 8], "little")
            event = Event.FromString(content[start + 12 : start + 12 + size])
            start += size + 16
            values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        of_files.append(values)
    (values,) = (values for values in of_files if ("train/loss", 4) in values)
    return {key: value for key, value in values.items() if not re.search("runtime|second|memory|text", key[0])}


def test_reports_have_the_values_of_its_own_ddp_once(own_ddp, trained, strategy):
    seen, expected = reported(trained / "reported"), reported(own_ddp / "reported")
    if strategy.startswith("deepspeed"):  # which computes the norm within its step
        seen, expected = ({key: one[key] for key in one if "grad_norm" not in key[0]} for one in (seen, expected))
    assert seen == pytest.approx(expected, rel=1e-5)


def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(tmp_path, own_ddp):
    scenario = {"plain": {**SAVING, "dies_at": 7}}
    arguments = [sys.executable, PROGRAMS / "train.py", str(tmp_path), "ddp", "2", json.dumps(scenario)]
    environ = {**os.environ, "RESTARTS": "1"}
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False, env=environ)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert (tmp_path / "plain" / "died").exists()
    assert result(tmp_path, "plain")["losses"] == pytest.approx(result(own_ddp, "plain")["losses"], rel=1e-6)


@pytest.mark.parametrize("name", BY_READER)
def test_processes_that_share_batches_are_one_reader(own_ddp, own_process, trained, strategy, name):
    # All processes of these layouts read the same batch.
    expected = result(own_process if strategy.startswith("mesh") else own_ddp, name)
    for key in ("losses", "evaluations"):
        assert result(trained, name)[key] == pytest.approx(expected[key], rel=1e-6), key


def test_the_trained_model_is_streamed_as_it_is_saved(trained):
    assert result(trained, "plain")["is_streamed"]


def test_a_training_in_bfloat16_is_close_to_its_own_ddp(own_ddp, trained):
    seen = result(trained, "bf16")
    assert seen["losses"] == pytest.approx(result(own_ddp, "bf16")["losses"], rel=5e-3)
    assert seen["losses"][0] != result(trained, "plain")["losses"][0]  # of the same weights


@pytest.mark.parametrize("name", ["resumed", "resumed_from_own", "resumed_adapters"])
def test_a_resumed_training_continues_as_before(own_ddp, trained, name):
    if not (trained / name).exists():
        pytest.skip("split layers have no adapters")
    training = "adapters" if name == "resumed_adapters" else "plain"
    seen = result(trained, name)["losses"]
    assert seen == pytest.approx(result(trained, training)["losses"], rel=1e-6)
    assert seen[5:] == pytest.approx(result(own_ddp, training)["losses"][5:], rel=1e-6)


def test_deepspeed_stage_2_resumes_in_the_middle_of_an_epoch(tmp_path, own_ddp):
    pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    resumed = {"resume": str(tmp_path / "plain" / "checkpoint-5")}  # of 6 steps in an epoch
    folder = run(tmp_path, "deepspeed_stage_2", {"plain": SAVING, "resumed": resumed})
    whole, seen = (result(folder, name)["losses"] for name in ("plain", "resumed"))
    assert seen == pytest.approx(whole, rel=1e-6)
    assert seen[5:] == pytest.approx(result(own_ddp, "plain")["losses"][5:], rel=1e-6)


def test_the_saved_model_is_that_of_its_own_ddp(own_ddp, trained):
    expected = AutoModelForCausalLM.from_pretrained(own_ddp / "plain" / "model").state_dict()
    seen = AutoModelForCausalLM.from_pretrained(trained / "plain" / "model").state_dict()
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, atol=1e-5, rtol=0)


def test_its_own_trainer_resumes_a_training_of_ddp(tmp_path, own_ddp):
    trained = run(tmp_path / "ddp", "ddp", {"plain": SAVING})
    scenario = {"resumed": {"resume": str(trained / "plain" / "checkpoint-5")}}
    seen = result(run(tmp_path / "own", "own", scenario), "resumed")
    assert seen["losses"] == pytest.approx(result(own_ddp, "plain")["losses"], rel=1e-6)


@pytest.mark.variant  # of all tests here, whose processes have torchrun's variables, without its imports
def test_processes_of_torchrun_are_taken_over(tmp_path, own_ddp):
    folder = run(tmp_path, "ddp", {"unclipped": SCENARIOS["unclipped"]}, by_torchrun=True)
    assert result(folder, "unclipped")["losses"] == pytest.approx(result(own_ddp, "unclipped")["losses"], rel=1e-6)


def test_processes_of_accelerate_launch_are_taken_over(tmp_path, own_loop):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    command = [*launch, "--mixed_precision=no", "--dynamo_backend=no", PROGRAMS / "accelerated.py", tmp_path, "fsdp"]
    ended = subprocess.run([*command, "2"], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert result(tmp_path)["losses"] == pytest.approx(own_loop["losses"], rel=1e-6)


@pytest.mark.parametrize("alias", ["ddp", "fsdp", "mesh(tp=2)", "mesh(pp=2)"])
def test_several_trainings_after_an_evaluation_are_those_of_one_device(tmp_path, alias):
    # Its own DDP does not average gradients after an evaluation that precedes the first training.
    twice = {"evaluates_first": True, "trainings": 2, "num_train_epochs": 1}
    expected = run(tmp_path / "one", "own", {"twice": {**twice, "per_device_train_batch_size": 8}}, devices=1)
    seen = run(tmp_path / "two", alias, of_strategy(alias, {"twice": twice}))
    assert result(seen, "twice")["losses"] == pytest.approx(result(expected, "twice")["losses"], rel=1e-6)


@pytest.mark.parametrize("alias", ["ddp", "fsdp"])
def test_a_step_without_memory_leaves_nothing_to_the_retry(tmp_path, own_ddp, alias):
    retried = {**ACCUMULATED, "auto_find_batch_size": True}  # from 4 samples to 3
    failing = {name: {**retried, "failing": [name, 2]} for name in ("forward", "backward")}  # of the first step
    folder = run(tmp_path, alias, failing)
    for name in failing:
        seen, expected = result(folder, name), result(own_ddp, "smaller")
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        assert seen["sum"] == pytest.approx(expected["sum"], rel=1e-5), name


def test_memory_that_runs_out_after_a_step_is_an_error_with_shards(tmp_path):
    scenario = {"late": {**ACCUMULATED, "auto_find_batch_size": True, "failing": ["forward", 3]}}
    with pytest.raises(AssertionError, match="resume from a checkpoint, with per_device_train_batch_size below 4"):
        run(tmp_path, "fsdp", scenario)


SECOND_TRAINER = """
import torch
from dstrat.errors import MisuseError
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4])}] * 16
args = TrainingArguments("out", max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no")
model = LlamaForCausalLM(LlamaConfig(**sizes))
for _ in range(2):
    try:
        dstrat_transformers.DstratTrainer(model=model, args=args, train_dataset=rows).train()
    except MisuseError as error:
        print("REFUSED", error)
"""


def test_split_layers_that_another_trainer_has_trained_are_refused_with_advice(tmp_path):
    use = "dstrat_transformers.use('mesh(tp=2)', accelerator='cpu', devices=2)\n"
    ended = start_two(tmp_path, use + SECOND_TRAINER + END_TOGETHER)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("REFUSED LlamaForCausalLM was prepared before, such as by another Trainer") == 2
    assert ended.stdout.count("pass a new one, such as LlamaForCausalLM.from_pretrained(folder)") == 2


LONELY = """
import time
from datetime import timedelta
from pathlib import Path
from dstrat_ddp import DDPStrategy
dstrat_transformers.use(DDPStrategy(timeout=timedelta(seconds=8)), accelerator="cpu", devices=2)
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes))
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index % 8, 1, 2]), "labels": torch.tensor([index % 8, 1, 2])}
def fail(layer, args, output):
    if os.environ["RANK"] == "0":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    time.sleep(6)  # so that the other rank is the first that has waited for too long
model.model.layers[0].register_forward_hook(fail)
folder = str(Path(__file__).parent)
args = TrainingArguments(folder, auto_find_batch_size=True, report_to="none", disable_tqdm=True, save_strategy="no")
dstrat_transformers.DstratTrainer(model=model, args=args, train_dataset=Data()).train()
"""


def test_a_rank_that_alone_runs_out_of_memory_does_not_retry(tmp_path):
    # The other one waits in the gradients of the first step: collectives of a retry would meet these.
    ended = start_two(tmp_path, LONELY)
    assert ended.returncode == 1
    assert "rank 1 of 2, which did not reduce the batch size for the 1. time within 8 s" in ended.stderr


# Accelerate


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory):
    return result(run(tmp_path_factory.mktemp("loop"), "own", {}, program="accelerated.py"))


@pytest.mark.parametrize("alias", ["ddp", "fsdp"])
def test_a_loop_with_accelerate_is_that_of_its_own_ddp(tmp_path, own_loop, alias):
    seen = result(run(tmp_path, alias, {}, program="accelerated.py"))
    for key in ("losses", "norms", "resumed", "rate", "one by one"):
        assert seen[key] == pytest.approx(own_loop[key], rel=1e-6 if "loss" in key or key == "resumed" else 1e-5), key
    assert seen["sums"] == pytest.approx(own_loop["sums"], abs=1e-5)
    for key in ("accuracy", "names", "unwrapped"):
        assert seen[key] == own_loop[key], key


@pytest.fixture(scope="module")
def own_translation(tmp_path_factory):
    return result(run(tmp_path_factory.mktemp("translation"), "own", {}, program="translate.py"))


@pytest.mark.parametrize("alias", ["fsdp", pytest.param("ddp", marks=pytest.mark.variant)])
def test_sequences_that_are_generated_are_those_of_its_own_ddp(tmp_path, own_translation, alias):
    seen = result(run(tmp_path, alias, {}, program="translate.py"))
    for key in ("losses", "evaluations"):
        assert seen[key] == pytest.approx(own_translation[key], rel=1e-6), key
    for key in ("accuracies", "generated"):
        assert seen[key] == own_translation[key], key


# Layouts that divide batches

LAYOUTS = [
    pytest.param("mesh(pp=2, dp_shard=2)", marks=pytest.mark.variant),
    "mesh(pp=2, tp=2)",
    pytest.param("mesh(pp=2, cp=2)", marks=pytest.mark.variant),
    "mesh(cp=2, dp_shard=2)",
    "mesh(pp=2, schedule='Interleaved1F1B')",
]


@pytest.mark.slow
@pytest.mark.parametrize("alias", LAYOUTS)
def test_layouts_that_divide_batches_go_together_with_others(tmp_path, alias, own_ddp):
    names = ["plain", "accumulated", "smoothed", "other loss"]
    scenarios = of_strategy(alias, {name: SCENARIOS[name] for name in names})
    if "Interleaved" in alias:
        four = {"config": {"num_hidden_layers": 4}}
        scenarios = {"plain": {**scenarios["plain"], **four}}
        names, own_ddp = ["plain"], run(tmp_path / "own", "own", {"plain": {**SAVING, **four}})
    folder = tmp_path / "run"
    resumed = {"resumed": {**scenarios["plain"], "resume": str(folder / "plain" / "checkpoint-5")}}
    run(folder, alias, {**scenarios, **resumed}, devices=2 if "Interleaved" in alias else 4)
    for name in names:
        seen, expected = result(folder, name), result(own_ddp, name)
        for key, tolerance in {"losses": 1e-6, "evaluations": 1e-6, "norms": 1e-5, "sum": 1e-5}.items():
            assert seen[key] == pytest.approx(expected[key], rel=tolerance), (name, key)
        for key in ("rates", "predicted", "number", "events", "accuracy"):
            assert seen[key] == expected[key], (name, key)
    assert result(folder, "resumed")["losses"] == pytest.approx(result(folder, "plain")["losses"], rel=1e-6)


def test_a_batch_of_one_sample_is_that_of_one_device_with_stages(tmp_path):
    one = {"one": {"per_device_train_batch_size": 1, "max_steps": 4}}
    expected = result(run(tmp_path / "one", "own", one, devices=1), "one")
    seen = result(run(tmp_path / "stages", "mesh(pp=2)", one), "one")
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert seen["sum"] == pytest.approx(expected["sum"], rel=1e-5)


OF_A_SUBCLASS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4])}] * 16
def mean(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
class Mine(dstrat_transformers.DstratTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss
args = TrainingArguments("out", report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2, **options)
model = LlamaForCausalLM(LlamaConfig(**sizes))
trainer_class = Mine if is_subclass else dstrat_transformers.DstratTrainer
trainer_class(model=model, args=args, train_dataset=rows, compute_loss_func=mean if has_mean else None).train()
"""


WITHOUT_LABELS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = [{"input_ids": torch.tensor([1, 2, 3, 4])}] * 16
args = TrainingArguments("out", report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
dstrat_transformers.DstratTrainer(model=model, args=args, train_dataset=rows).train()
"""


def test_a_batch_without_labels_is_an_error_with_stages(tmp_path):
    use = "dstrat_transformers.use('mesh(pp=2)', accelerator='cpu', devices=2)\n"
    ended = start_two(tmp_path, use + WITHOUT_LABELS)
    assert ended.returncode == 1
    assert "LlamaForCausalLM got a batch with input_ids and without labels: give it labels" in ended.stderr


# The first rank has the store that the other one may still be reading.
END_TOGETHER = """
import time
open("ended-" + os.environ["RANK"], "w").close()
while not (os.path.exists("ended-0") and os.path.exists("ended-1")):
    time.sleep(0.01)
"""
FAILED_STEP = """
import torch
from dstrat.errors import MisuseError
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4])}] * 16
args = TrainingArguments("out", report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2)
def made():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**sizes))
model = made()
calls = []
def fail(layer, args, output):  # the first rank has sent a microbatch, and the last one has not received it
    calls.append(1)
    if len(calls) == 2:
        raise ValueError("bad sample")
class Mine(dstrat_transformers.DstratTrainer):
    def _prepare_inputs(self, inputs):
        if is_last and not calls:
            calls.append(1)
            raise ValueError("bad sample")
        return super()._prepare_inputs(inputs)
is_last = os.environ["RANK"] == "1"
if not is_last:
    model.model.layers[0].register_forward_hook(fail)
for trained in (model, model, made()):
    try:
        Mine(model=trained, args=args, train_dataset=rows).train()
    except (ValueError, MisuseError) as error:
        print("FAILED", error)
"""


def test_no_model_is_trained_where_ranks_have_left_a_step_of_stages_at_different_points(tmp_path):
    use = "dstrat_transformers.use('mesh(pp=2)', accelerator='cpu', devices=2)\n"
    ended = start_two(tmp_path, use + FAILED_STEP + END_TOGETHER)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("FAILED bad sample") == 2
    assert ended.stdout.count("different points") == 4  # also another model, in both ranks
    assert ended.stdout.count("start the job again, from a checkpoint") == 4


CAUGHT = """
import torch
import torch.distributed as dist
from dstrat.errors import MisuseError
rank = int(os.environ["RANK"])
def refuse(gradient):
    raise ValueError("bad gradient")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(3))  # a bucket of ddp each
        self.fails_in = ""
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if self.fails_in == "forward" and index == 1:
                raise ValueError("bad sample")
            x = torch.tanh(layer(x))
            if self.fails_in == "backward" and index == 0:
                x.register_hook(refuse)
        return x
def train(fails_in=""):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accelerator = dstrat_transformers.DstratAccelerator()
    model, optimizer = accelerator.prepare(net, optimizer)
    for step in range(3):
        net.fails_in = fails_in if step == 1 else ""
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = model(torch.randn(4, 600, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(accelerator.gather(loss.detach()).mean())
expected = train()
for fails_in in points:
    try:
        train(fails_in[rank])
    except ValueError as error:
        print("CAUGHT", error)
    try:
        print("TRAINED", train() == expected)
    except MisuseError as error:
        print("REFUSED", error)
        break
sys.stdout.flush()
"""
# torch waits for collectives of a step that has failed.
END_AT_ONCE = "os._exit(0)\n"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_model_is_trained_where_ranks_have_left_a_step_at_the_same_point(tmp_path, strategy):
    points = [("forward", "forward"), ("backward", "backward")]
    use = f"dstrat_transformers.use({strategy!r}, accelerator='cpu', devices=2)\npoints = {points}\n"
    ended = start_two(tmp_path, use + CAUGHT + END_TOGETHER + END_AT_ONCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("CAUGHT bad") == 4
    assert ended.stdout.count("TRAINED True") == 4


def test_no_model_is_trained_where_ranks_have_left_a_step_at_different_points(tmp_path):
    use = "dstrat_transformers.use('ddp', accelerator='cpu', devices=2)\npoints = [('forward', 'backward')]\n"
    ended = start_two(
        tmp_path, use + CAUGHT + END_TOGETHER + END_AT_ONCE
    )  # the second rank has begun to reduce gradients
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("CAUGHT bad") == 2
    assert ended.stdout.count("REFUSED a step has failed in rank 0 of 2 (ValueError: bad sample)") == 2


@pytest.mark.parametrize(
    ("is_subclass", "has_mean", "options", "message"),
    [
        (True, False, {}, "Mine has its own compute_loss, and MeshStrategy computes losses of microbatches"),
        (False, True, {}, "stages need a sum over labels divided by num_items_in_batch"),
        (False, False, {"auto_find_batch_size": True}, "auto_find_batch_size=True starts again where a step ran out"),
    ],
)
def test_a_training_that_stages_cannot_run_is_an_error(tmp_path, is_subclass, has_mean, options, message):
    use = "dstrat_transformers.use('mesh(pp=2)', accelerator='cpu', devices=2)\n"
    use += f"is_subclass, has_mean, options = {(is_subclass, has_mean, options)!r}\n"
    ended = start_two(tmp_path, use + OF_A_SUBCLASS)
    assert ended.returncode == 1
    assert message in ended.stderr


# Launch and misuse


USE = "import os, sys\nimport dstrat_transformers\n"


def start(folder, program):
    """Run a program with these lines after the import, and return how it ended; ranks that it starts are not warm."""
    path = folder / "program.py"
    path.write_text(USE + program)
    return run_in_ranks(path, devices=1)


def start_two(folder, program):
    """Run a program with these lines in two ranks that have imported transformers before."""
    path = folder / "program.py"
    path.write_text(USE + program)
    return run_in_ranks(path, devices=2)


def test_a_transformers_that_counts_labels_otherwise_is_an_error(tmp_path):
    program = """
import torch
import transformers
transformers.__version__ = "5.18.0"
from dstrat.errors import MissingRequirementError
for make in (
    lambda: dstrat_transformers.with_strategy(transformers.Trainer),
    lambda: dstrat_transformers.DstratTrainer(model=torch.nn.Linear(2, 2), args=transformers.TrainingArguments("out")),
):
    try:
        make()
    except MissingRequirementError as error:
        print("REFUSED", error)
"""
    ended = start(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    message = "need transformers 5.19.0 or newer, and 5.18.0 is installed"
    assert ended.stdout.count(message) == 2, ended.stdout
    assert 'pip install "transformers>=5.19.0"' in ended.stdout


def test_a_failing_process_ends_the_program_and_is_named(tmp_path):
    program = """
dstrat_transformers.use("ddp", accelerator="cpu", devices=2)
import torch.distributed as dist
if os.environ["RANK"] == "1":
    raise ValueError("broken data")
dist.barrier()
"""
    path = tmp_path / "program.py"
    path.write_text(USE + program)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path)]  # as users start it
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "rank 1 of 2 failed: ValueError: broken data" in ended.stderr


def test_several_models_have_copies_of_one_strategy(tmp_path):
    program = """
from dstrat_fsdp import FSDPStrategy
dstrat_transformers.use(FSDPStrategy(), accelerator="cpu", devices=2)
import torch
def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
accelerators = [dstrat_transformers.DstratAccelerator() for _ in range(2)]
prepared = [accelerator.prepare(*made(seed)) for seed, accelerator in enumerate(accelerators)]
for seed, (accelerator, (model, optimizer)) in enumerate(zip(accelerators, prepared)):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        plain, plain_optimizer = made(seed)
        plain(torch.ones(2, 4)).sum().backward()
        plain_optimizer.step()
        print("differs by", max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items()))
"""
    ended = start_two(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    differences = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("differs by")]
    assert differences == [pytest.approx(0, abs=1e-6)] * 2


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = dstrat_transformers.DstratAccelerator()
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters())
"""


def test_a_strategy_that_trains_with_other_jobs_is_an_error():
    from dstrat.builtin.single_device import SingleDeviceStrategy
    from dstrat.errors import ConflictError
    from dstrat_transformers import use

    class WithOthers(SingleDeviceStrategy):
        steps_with_other_jobs = True

    with pytest.raises(ConflictError, match="all jobs would train on the same samples"):
        use(WithOthers(), accelerator="cpu", devices=1)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("mesh(pp=2)", "which the loops of programs with Accelerate take apart"),
        ("ddp_spawn", "needs processes that run the program"),
        ("diloco(inner='ddp')", "processes of DiLoCoStrategy train different weights, and a loop with Accelerate does"),
    ],
)
def test_a_strategy_that_cannot_run_these_loops_is_an_error(tmp_path, strategy, message):
    if strategy.startswith("diloco"):
        pytest.importorskip("dstrat_diloco", reason="this environment has no dstrat-diloco")
    use = f"dstrat_transformers.use({strategy!r}, accelerator='cpu', devices=2)\n"
    run_program = start if strategy == "ddp_spawn" else start_two  # the others are refused in the ranks
    ended = run_program(tmp_path, use + LLAMA + "accelerator.prepare(model, optimizer)")
    assert ended.returncode == 1
    assert message in ended.stderr


def test_misuse_is_an_error_with_advice(tmp_path):
    program = """
from dstrat.errors import DstratError
def attempt(call):
    try:
        call()
    except DstratError as error:
        print(error)
attempt(lambda: dstrat_transformers.DstratAccelerator(cpu=True))
dstrat_transformers.use("auto", accelerator="cpu", devices=1)
"""
    program += LLAMA
    program += """
attempt(lambda: dstrat_transformers.use("ddp"))
attempt(lambda: accelerator.backward(torch.ones(())))
attempt(lambda: accelerator.prepare(optimizer))
attempt(lambda: accelerator.prepare(model, torch.nn.Linear(2, 2)))
attempt(lambda: accelerator.prepare(model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters())))
accelerator.prepare(model, optimizer)
attempt(lambda: accelerator.clip_grad_norm_([next(model.parameters())], 1.0))
attempt(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
"""
    ended = start(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    expected = [
        "no strategy has been selected",
        "use was called twice",
        "no model is prepared",
        "without its model",
        "prepare got 2 models, and an Accelerator trains one model at a time",
        "has a parameter that LlamaForCausalLM does not have",
        "a strategy clips all of them",
        "strategies clip by the 2-norm",
    ]
    lines = ended.stdout.splitlines()
    assert len(lines) == len(expected), ended.stdout
    for line, message in zip(lines, expected, strict=True):
        assert message in line


def test_options_of_its_own_ddp_are_an_error_unless_off(tmp_path):
    program = """
dstrat_transformers.use("ddp", accelerator="cpu", devices=1)
from transformers import TrainingArguments
from dstrat.errors import ConflictError
import torch
def make(**options):
    args = TrainingArguments("out", report_to="none", **options)
    dstrat_transformers.DstratTrainer(model=torch.nn.Linear(2, 2), args=args)
make(ddp_find_unused_parameters=False, ddp_static_graph=False, ddp_broadcast_buffers=False)
for name, value in [
    ("ddp_find_unused_parameters", True),
    ("ddp_static_graph", True),
    ("ddp_bucket_cap_mb", 1),
    ("ddp_broadcast_buffers", True),
]:
    try:
        make(**{name: value})
    except ConflictError as error:
        print(error)
"""
    ended = start(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = " is an option of the Trainer's own DDP"  # DeepSpeed prints lines, too
    options = [line.partition(said)[0] for line in ended.stdout.splitlines() if said in line]
    assert options == [
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
    ]


def test_options_that_processes_of_one_batch_cannot_have_are_an_error(tmp_path):
    program = """
dstrat_transformers.use("mesh(cp=2)", accelerator="cpu", devices=2)
from transformers import TrainingArguments
from dstrat.errors import ConflictError
import torch
for options in (
    {"neftune_noise_alpha": 5.0},
    {"eval_use_gather_object": True},
):
    args = TrainingArguments("out", report_to="none", use_cpu=True, **options)
    try:
        dstrat_transformers.DstratTrainer(model=torch.nn.Linear(2, 2), args=args)
    except ConflictError as error:
        print("REFUSED", error)
args = TrainingArguments("out", report_to="none", use_cpu=True, bf16_full_eval=True)
trainer = dstrat_transformers.DstratTrainer(model=torch.nn.Linear(2, 2), args=args)
args.use_liger_kernel = True  # as in a training with the library
for method in (trainer._inner_training_loop, trainer.evaluation_loop):
    try:
        method()
    except ConflictError as error:
        print("REFUSED", error)
"""
    ended = start_two(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for message in (
        "noise by the length of a sequence",
        "objects of all processes",
        "a loss without logits",
        "converts the whole model for this evaluation",
    ):
        assert ended.stdout.count(message) == 2, ended.stdout
    assert "bf16_full_eval=True has no effect on evaluations in a training" in ended.stderr


def test_the_trainer_has_the_one_device_of_the_strategy(tmp_path):
    program = """
dstrat_transformers.use("ddp", accelerator="cpu", devices=1)
from transformers import TrainingArguments
import torch
args = TrainingArguments("out", report_to="none", per_device_train_batch_size=4, ddp_timeout=60)
assert args.n_gpu == 0
args._n_gpu = 2  # as it finds them on a machine with two GPUs
args = dstrat_transformers.DstratTrainer(model=torch.nn.Linear(2, 2), args=args).args
print("GPUs", args.n_gpu, args.train_batch_size)
"""
    ended = start(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "GPUs 1 4" in ended.stdout
    assert "ddp_timeout=60 has no effect" in ended.stderr
    assert "construct the strategy with timeout=" in ended.stderr


OWN_FILES = """
import time
import torch
from pathlib import Path
from transformers import Trainer, TrainingArguments
folder = Path(__file__).parent
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}
    def save(self, path):
        torch.save(self.state_dict(), Path(path, "own.pt"))
class EncoderTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        time.sleep(3 * torch.distributed.get_rank())  # what another rank writes would come last
        Path(output_dir).mkdir(exist_ok=True, parents=True)
        self.model.save(output_dir)
class SlowTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        time.sleep(3 * torch.distributed.get_rank())
        super()._save(output_dir, state_dict)
torch.manual_seed(1)
data = [{"x": torch.randn(4), "labels": torch.randn(2)} for _ in range(16)]
for trainer_class, file in ((EncoderTrainer, "own.pt"), (SlowTrainer, "model.safetensors")):
    args = TrainingArguments(str(folder / file), max_steps=2, save_steps=2, report_to="none", disable_tqdm=True)
    trainer = dstrat_transformers.with_strategy(trainer_class)(model=Encoder(), args=args, train_dataset=data)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    torch.distributed.barrier()
    time.sleep(4)
    if trainer.is_world_process_zero():
        from safetensors.torch import load_file
        path = folder / file / "checkpoint-2" / file
        saved = torch.load(path, weights_only=True) if file == "own.pt" else load_file(path)
        assert sorted(saved) == sorted(state), sorted(saved)
        print("EQUAL", all(torch.equal(saved[name], value) for name, value in state.items()))
"""


def test_a_trainer_that_writes_its_own_files_gets_whole_weights_once(tmp_path):
    ended = start_two(tmp_path, "dstrat_transformers.use('fsdp', accelerator='cpu', devices=2)\n" + OWN_FILES)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("EQUAL True") == 2


OWN_LOADS = """
import torch
from pathlib import Path
from transformers import Trainer, TrainingArguments
folder = Path(__file__).parent
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}
class EncoderTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(exist_ok=True, parents=True)
        torch.save(self.model.state_dict(), Path(output_dir, "own.pt"))
    def _load_from_checkpoint(self, checkpoint_path):
        self.model.load_state_dict(torch.load(Path(checkpoint_path, "own.pt"), weights_only=True))
    def _load_best_model(self):
        self._load_from_checkpoint(self.state.best_model_checkpoint)
def train(resume=None, **options):
    torch.manual_seed(1 if resume is None else 2)
    data = [{"x": torch.randn(4), "labels": torch.randn(2)} for _ in range(16)]
    options |= {"max_steps": 2, "save_steps": 1, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(str(folder / "out"), **options)
    trainer = dstrat_transformers.with_strategy(EncoderTrainer)(
        model=Encoder(), args=args, train_dataset=data, eval_dataset=data
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.accelerator.get_state_dict(trainer.model)
def is_in(state, step):
    saved = torch.load(folder / "out" / f"checkpoint-{step}" / "own.pt", weights_only=True)
    return all(torch.equal(value, saved[name]) for name, value in state.items())
# The worst model is that of the first step.
state = train(eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, greater_is_better=True)
print("BEST", is_in(state, 1), not state or not is_in(state, 2))
torch.distributed.barrier()
print("RESUMED", is_in(train(str(folder / "out" / "checkpoint-2")), 2))
"""


@pytest.mark.parametrize("alias", ["ddp", "fsdp"])
def test_a_trainer_that_loads_its_own_files_resumes_and_loads_the_best_model(tmp_path, alias):
    ended = start_two(tmp_path, f"dstrat_transformers.use({alias!r}, accelerator='cpu', devices=2)\n" + OWN_LOADS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("BEST True True") == 2
    assert ended.stdout.count("RESUMED True") == 2


RUNS_WHILE_IT_SAVES = """
import torch
from dstrat.errors import MisuseError
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
class WithExample(LlamaForCausalLM):
    def save_pretrained(self, *args, **kwargs):
        super().save_pretrained(*args, **kwargs)
        for run in (self, self.generate):
            try:
                run(input_ids=torch.tensor([[1, 2]]))
            except MisuseError as error:
                print("REFUSED", error)
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
model = WithExample(LlamaConfig(**sizes))
rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4])}] * 16
args = TrainingArguments("out", max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no")
trainer = dstrat_transformers.DstratTrainer(model=model, args=args, train_dataset=rows)
trainer.train()
model.save_pretrained("saved")
print("SAVED")
"""


def test_a_model_that_runs_while_its_first_process_saves_it_is_refused(tmp_path):
    program = "dstrat_transformers.use('fsdp', accelerator='cpu', devices=2)\n" + RUNS_WHILE_IT_SAVES
    ended = start_two(tmp_path, program)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "REFUSED forward of WithExample was called by the first process alone" in ended.stdout
    assert "REFUSED generate" in ended.stdout
    assert ended.stdout.count("SAVED") == 2


OWN_SAVES = """
import shutil
from pathlib import Path
import torch
from peft import LoraConfig
from dstrat.errors import ConflictError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4])}] * 16
folder, is_first = Path(__file__).parent, os.environ["RANK"] == "0"
class WithFiles(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            Path(output_dir, "head").touch()
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            Path(output_dir, "mine").touch()
def made(seed=1, trainer_class=dstrat_transformers.DstratTrainer, adapters=False, **options):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if adapters:
        model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    options = {"report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2, **options}
    args = TrainingArguments(str(folder / "out"), max_steps=2, **options)
    return trainer_class(model=model, args=args, train_dataset=rows, eval_dataset=rows)
def is_in(trainer, path):
    state, saved = trainer.accelerator.get_state_dict(trainer.model), load_file(path / "model.safetensors")
    return not state or all(torch.equal(value, state[name]) for name, value in saved.items())
def wait():
    torch.distributed.barrier()

trainer = made(trainer_class=dstrat_transformers.with_strategy(WithFiles))
trainer.train()
wait()
path = folder / "out" / "checkpoint-2"
print("OWN", (path / "head").exists(), (path / "mine").exists(), is_in(trainer, path))
class WithOptimizer(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
try:
    made(trainer_class=dstrat_transformers.with_strategy(WithOptimizer))
except ConflictError as error:
    print("REFUSED", "has its own _save_optimizer_and_scheduler" in str(error))
teacher = torch.nn.Linear(2, 2)
trainer._move_model_to_device(teacher, torch.device("meta"))
print("MOVED", teacher.weight.device)

# Weights of another training, as the Trainer itself writes them over a checkpoint.
torch.manual_seed(9)
other = LlamaForCausalLM(LlamaConfig(**sizes))
wait()
if is_first:
    other.save_pretrained(path)
wait()
trainer = made(seed=3)
trainer.train(resume_from_checkpoint=str(path))  # which has ended there
print("NEWER", is_in(trainer, path))
if is_first:
    shutil.copytree(path, folder / "best", ignore=lambda *_: ["dstrat", "dstrat.json"])
wait()
trainer = made(seed=4, save_strategy="no")
trainer.train()
trainer.state.best_model_checkpoint = str(folder / "best")
trainer._load_best_model()
print("BEST", is_in(trainer, folder / "best"))

trainer = made(seed=5)
trainer.evaluate()
trainer.accelerator.prepare_model(LlamaForCausalLM(LlamaConfig(**sizes)), evaluation_mode=True)
trainer.save_model(str(folder / "evaluated"))
wait()
print("EVALUATED", is_in(trainer, folder / "evaluated"))

import transformers.integrations.peft as integration
integration.check_peft_version = lambda *args, **kwargs: None
trainer = made(seed=6, adapters=True)
trainer.save_model(str(folder / "before"))
trainer.evaluate()
trainer.save_model(str(folder / "adapters"))
wait()
before, after = (load_file(folder / name / "adapter_model.safetensors") for name in ("before", "adapters"))
print("ADAPTERS", before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before))
"""


def test_a_sharded_model_is_saved_and_loaded_as_the_trainer_and_its_subclasses_do(tmp_path):
    pytest.importorskip("peft", reason="this environment has no peft")
    ended = start_two(tmp_path, "dstrat_transformers.use('fsdp', accelerator='cpu', devices=2)\n" + OWN_SAVES)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = [
        "OWN True True True",
        "REFUSED True",
        "MOVED meta",
        *(f"{name} True" for name in ("NEWER", "BEST", "EVALUATED")),
    ]
    for line in (*expected, "ADAPTERS True"):
        assert ended.stdout.count(line) == 2, (line, ended.stdout)
    assert "is of other weights than the checkpoint it is in" in ended.stderr
    assert "find_unused_parameters" not in ended.stderr  # which the Trainer itself asks its DDP for


GROUPS = """
import torch
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}
torch.manual_seed(1)
data = [{"x": torch.randn(4), "labels": torch.randn(2)} for _ in range(32)]
options = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 4}
args = TrainingArguments("unused", max_steps=3, learning_rate=0.1, **options)
trainer = dstrat_transformers.DstratTrainer(model=Net(), args=args, train_dataset=data, eval_dataset=data)
trainer.train()
trainer.evaluate()
weights = [None, None]
torch.distributed.all_gather_object(weights, trainer.model.layer.weight.tolist())
print("EQUAL", weights[0] == weights[1])
"""


APART_AND_RESUMED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(256).reshape(64, 4).remainder(7)]
def trained(folder, resume=None):
    torch.manual_seed(1)
    options = {"report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4, "logging_steps": 1}
    options |= {"save_strategy": "steps", "save_steps": 6, "max_steps": 8, "learning_rate": 0.1, "output_dir": folder}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    args = TrainingArguments(**options)
    trainer = dstrat_transformers.DstratTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-2:]
    return losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}
whole, resumed = trained("whole"), trained("again", "whole/checkpoint-6")
same = all(torch.equal(value, resumed[1][name]) for name, value in whole[1].items())
print("LOSSES", json.dumps([whole[0], resumed[0], same]))
saved = LlamaForCausalLM.from_pretrained("whole/checkpoint-8").state_dict()
print("MEAN", all(torch.equal(value, saved[name]) for name, value in whole[1].items()))
"""


def test_groups_that_train_apart_resume_in_the_middle_of_a_round(tmp_path):
    pytest.importorskip("dstrat_diloco", reason="this environment has no dstrat-diloco")
    use = "dstrat_transformers.use('diloco(groups=2, every=4, inner=\"ddp\")', accelerator='cpu', devices=2)\n"
    ended = start_two(tmp_path, use + APART_AND_RESUMED)
    assert ended.returncode == 0, ended.stderr[-3000:]
    losses = [line.removeprefix("LOSSES ") for line in ended.stdout.splitlines() if line.startswith("LOSSES ")]
    for whole, resumed, same in map(json.loads, losses):
        assert resumed == whole
        assert same
    assert ended.stdout.count("MEAN True") == 2


def test_groups_that_train_apart_have_the_same_weights_at_the_end(tmp_path):
    pytest.importorskip("dstrat_diloco", reason="this environment has no dstrat-diloco")
    use = "dstrat_transformers.use('diloco(groups=2, every=100, inner=\"ddp\")', accelerator='cpu', devices=2)\n"
    ended = start_two(tmp_path, use + GROUPS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("EQUAL True") == 2


def test_float16_is_an_error_with_a_reason(tmp_path):
    use = "dstrat_transformers.use('auto', accelerator='cpu', devices=1)\n"
    ended = start(tmp_path, use + "dstrat_transformers.DstratAccelerator(mixed_precision='fp16')")
    assert ended.returncode == 1
    assert "choose 'bf16' or 'no'" in ended.stderr
