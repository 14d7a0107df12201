"""Layers that compute activations again: losses stay, memory falls, and what cannot be is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.data import DataLoader

from dstrat import SingleDeviceStrategy, Trainer, TrainModule
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.cli.estimate.live_memory import LiveMemory
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.parallel.activation_memory import ActivationMemory, _SavedResults

WIDTH, LENGTH, BATCH = 32, 16, 4


class Block(nn.Module):
    """A block of a transformer, with dropout in its attention and after it."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:2], 4, WIDTH // 4)
        query, key, value = (one.view(shape).transpose(1, 2) for one in self.heads(self.first_norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        x = x + functional.dropout(self.joined(attended.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.second_norm(x)))), self.dropout)


class Transformer(TrainModule):
    def __init__(self, block=Block, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(block(dropout) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Convolutions(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.BatchNorm1d(LENGTH), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        return x + self.layers(x)


class Centered(nn.Module):
    """Reads a buffer that it has changed before, and changes those of spectral norm."""

    def __init__(self, dropout):
        super().__init__()
        self.layer = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.ones(WIDTH))

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return torch.sin((x - self.mean) * self.constant)


class LateCount(Centered):
    """Changes a buffer from the second step on."""

    def forward(self, x):
        if self.mean.any():
            self.constant += 1
        return super().forward(x)


def batches(count=4):
    return torch.randn(count * BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).split(BATCH)


def trained(options, block=Block, **settings):
    """Return the losses and the weights of a training."""
    module = Transformer(block)
    module.losses = []
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        strategy=SingleDeviceStrategy(**options), accelerator="cpu", devices=1, max_epochs=1, **quiet, **settings
    )
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    return module.losses, module.state_dict()


def assert_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


OPTIONS = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "classes": {"activation_checkpointing": Block},
    "selective, by a function": {
        "activation_checkpointing": "selective",
        "activation_checkpointing_policy": lambda layer: isinstance(layer, Block),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_and_weights_are_bit_for_bit_those_without(options):
    assert_equal(trained(options), trained({}))


@pytest.mark.parametrize("settings", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_they_are_so_with_accumulation_and_mixed_precision(settings):
    assert_equal(trained(OPTIONS["selective"], **settings), trained({}, **settings))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_running_statistics_are_updated_once_in_a_step(mode):
    expected = trained({}, Convolutions, accumulate_grad_batches=2)
    assert expected[1]["blocks.0.layers.1.num_batches_tracked"] == 4
    assert_equal(trained({"activation_checkpointing": mode}, Convolutions, accumulate_grad_batches=2), expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_buffers_that_a_forward_pass_changes_are_those_of_one_pass(mode):
    expected = trained({}, Centered, accumulate_grad_batches=2)
    assert_equal(trained({"activation_checkpointing": mode}, Centered, accumulate_grad_batches=2), expected)


def test_a_buffer_that_changes_in_later_steps_only_is_refused():
    with pytest.raises(
        MisuseError, match=r"blocks\.0 \(LateCount\) changes its buffer 'constant' in this forward pass"
    ):
        trained({"activation_checkpointing": "full"}, LateCount)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_is_computed_again_where_it_draws_random_numbers(rate):
    operation = torch.ops.aten._scaled_dot_product_flash_attention.default  # of GPUs
    query = torch.zeros(1, 1, 2, 8)
    again = CheckpointPolicy.PREFER_RECOMPUTE if rate else CheckpointPolicy.MUST_SAVE
    policy, forward = _SavedResults("a layer").policy, SimpleNamespace(is_recompute=False)
    assert policy(forward, operation, query, query, query, rate) is again
    assert policy(forward, operation, query, query, query, dropout_p=rate) is again
    assert policy(forward, operation, query, query, query) is CheckpointPolicy.MUST_SAVE


def test_layers_are_as_before_after_a_training():
    module = Transformer()
    undo = ActivationMemory(recomputation="selective").select(module, torch.device("cpu"))()
    assert all("forward" in vars(block) for block in module.blocks)
    undo()
    assert not any("forward" in vars(block) for block in module.blocks)


@pytest.mark.parametrize("options", [{"recomputation": "full"}, {"recomputation": "selective"}, {"offloads": True}])
def test_a_copy_of_the_layers_computes_with_its_own_weights(options):
    module, batch = Transformer(dropout=0.0), torch.ones(BATCH, LENGTH, WIDTH)
    ActivationMemory(**options).select(module, torch.device("cpu"), host="meta")()
    copied = copy.deepcopy(module.blocks)
    before = copied(batch).detach()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(copied(batch), before)
    assert not torch.equal(module.blocks(batch), before)


def test_layers_that_are_wrapped_by_the_compiler_are_refused():
    module = Transformer()
    for index in range(len(module.blocks)):
        module.blocks[index] = torch.compile(module.blocks[index], backend="eager")
    with pytest.raises(
        RequestError, match=r"'blocks\.0' of Transformer is wrapped by torch.compile: compile layers in"
    ):
        ActivationMemory(recomputation="full").select(module, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
def test_compiled_layers_compute_again_too():
    def gradients(memory):
        module = Transformer(dropout=0.0)
        if memory is not None:
            memory.select(module, torch.device("cpu"))()
            module.blocks.compile(backend="aot_eager")
        module.blocks(batches(1)[0]).square().mean().backward()
        return [parameter.grad for parameter in module.parameters()]

    for one, other in zip(gradients(ActivationMemory(recomputation="selective")), gradients(None), strict=True):
        torch.testing.assert_close(one, other)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.ones(WIDTH))

    def forward(self, x):
        return torch.sin(self.layer(x)) * self.factor


def test_compiled_layers_with_constant_buffers_compute_again_too():
    layers = nn.Sequential(Constant(), Constant())
    ActivationMemory(recomputation="full").select(layers, torch.device("cpu"))()
    layers.compile(backend="aot_eager")
    layers(batches(1)[0]).square().mean().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


# Memory


def factory(batch=64):
    module = Transformer(dropout=0.0)
    module.losses = []
    data = torch.zeros(batch, LENGTH, WIDTH)
    return TrainingSetup(
        module=Plain(module), batch=data, make_optimizers=lambda plain: plain.module.configure_optimizers()
    )


class Plain(nn.Module):
    """Its step reads no value, which fake tensors do not have."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.blocks(batch).square().mean()


def largest_in_a_step(memory):
    """Return the largest memory of activations in a real step on the CPU."""
    setup = factory()
    module = setup.module
    if memory is not None:
        memory.select(module, torch.device("cpu"))()
    live = LiveMemory([*module.parameters(), *module.buffers()])
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(live.count_gradient)
    with live:
        live.begin_step(setup.batch)
        module(setup.batch).backward()
    return max(activations for activations, _ in live.timeline)


def estimated(memory, device_type="cpu"):
    return measure_training(
        factory,
        TruePrecision(),
        device_type=device_type,
        world_size=1,
        ranks_per_machine=1,
        saved_activations=memory,
    )


def test_the_estimate_is_the_memory_of_a_real_step():
    memories = (None, ActivationMemory(recomputation="selective"), ActivationMemory(recomputation="full"))
    plain, selective, full = (largest_in_a_step(memory) for memory in memories)
    assert full < selective < plain
    for memory, measured in zip(memories, (plain, selective, full), strict=True):
        assert estimated(memory).activations == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_estimate_computes_again_with_the_kernels_of_gpus(mode):
    def make():
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return TrainingSetup(module=module, batch=torch.zeros(64, 8, 32), make_optimizers=torch_sgd)

    plain, again = (
        measure_training(
            make, TruePrecision(), device_type="cuda", world_size=1, ranks_per_machine=1, saved_activations=memory
        )
        for memory in (None, ActivationMemory(recomputation=mode))
    )
    assert again.activations < plain.activations


def torch_sgd(module):
    return torch.optim.SGD(module.parameters())


def test_the_estimate_has_offloaded_activations_on_the_host():
    plain, offloaded = estimated(None, "cuda"), estimated(ActivationMemory(offloads=True), "cuda")
    assert offloaded.activations < plain.activations
    assert plain.offloaded_activations == 0
    assert plain.activations / 2 < offloaded.offloaded_activations <= plain.activations
    assert offloaded.host(offloaded.replicated) == offloaded.offloaded_activations


class Head(nn.Module):
    """Saves the first rows of a large tensor, all of which no other operation saves."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        rows = torch.cat([x, x])[: len(x) // 4]
        return x + nn.functional.pad((rows * self.scale).sin(), (0, 0, 0, len(x) - len(rows)))


def test_of_a_small_view_no_more_than_the_view_is_offloaded():
    batch = torch.zeros(512, WIDTH)

    def make():
        module = nn.Sequential(Head(), Head(), Head(), nn.Linear(WIDTH, 1))
        return TrainingSetup(module=module, batch=batch, make_optimizers=torch_sgd)

    offloaded = measure_training(
        make,
        TruePrecision(),
        device_type="cuda",
        world_size=1,
        ranks_per_machine=1,
        saved_activations=ActivationMemory(offloads=True),
    ).offloaded_activations
    assert offloaded == 3 * (batch.nbytes // 4 + batch.nbytes // 4)  # of each layer the rows, and their products


def test_activations_on_a_cpu_are_on_the_host_already():
    assert estimated(ActivationMemory(offloads=True)).activations == estimated(None).activations


# Wrong use


class InPlace(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.activation = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.activation(self.layer(x))


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch passes no results to a policy")
def test_a_result_that_is_changed_in_place_is_refused_by_the_name_of_the_layer():
    with pytest.raises(MisuseError, match=r"blocks\.0 \(InPlace\) changes the result of a matrix product .*relu_"):
        trained(OPTIONS["selective"], InPlace)
    assert_equal(trained(OPTIONS["full"], InPlace), trained({}, InPlace))


WRONG = {
    "a word": ({"activation_checkpointing": "some"}, RequestError, "'some' is not 'full', 'selective', a class of"),
    "a number": ({"activation_checkpointing": 3}, RequestError, "activation_checkpointing 3 is not 'full', 'sel"),
    "a policy": (
        {"activation_checkpointing_policy": "x"},
        RequestError,
        "activation_checkpointing_policy 'x' is not a",
    ),
    "an offload": ({"activation_offload": "cpu"}, RequestError, "activation_offload 'cpu' is not True, False, a class"),
    "two selections": (
        {"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}},
        ConflictError,
        "both select layers: leave one out",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG)
def test_an_impossible_option_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        SingleDeviceStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recomputation": "selective"}, "finds no repeated layers in Linear: name the classes.*_policy={Block}"),
        ({"recomputation": "full", "recomputed": (nn.LSTM,)}, "activation_checkpointing of .*LSTM.* matches no layer"),
        (
            {"offloads": True},
            "activation_offload finds no repeated layers in Linear: name .* activation_offload={Block}",
        ),
    ],
    ids=str,
)
def test_a_module_without_such_layers_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        ActivationMemory(**options).select(nn.Linear(2, 2), torch.device("cuda"))()
