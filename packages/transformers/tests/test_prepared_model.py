"""A model of another library's loop in a strategy: modes, clipping, generation, references beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

from tests.warm_ranks import run_in_ranks

sys.path.insert(0, str(Path(__file__).parent))

from test_trainer import LLAMA, USE

pytestmark = [
    pytest.mark.xdist_group("hf_prepared_model"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def seen_by_ranks(folder, strategy, program, devices=2, before="", begin=LLAMA):
    """Return ``seen`` of each rank of a program."""
    strategy = strategy if "Strategy(" in strategy else repr(strategy)
    use = f"dstrat_transformers.use({strategy}, accelerator='cpu', devices={devices})\n"
    gather = f"""
import json
of_ranks = [None] * {devices}
torch.distributed.all_gather_object(of_ranks, seen) if {devices} > 1 else of_ranks.__setitem__(0, seen)
if accelerator.is_main_process:
    print("SEEN", json.dumps(of_ranks))
"""
    script = folder / "program.py"
    script.write_text(USE + before + use + begin + program + gather)
    ended = run_in_ranks(script, devices=devices)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("SEEN "))
    return json.loads(line.removeprefix("SEEN "))


def test_preparation_leaves_modes_of_layers(tmp_path):
    program = """
model.train()
model.model.layers[0].eval()
before = {name: layer.training for name, layer in model.named_modules()}
accelerator.prepare(model, optimizer)
after = {name: layer.training for name, layer in model.named_modules()}
seen = {"before": before, "after": after}
"""
    (seen,) = seen_by_ranks(tmp_path, "ddp", program, devices=1)
    assert seen["after"] == seen["before"]
    assert not seen["after"]["model.layers.0.mlp"]


CLIPPED = """
def made():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    return layers, [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
def loss(layers):
    return layers(torch.arange(12.0).reshape(3, 4)).square().sum()
plain, optimizers = made()
loss(plain).backward()
norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
for one in optimizers:
    one.step()
model, optimizers = made()
model, *optimizers = accelerator.prepare(model, *optimizers)
accelerator.backward(loss(model))
seen = {"norms": [float(norm), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]}
for one in optimizers:
    one.step()
state = accelerator.get_state_dict(model)
expected = plain.state_dict()
seen["difference"] = max([float((value - expected[name]).abs().max()) for name, value in state.items()], default=0)
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_several_optimizers_are_clipped_by_one_norm(tmp_path, strategy):
    for seen in seen_by_ranks(tmp_path, strategy, CLIPPED):
        assert seen["norms"][1] == pytest.approx(seen["norms"][0], rel=1e-6)
        assert seen["difference"] < 1e-6


GENERATED = """
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration
seen = {}
rank = accelerator.process_index
def made(name):
    torch.manual_seed(4)
    if name == "t5":
        sizes_of_t5 = {"vocab_size": 16, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4}
        config = T5Config(**sizes_of_t5, decoder_start_token_id=0)
        return T5ForConditionalGeneration(config)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.generation_config.pad_token_id = 0
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if name == "peft" else model
for name in ("llama", "t5", "peft"):
    prompt = torch.tensor([[3, 4 + rank, 5]])
    model = made(name).eval()
    options = {"max_new_tokens": 3 + 4 * rank, "min_new_tokens": 2, "do_sample": False}  # of ranks that differ
    expected = model.generate(input_ids=prompt, **options).tolist()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    seen[name] = [expected, accelerator.unwrap_model(model).generate(input_ids=prompt, **options).tolist()]
"""


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_stage_3", marks=pytest.mark.variant)])
def test_sharded_weights_generate_the_text_of_one_device(tmp_path, strategy):
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    pytest.importorskip("peft", reason="this environment has no peft")
    for seen in seen_by_ranks(tmp_path, strategy, GENERATED):
        for name, (expected, generated) in seen.items():
            assert generated == expected, name


REFERENCE = """
import types
torch.manual_seed(1)  # as the weights of rank 0 count
reference = LlamaForCausalLM(model.config)
reference.forward = types.MethodType(lambda self, x: LlamaForCausalLM.forward(self, x).logits, reference)
tokens = torch.tensor([[1, 2, 3]])
expected = reference(tokens).detach()
accelerator.prepare_model(reference, evaluation_mode=True)  # before the trained one, as trl does
accelerator.prepare(model, optimizer)
accelerator.backward(model(tokens, labels=tokens).loss)
optimizer = accelerator._optimizers[0]
optimizer.step()
torch.manual_seed(2)
later = LlamaForCausalLM(model.config)
later_expected = later(tokens).logits.detach()
accelerator.prepare_model(later, evaluation_mode=True)
with torch.no_grad():
    difference = float((reference(tokens) - expected).abs().max())
    later_difference = float((later(tokens).logits - later_expected).abs().max())
accelerator.backward(model(tokens, labels=tokens).loss)
optimizer.step()
seen = [difference, later_difference]
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_models_are_evaluated_beside_the_trained_one(tmp_path, strategy):
    for differences in seen_by_ranks(tmp_path, strategy, REFERENCE):
        assert differences == pytest.approx([0, 0], abs=1e-6)


SAVED = """
from pathlib import Path
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
folder, seen = Path(__file__).parent, {}
class Own(torch.nn.Module):  # with a tied weight, and a layer that has the name of a method
    def __init__(self):
        super().__init__()
        self.first, self.second, self.save = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.second.weight = self.first.weight
    def forward(self, x):
        return self.save(self.second(self.first(x)))
    def save_pretrained(self, path, note=None):
        Path(path).mkdir()
        assert self.second.weight is self.first.weight
        torch.save(self.state_dict(), Path(path, note))
def made(name):
    torch.manual_seed(4)
    if name == "own":
        return Own()
    model, lora = LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, lora) if name == "peft" else model
