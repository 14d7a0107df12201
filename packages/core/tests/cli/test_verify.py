"""``dstrat verify``: right strategies pass, and of wrong ones the layer or parameter is named."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dstrat import TrainModule
from dstrat.cli.main import commands
from dstrat.errors import MisuseError
from dstrat.parallel.gradient_sync import GradientSyncStrategy
from dstrat.plugins.registry import StrategyRegistry

MODULE = __name__


class Averaging(GradientSyncStrategy):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Forgetful(Averaging):
    """Does not average the gradients of one layer."""

    def synchronize_gradients(self, gradients):
        super().synchronize_gradients(gradients[:2] + gradients[4:])


class Summing(Averaging):
    """Averages nothing, so that all gradients are too large; an optimizer that normalizes them would hide it."""

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient, reduce_op="sum"))


class Scaled(nn.Linear):
    """Computes something else in the last rank."""

    factors = None

    def forward(self, x):
        return super().forward(x) * (1 + 1e-3 * self.factors.global_rank)


class Net(TrainModule):
    def __init__(self, middle=nn.Linear):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))

    def on_train_start(self):
        if isinstance(self.net[2], Scaled):
            self.net[2].factors = self.trainer

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Dropping(Net):
    """Has every kind of dropout, of which functions are imported by their names, and some run again in the backward."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.scaled = nn.AlphaDropout(0.5)

    def training_step(self, batch, batch_idx):
        x = checkpoint(self.dropped, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(self.net(x), batch[1])

    def dropped(self, x):
        x, _ = self.recurrent(x.unsqueeze(1))
        x = dropout(scaled_dot_product_attention(x, x, x, dropout_p=0.5), 0.3, self.training)
        x = self.scaled(nn.functional.feature_alpha_dropout(nn.functional.dropout1d(x, 0.3), 0.3, self.training))
        return torch.dropout(nn.functional.dropout(x * 1, inplace=True), 0.3, train=True).squeeze(1)


class Noisy(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)


class Block(nn.Module):
    num_made = 0

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        Block.num_made += not self.inner.weight.is_meta

    def forward(self, x):
        return x + sum(torch.tanh(layer(self.inner(x))) for layer in self.outer)


class Deep(TrainModule):
    def __init__(self, num_layers=9):
        super().__init__()
        self.num_layers = num_layers
        self.make()

    def make(self):
        layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())]
        self.blocks = nn.ModuleList(Block() for _ in range(self.num_layers))
        self.net = nn.Sequential(*layers, nn.Linear(6, 3))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.net(x), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Counting(Deep):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for number in range(self.num_layers):
            x = self.blocks[number](x)
        return nn.functional.mse_loss(self.net(x), batch[1])


class Telling(Counting):
    def keep_layers(self, count):
        self.num_layers = count
        return super().keep_layers(count)


class Late(Deep):
    def __init__(self):
        TrainModule.__init__(self)
        self.num_layers = 9

    def configure_model(self):
        self.make()


class Valued(Deep):
    """Has a parameter with a value of its own, which nothing computes again."""

    def make(self):
        super().make()
        self.factor = nn.Parameter(torch.full((6,), 0.5))

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] * self.factor, batch[1]), batch_idx)


def deep():
    return Deep(), batch()


def emptied():
    inputs = torch.empty(8192, 6).uniform_()  # which is large enough to be made without memory
    return Deep(), (inputs, inputs[:, :3])


def counting():
    return Counting(), batch()


def telling():
    return Telling(), batch()


def late():
    return Late(), batch()


def valued():
    return Valued(), batch()


def batch(size=8):
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(2))
    return inputs, inputs[:, :3] - inputs[:, 3:]


def training():
    return Net(), batch()


def scaled():
    return Net(Scaled), batch()


def dropping():
    return Dropping(), batch()


def noisy():
    return Noisy(), batch()


def odd():
    return Net(), batch(7)