def read(name):
    if name == "own":
        return torch.load(folder / name / "weights", weights_only=True)
    if name == "peft":
        return PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**sizes)), folder / name).state_dict()
    return LlamaForCausalLM.from_pretrained(folder / name).state_dict()
for name in NAMES:
    model = made(name)
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    expected = {key: value.clone() for key, value in model.state_dict().items() if key in trained}
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    def step():
        if name == "own":
            loss = model(torch.ones(2, 4)).sum()
        else:
            loss = model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())
    if name == "own":
        model.save_pretrained(str(folder / name), note="weights")
    else:
        accelerator.unwrap_model(model).save_pretrained(str(folder / name))
    saved = read(name)
    seen[name] = [all(torch.equal(saved[key], value) for key, value in expected.items()), step(), step()]
"""


@pytest.mark.parametrize("strategy", ["deepspeed_stage_3", "mesh(tp=2)", "fsdp"])
def test_a_model_saves_whole_weights_by_its_own_method(tmp_path, strategy):
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    pytest.importorskip("peft", reason="this environment has no peft")
    names = ["llama"] if "tp" in strategy else ["own", "llama", "peft"]  # the others have no plan
    for seen in seen_by_ranks(tmp_path, strategy, f"NAMES = {names}" + SAVED):
        for name, (is_whole, first_loss, second_loss) in seen.items():
            assert is_whole, name
            # It trains on; adapters of the attention change the loss of so small a model little.
            assert second_loss < first_loss or name == "peft", name


SAVED_IN_VAIN = """
class Saving(torch.nn.Sequential):
    def save(self, path):
        raise OSError("no space")
model = Saving(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
seen = []
for _ in range(2):
    try:
        model.save("path")
        seen.append("")
    except OSError as error:
        seen.append(str(error))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
"""


def test_an_error_of_a_save_that_the_program_catches_lets_all_go_on(tmp_path):
    assert seen_by_ranks(tmp_path, "fsdp", SAVED_IN_VAIN) == [["no space"] * 2, [""] * 2]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_stage_3", marks=pytest.mark.variant)])
def test_a_file_with_shards_of_one_process_is_an_error(tmp_path, strategy):
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    program = """
from pathlib import Path
from dstrat.errors import MisuseError
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
model(torch.ones(2, 4))
path = Path(__file__).parent / "weights"
accelerator.save({"model": accelerator.get_state_dict(model), "step": [1]}, path)
accelerator.wait_for_everyone()
names = sorted(torch.load(path, weights_only=True)["model"])
try:
    accelerator.save({"model": model.state_dict(), "step": [1]}, path)
except MisuseError as error:
    seen = [names, str(error)]
"""
    for names, message in seen_by_ranks(tmp_path, strategy, program):
        assert names == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert "save what accelerator.get_state_dict(model) returns" in message


HELD = """
from dstrat.errors import MisuseError
class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.held = [self.layer.weight]
    def forward(self, x):
        return x @ self.held[0]
model = Holder()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
try:
    optimizer.step()
except MisuseError as error:
    seen = str(error)
"""


def test_a_model_that_holds_its_first_parameters_is_an_error(tmp_path):
    for seen in seen_by_ranks(tmp_path, "fsdp", HELD):
        assert "no parameter of Holder got a gradient" in seen


def test_saved_state_has_a_reference_and_the_trained_model_each(tmp_path):
    program = """
def made(value):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    torch.nn.init.constant_(layer[0].weight, value)
    return layer
reference = accelerator.prepare_model(made(3.0), evaluation_mode=True)
model = made(1.0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
def first_weights():
    states = [accelerator.get_state_dict(one) for one in (reference, model)]
    return [float(state["0.weight"].mean()) if accelerator.is_main_process else None for state in states]
before = first_weights()
folder = os.path.join(os.path.dirname(__file__), "state")
accelerator.save_state(folder)
accelerator.load_state(folder)
seen = [before, first_weights()]
"""
    (seen, _) = seen_by_ranks(tmp_path, "fsdp", program)
    assert seen == [[3.0, 1.0], [3.0, 1.0]]


ONE_BY_ONE = """
torch.manual_seed(1)  # as the weights of rank 0 count
model, reference = LlamaForCausalLM(model.config), LlamaForCausalLM(model.config)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tokens = torch.tensor([[1, 2, 3]])
expected = reference(tokens).logits.detach()
for one in (model, reference):
    accelerator.prepare(one)
optimizer = accelerator.prepare(optimizer)
losses = []
for _ in range(2):
    loss = model(tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
with torch.no_grad():
    difference = float((reference(tokens).logits - expected).abs().max())
seen = [losses, difference]
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_reference_may_be_prepared_between_model_and_optimizer(tmp_path, strategy):
    for losses, difference in seen_by_ranks(tmp_path, strategy, ONE_BY_ONE):
        assert losses[1] < losses[0]
        assert difference == pytest.approx(0, abs=1e-6)


TWO_TRAINED = """
from dstrat.errors import MisuseError
def made():
    layer = torch.nn.Linear(4, 1)
    return layer, torch.optim.SGD(layer.parameters())
seen = []
def attempt(call):
    try:
        call()
    except MisuseError as error:
        seen.append(str(error))
model, optimizer = accelerator.prepare(*made())
second, second_optimizer = made()
accelerator.prepare(second)
attempt(lambda: accelerator.prepare(second_optimizer))
attempt(lambda: accelerator.prepare(torch.optim.SGD(model.parameters())))
accelerator.prepare(second, second_optimizer)
accelerator.backward(second(torch.ones(2, 4)).sum())
attempt(optimizer.step)
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_second_trained_model_is_an_error_with_advice(tmp_path, strategy):
    advice = "by accelerator.prepare_model(model, evaluation_mode=True)"
    for errors in seen_by_ranks(tmp_path, strategy, TWO_TRAINED):
        expected = [
            "prepare got an optimizer of Linear, and Linear is trained:",
            "prepare got an optimizer without its model, which a strategy may shard:",
            "SGD steps Linear, which it trains no longer, as another model was prepared with optimizers, or this",
        ]
        assert len(errors) == len(expected)
        for error, beginning in zip(errors, expected, strict=True):
            assert error.startswith(beginning)
        assert advice in errors[0]
        assert advice in errors[2]


PICKLED = """
import pickle
from dstrat.errors import MisuseError
model, optimizer = accelerator.prepare(model, optimizer)
restored = pickle.loads(pickle.dumps(accelerator))
seen = [restored.process_index == accelerator.process_index, restored.strategy is None]
try:
    restored.backward(torch.ones((), requires_grad=True))
except MisuseError as error:
    seen.append(str(error))
"""


def test_a_pickled_accelerator_has_its_state_and_no_strategy(tmp_path):
    for seen in seen_by_ranks(tmp_path, "fsdp", PICKLED):
        assert seen == [True, True, "no model is prepared: call accelerator.prepare(model, optimizer) first"]


FREED = """
import gc
def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
def losses(model, optimizer):
    of_steps = []
    for _ in range(2):
        loss = model(torch.full((3, 4), accelerator.process_index + 1.0)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        of_steps.append(loss.item())
    return of_steps
unused, accelerator = accelerator, dstrat_transformers.DstratAccelerator()
trained = made()
del unused
gc.collect()
seen = [losses(*trained)]
first, accelerator = accelerator, dstrat_transformers.DstratAccelerator()
second = made()
first.prepared_model.release()
seen.append(losses(*second))
"""


@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3"])
def test_an_accelerator_that_is_freed_or_released_leaves_others_as_they_are(tmp_path, strategy):
    pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
    for first, second in seen_by_ranks(tmp_path, strategy, FREED):
        assert first == second


WITHOUT_OPTIMIZER = """
from dstrat.errors import MisuseError
seen = []
def attempt(function):
    try:
        function()
    except MisuseError as error:
        seen.append(str(error))
def made():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1)
def loss():
    return model(torch.full((3, 4), accelerator.process_index + 1.0)).sum()
model, optimizer = made()
model = accelerator.prepare(model)
attempt(lambda: accelerator.backward(loss()))
loss().backward()
attempt(optimizer.step)
model.zero_grad()
optimizer = accelerator.prepare(optimizer)
accelerator.backward(loss())
seen.append(model.weight.grad.sum().item())
optimizer.step()
from tests.sharpness import Sam
model, _ = made()
model, optimizer = accelerator.prepare(model, Sam(model.parameters(), lr=0.1))
accelerator.backward(loss())
attempt(optimizer.step)
"""


FROZEN = """
model = accelerator.prepare(torch.nn.Linear(4, 2).requires_grad_(False))
inputs = torch.full((3, 4), accelerator.process_index + 1.0, requires_grad=True)
accelerator.backward(model(inputs).square().sum())
weight, bias = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in (model.weight, model.bias))
expected = 2 * (inputs @ weight.T + bias) @ weight
seen = [torch.allclose(inputs.grad, expected)]
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_inputs_of_a_frozen_model_get_gradients(tmp_path, strategy):
    assert seen_by_ranks(tmp_path, strategy, FROZEN) == [[True], [True]]


def test_a_model_without_its_optimizer_is_not_trained_apart_in_each_process(tmp_path):
    for first, second, gradient, third in seen_by_ranks(tmp_path, "ddp", WITHOUT_OPTIMIZER):
        assert first.startswith("backward got a loss, and gradients of Linear are not averaged over the processes")
        assert second.startswith("the SGD steps 'weight' and 1 other parameters, whose gradients are not averaged")
        assert gradient == 4 * 2 * 3 * 1.5
        assert third.startswith("Sam computes another loss in the course of its step: pass its step a closure")


ADDED = """
def made():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    layers[0].requires_grad_(False)
    return layers, torch.optim.SGD(layers[1].parameters(), lr=0.1)
def unfreeze(layers, optimizer):
    layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(layers[0].parameters()), "lr": 0.01})
def loss(layers):
    return layers(torch.arange(12.0).reshape(3, 4) / 10).square().sum()
plain, plain_optimizer = made()
model, own_optimizer = made()
model, optimizer = accelerator.prepare(model, own_optimizer)
for number in range(3):
    if number == 1:
        unfreeze(plain, plain_optimizer)
        unfreeze(model, own_optimizer)
        model, optimizer = accelerator.prepare(model, own_optimizer)
    loss(plain).backward()
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    accelerator.backward(loss(model))
    optimizer.step()
    optimizer.zero_grad()
state = accelerator.get_state_dict(model)
expected = plain.state_dict()
seen = max([float((value - expected[name]).abs().max()) for name, value in state.items()], default=0)
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_group_that_was_added_since_is_trained_after_another_preparation(tmp_path, strategy):
    for difference in seen_by_ranks(tmp_path, strategy, ADDED):
        assert difference == pytest.approx(0, abs=1e-6)


DIVIDED = """
torch.manual_seed(1)  # as the weights of rank 0 count
model = LlamaForCausalLM(model.config)
plain = LlamaForCausalLM(model.config)
plain.load_state_dict(model.state_dict())
optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
model, optimizer = accelerator.prepare(model, optimizers[1])
tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1], [3, 5, 7, 1, 2, 4, 6, 2]])
number = torch.tensor([[8], [4 if has_padding else 8]])  # of tokens in each sequence
mask = (torch.arange(8) < number).long()
options = {"attention_mask": mask} if has_padding else {}
labels = tokens.where(mask == 1, -100)
def losses(one):
    output = one(tokens, labels=labels, **options)
    return output.loss, output.logits[:, ::2].square().mean()  # that of the program reads logits