@pytest.fixture
def verify(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for cls in (Averaging, Forgetful, Summing):
        StrategyRegistry.register(cls.__name__.lower(), cls, override=True)

    def run(factory, strategy, *options):
        arguments = ["verify", f"{MODULE}:{factory}", "--strategy", strategy, *options]
        return CliRunner().invoke(commands, arguments, catch_exceptions=True)

    yield run
    for cls in (Averaging, Forgetful, Summing):
        StrategyRegistry.remove(cls.__name__.lower())


def test_a_strategy_that_is_right_passes(verify):
    shown = verify("training", "averaging", "--json")
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["same"]
    compared = {one["subject"]: (one["compared"], one["total"]) for one in result["comparisons"]}
    assert compared == {
        "first values": (6, 6),
        "outputs of layers": (7, 7),
        "gradients": (6, 6),
        "losses": (3, 3),
    }
    assert all(one["largest"] < 1e-6 for one in result["comparisons"])


def test_the_parameter_with_a_wrong_gradient_is_named(verify):
    shown = verify("training", "forgetful")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert lines[-1] == ("forgetful on 2 CPU processes is not the same as one device, first in gradients: 'net.2.bias'")
    assert not [line for line in lines if "net.0" in line or "net.5" in line]


def test_gradients_that_are_too_large_are_found(verify):
    shown = verify("training", "summing", "--json")
    gradients = json.loads(shown.stdout)["comparisons"][2]
    assert [difference for _, difference in gradients["differing"]] == pytest.approx([1.0] * 6)
    assert gradients["differing"][0][0] == "net.5.bias"  # the first in the backward pass


def test_the_first_layer_with_another_output_is_named(verify):
    shown = verify("scaled", "averaging")
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == (
        "averaging on 2 CPU processes is not the same as one device, first in outputs of layers: 'net.2'"
    )


def test_dropout_of_functions_is_off_too(verify):
    shown = verify("dropping", "averaging")
    assert shown.exit_code == 0, shown.output
    assert "random numbers" not in shown.output
    assert (dropout(torch.ones(1000), 0.5) == 0).any()  # afterwards


def test_other_random_numbers_are_named_as_a_possible_cause(verify):
    shown = verify("noisy", "averaging")
    assert shown.exit_code == 1
    assert "Noisy draws random numbers in a step" in shown.stdout
    assert json.loads(verify("noisy", "averaging", "--json").stdout)["draws_random_numbers"]


def test_a_batch_that_cannot_be_shared_is_an_error(verify):
    shown = verify("odd", "averaging")
    assert "a batch of 7 samples cannot be shared by 2 groups of ranks" in str(shown.exception)


REDUCED = {"blocks": [9, 2], "net": [11, 5]}


REASONS = {
    "valued": "nothing computes the first values of its 'factor'",
    "emptied": "a batch was made by torch.empty, and its values are lost",
}


@pytest.mark.parametrize(
    "factory", ["deep", *(pytest.param(name, marks=pytest.mark.variant) for name in ("telling", "late")), *REASONS]
)
def test_a_reduced_module_keeps_the_first_layers_that_repeat(verify, caplog, factory):
    Block.num_made = 0
    shown = verify(factory, "averaging", "--layers", "2", "--json")
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["reduced"] == REDUCED
    # Blocks have four layers with two parameters each; of the sequence three layers stay.
    assert result["comparisons"][2]["compared"] == 2 * 4 * 2 + 3 * 2 + (factory == "valued")
    assert Block.num_made == (9 if factory in REASONS else 0)  # in memory
    assert REASONS.get(factory, "") in caplog.text


def test_what_is_reduced_is_printed(verify):
    shown = verify("deep", "forgetful", "--layers", "1")
    assert shown.stdout.splitlines()[:2] == ["blocks: 1 of 9 layers", "net: 3 of 11 layers"]
    assert "first in gradients: 'blocks.0.outer.0.bias'" in shown.stdout


def test_a_module_that_cannot_be_reduced_is_an_error(verify):
    shown = verify("training", "averaging", "--layers", "2")
    assert str(shown.exception).startswith(
        "--layers 2 reduces nothing in Net: none of its nn.ModuleList, nn.Sequential"
    )
    shown = verify("late", "averaging", "--layers", "20")
    assert str(shown.exception).startswith("--layers 20 reduces nothing in Late")
    shown = verify("counting", "averaging", "--layers", "2")
    assert str(shown.exception).startswith("Counting with fewer layers (blocks, net) raised IndexError: index 2 is out")


def test_a_script_is_run_up_to_its_first_fit(verify, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"from {MODULE} import Net, batch\n"
        "from dstrat import Trainer\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "Trainer(max_epochs=2, gradient_clip_val=0.01).fit(Net(), DataLoader(TensorDataset(*batch(24)), 8))\n"
        "raise ValueError('after the fit')\n"
    )
    shown = CliRunner().invoke(commands, ["verify", str(script), "--strategy", "averaging", "--json"])
    assert shown.exit_code == 0, shown.output
    script.write_text("pass")
    shown = CliRunner().invoke(commands, ["verify", str(script), "--strategy", "averaging"])
    assert isinstance(shown.exception, MisuseError)
    assert "ended without a call of trainer.fit" in str(shown.exception)


def test_a_script_for_other_hardware_gets_its_arguments(verify, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        f"from {MODULE} import Net, batch\n"
        "from dstrat import Trainer\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "hardware = {'accelerator': 'gpu', 'devices': 8, 'num_nodes': 2, 'elastic': True, 'max_restarts': 3}\n"
        "trainer = Trainer(strategy='averaging', precision='bf16-mixed', **hardware)\n"
        "assert sys.argv[1:3] == ['--batch-size', '8']\n"
        "trainer.fit(Net(), DataLoader(TensorDataset(*batch(24)), int(sys.argv[2])))\n"
    )
    options = ["--strategy", "averaging", "--json", "--"]
    shown = CliRunner().invoke(commands, ["verify", str(script), *options, "--batch-size", "8"])
    assert shown.exit_code == 0, shown.output
    shown = verify("training", "averaging", "--", "--epochs", "3")
    assert str(shown.exception).endswith("is no script, and gets no arguments: leave out '--epochs 3'")