seen = []
for _ in range(3):
    expected = losses(plain)
    sum(expected).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    found = losses(model)
    accelerator.backward(sum(found))
    optimizer.step()
    optimizer.zero_grad()
    seen.append([[float(one) for one in of_model] for of_model in (expected, found)])
model.generation_config.pad_token_id = 0
plain.generation_config.pad_token_id = 0
with torch.no_grad():
    logits = [one(tokens, **options).logits[:, :4] for one in (plain, model)]
    texts = [one.generate(tokens, max_new_tokens=4, do_sample=False).tolist() for one in (plain, model)]
seen = [seen, float((logits[0] - logits[1]).abs().max()), texts]
"""


@pytest.mark.parametrize(
    ("strategy", "has_padding"),
    [("mesh(cp=2)", True), pytest.param("mesh(cp=2, context_parallel='ring')", False, marks=pytest.mark.variant)],
)
def test_a_loop_reads_logits_and_losses_of_divided_sequences(tmp_path, strategy, has_padding):
    program = f"has_padding = {has_padding}\n{DIVIDED}"
    for steps, difference, (expected_text, text) in seen_by_ranks(tmp_path, strategy, program):
        for expected, found in steps:
            assert found == pytest.approx(expected, rel=1e-5)
        assert difference == pytest.approx(0, abs=1e-5)
        assert text == expected_text


STAGES = """
model.config.initializer_range = 1.0  # so that each token counts in the text
torch.manual_seed(5)
plain = LlamaForCausalLM(model.config)
plain.generation_config.pad_token_id = 0
torch.manual_seed(5)
model = accelerator.prepare_model(LlamaForCausalLM(model.config), evaluation_mode=True)
model.generation_config.pad_token_id = 0
tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
padded = torch.tensor([[0, 0, 0, 3], [4, 5, 6, 7]])  # of which generate makes the mask
def difference(*args, **kwargs):
    of_both = [one(*args, **kwargs).logits for one in (model, plain)]
    assert of_both[0].shape == of_both[1].shape
    return float((of_both[0] - of_both[1]).abs().max())
options = {"max_new_tokens": 4, "do_sample": False}
with torch.no_grad():
    differences = [difference(tokens), difference(tokens, logits_to_keep=1)]
    texts = [[one.generate(inputs, **options).tolist() for one in (plain, model)] for inputs in (tokens, padded)]
seen = [differences, texts]
"""


def test_stages_are_evaluated_and_generate_text(tmp_path):
    for differences, texts in seen_by_ranks(tmp_path, "mesh(pp=2)", STAGES):
        assert differences == pytest.approx([0, 0], abs=1e-6)
        for expected, text in texts:
            assert text == expected


def test_a_sync_of_passes_under_no_sync_is_an_error(tmp_path):
    program = """
from dstrat.errors import ConflictError
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
with accelerator.no_sync(model):
    loss = model(torch.full((1, 2), accelerator.process_index + 1.0)).sum()
try:
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    seen = model.weight.grad.tolist()
except ConflictError as error:
    seen = str(error)
"""
    for seen in seen_by_ranks(tmp_path, "ddp", program):
        assert "outside of no_sync" in seen


STATISTICS = """
rank = accelerator.process_index
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number in range(3):
    accelerator.backward(model(torch.randn(4, 3) * (1 + 5 * rank)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    if rank == 0 and accelerator.strategy.replicates_state:
        model(torch.ones(1, 3))  # a sample, which no other rank waits for
    seen = model(torch.ones(1, 3)).item()
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_evaluate_with_the_same_running_statistics(tmp_path, strategy):
    first, second = seen_by_ranks(tmp_path, strategy, STATISTICS)
    assert first == second


CLIPPED_WITH_OTHERS = """
def made():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    return layers, torch.optim.SGD(layers[1].parameters(), lr=1.0)
def loss(layers):
    return layers(torch.arange(12.0).reshape(3, 4)).square().sum()
plain, optimizer = made()
model, prepared = accelerator.prepare(*made())
seen = {"norms": []}
for _ in range(2):  # gradients of the first layer, which nothing clears, add up
    loss(plain).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    accelerator.backward(loss(model))
    seen["norms"].append([float(norm), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))])
    for one in (optimizer, prepared):
        one.step()
        one.zero_grad()
state = accelerator.get_state_dict(model)
expected = plain.state_dict()
seen["difference"] = max([float((value - expected[name]).abs().max()) for name, value in state.items()], default=0)
"""


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_gradients_without_an_optimizer_count_in_the_norm(tmp_path, strategy):
    for seen in seen_by_ranks(tmp_path, strategy, CLIPPED_WITH_OTHERS):
        assert [clipped for _, clipped in seen["norms"]] == pytest.approx([norm for norm, _ in seen["norms"]], rel=1e-5)
        assert seen["difference"] < 1e-5


LOGGED = """
import logging
import torch
messages = []
class Messages(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())
logging.getLogger().addHandler(Messages(logging.WARNING))
"""


def test_handlers_are_followed_or_said_to_have_no_effect(tmp_path):
    program = """
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs
from dstrat.errors import ConflictError
handlers = [DistributedDataParallelKwargs(static_graph=True)]
accelerator = dstrat_transformers.DstratAccelerator(mixed_precision="bf16", kwargs_handlers=handlers)
model = torch.nn.Linear(2, 1)
accelerator.prepare(model, torch.optim.SGD(model.parameters()))
weight = torch.ones(2, 2)
dtypes = []
for handler in (None, AutocastKwargs(enabled=False), AutocastKwargs(cache_enabled=False)):
    with accelerator.autocast(handler):
        dtypes.append(str((weight @ weight).dtype))
try:
    dstrat_transformers.DstratAccelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
except ConflictError as error:
    messages.append(str(error))
seen = [dtypes, messages]
"""
    ((dtypes, messages),) = seen_by_ranks(tmp_path, "single_device", program, devices=1, begin=LOGGED)
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert any(
        "DistributedDataParallelKwargs(static_graph=True) in kwargs_handlers has no effect" in m for m in messages
    )
    assert "pass mixed_precision='no'" in messages[-1]


POWER_SGD = """
from dstrat_ddp import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
"""


def test_a_state_of_communication_that_files_lack_is_a_warning(tmp_path):
    program = (
        LOGGED
        + """
accelerator = dstrat_transformers.DstratAccelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.save_state(sys.argv[0] + ".state")
accelerator.wait_for_everyone()
accelerator.load_state(sys.argv[0] + ".state")
seen = messages
"""
    )
    strategy = "DDPStrategy(ddp_comm_hook='powerSGD', ddp_comm_state=PowerSGDState(process_group=None))"
    first, second = seen_by_ranks(tmp_path, strategy, program, before=POWER_SGD, begin="")
    assert sum("ddp_comm_state, which checkpoints do not have" in message for message in first) == 1
    assert not any("ddp_comm_state" in message for message in second)


COPIED = """
import copy, io
from torch.optim.swa_utils import AveragedModel
torch.manual_seed(1)  # as the weights of rank 0 count
model = LlamaForCausalLM(model.config)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
tokens = torch.tensor([[1, 2, 3]])
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
copies = [copy.deepcopy(model), AveragedModel(model).module, torch.load(file, weights_only=False)]
before = float(model(tokens, labels=tokens).loss)
accelerator.backward(model(tokens, labels=tokens).loss)
optimizer.step()
with torch.no_grad():
    losses = [float(one(tokens, labels=tokens).loss) for one in copies]
states = [accelerator.get_state_dict(one)["lm_head.weight"] for one in copies]
trained = accelerator.get_state_dict(model)["lm_head.weight"]
for one in copies:
    with torch.no_grad():
        one.lm_head.weight.zero_()
seen = [before, losses, [torch.equal(state, trained) for state in states], float(trained.abs().sum()) > 0]
"""


def test_a_copy_of_a_prepared_model_has_weights_of_its_own(tmp_path):
    for before, losses, are_equal, is_left in seen_by_ranks(tmp_path, "ddp", COPIED):
        assert losses == pytest.approx([before] * 3)
        assert are_equal == [False] * 3
        assert is_left


TIED = """
from safetensors.torch import load_file, save_file
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
folder = os.path.join(os.path.dirname(__file__), "state")
accelerator.save_state(folder)
accelerator.wait_for_everyone()
path = os.path.join(folder, "model.safetensors")
state = load_file(path)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    save_file({name: torch.full_like(value, 2.0) for name, value in state.items()}, path, metadata={"format": "pt"})
accelerator.wait_for_everyone()
accelerator.load_state(folder)
full = accelerator.get_state_dict(model)
tied = [name for name in state if "embed" in name or "head" in name]
seen = [tied, float(full["lm_head.weight"].mean()) if full else 2.0, len(full)]
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_tied_weights_are_saved_once_as_by_accelerate_itself(tmp_path, strategy):
    for names, mean, _ in seen_by_ranks(tmp_path, strategy, TIED):
        assert names == ["model.embed_tokens.weight"]
        assert mean == 2.0


REFUSED = """
import gc, weakref
from dstrat.errors import DstratError
from peft import LoraConfig, PromptTuningConfig, get_peft_model
seen = []
def attempt(call):
    try:
        call()
    except DstratError as error:
        seen.append(str(error))
def join():
    with accelerator.join_uneven_inputs([model]):
        pass
def prepare_after_a_step():
    layer = torch.nn.Linear(4, 2)
    late = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    late.step()
    accelerator.prepare(layer, late)
attempt(prepare_after_a_step)
prompts = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
attempt(lambda: accelerator.prepare(prompts, torch.optim.SGD([one for one in prompts.parameters()])))
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(target_modules=["q_proj"]))
model, optimizer = accelerator.prepare(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad]))
attempt(model.merge_and_unload)
attempt(lambda: accelerator.get_state_dict(model.base_model.model.lm_head))
attempt(join)
alive = weakref.ref(model)
del model, optimizer
accelerator.free_memory()
gc.collect()
seen.append(str(alive()))
layer = torch.nn.Linear(4, 1)
layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
accelerator.backward(layer(torch.ones(2, 4)).sum())
optimizer.step()
"""


def test_what_shards_cannot_do_is_an_error_and_freed_models_are_gone(tmp_path):
    pytest.importorskip("peft", reason="this environment has no peft")
    expected = [
        "AdamW has a state before prepare",
        "learns prompts, which peft computes from whole parameters",
        "merge_and_unload changes whole weights",
        "get_state_dict got Linear, which is no prepared model",
        "join_uneven_inputs lets processes end at different steps",
        "None",
    ]
    for messages in seen_by_ranks(tmp_path, "fsdp", REFUSED):
        assert len(messages) == len(expected), messages
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_inputs_and_models_of_processes_of_one_batch_are_not_divided_or_copied(tmp_path):
    program = """
import copy, pickle
from dstrat.errors import DstratError
def split():
    with accelerator.split_between_processes([1, 2]):
        pass
accelerator.prepare_model(model, evaluation_mode=True)
seen = []
for call in (split, lambda: copy.deepcopy(model), lambda: pickle.dumps(model.forward)):
    try:
        call()
    except DstratError as error:
        seen.append(str(error))
"""
    for first, *others in seen_by_ranks(tmp_path, "mesh(tp=2)", program):
        assert "some compute the same batch together: prepare a DataLoader" in first
        assert len(others) == 2
        assert "cannot be copied" in others[0]
        assert "LlamaForCausalLM cannot be pickled, as each process has shards of it" in others[1]
