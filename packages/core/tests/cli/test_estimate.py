"""``dstrat estimate``."""

import json
from contextlib import contextmanager

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from dstrat import TrainModule
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.command import Estimate, ranked, read_size
from dstrat.cli.estimate.fake_step import measure_training, read_training
from dstrat.cli.main import commands
from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.memory import MemoryLayout
from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.registry import StrategyRegistry

MODULE = __name__
HIDDEN, BATCH = 256, 32


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, 64, bias=False))

    def forward(self, x):
        return self.layers(x).square().mean()


class Trained(TrainModule):
    """Has a training step and an optimizer."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.example_input_array = torch.zeros(BATCH, 64)

    def forward(self, x):
        return self.net.layers(x)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch["x"])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def plain():
    return Net(), torch.zeros(BATCH, 64)


def example():
    return Trained()


def trained():
    return Trained(), {"x": torch.zeros(BATCH, 64)}


def with_optimizer():
    return Net(), torch.zeros(BATCH, 64), lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def huge():
    return nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(40))), torch.zeros(1, 16384)


def reads_values():
    class Reading(Net):
        def forward(self, x):
            return super().forward(x) * (1 if x.sum() > 0 else 2)

    return Reading(), torch.ones(BATCH, 64)


def fails():
    raise ValueError("no data")


def no_batch():
    return Net()


def estimate(factory, *options):
    return CliRunner().invoke(commands, ["estimate", "--model", f"{MODULE}:{factory}", *options], catch_exceptions=True)


def estimates(factory, *options):
    shown = estimate(factory, "--json", *options)
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return {one["strategy"]: one for one in json.loads(shown.stdout)["estimates"]}


def size_of(factory, precision="32-true", batch_size=None):
    plugin = TruePrecision(precision) if precision.endswith("true") else MixedPrecision(precision)
    options = {"device_type": "cuda", "world_size": 1, "ranks_per_machine": 1, "batch_size": batch_size}
    return measure_training(lambda: read_training(factory(), "factory"), plugin, **options)


WEIGHTS = 4 * 2 * 64 * HIDDEN


def test_parameters_gradients_and_optimizer_state_are_those_of_the_module():
    one = estimates("plain", "--accelerator", "cpu", "--strategy", "single_device")["single_device"]
    assert (one["parameters"], one["gradients"]) == (WEIGHTS, WEIGHTS)
    assert one["optimizer_state"] == pytest.approx(2 * WEIGHTS, abs=64)  # AdamW's, with two counters


@pytest.mark.parametrize(("factory", "state"), [(example, 0), (trained, 0), (with_optimizer, WEIGHTS)])
def test_the_optimizer_is_that_of_the_module_or_the_factory(factory, state):
    assert size_of(factory).optimizer_state == state


def test_activations_are_those_that_a_step_saves_and_grow_with_the_batch():
    x, hidden, output = (4 * BATCH * width for width in (64, HIDDEN, 64))
    size = size_of(plain)
    # The largest is in the backward pass, when the gradients of weights are not yet those of parameters.
    assert x + hidden + output < size.activations <= x + 3 * hidden + 2 * output + WEIGHTS
    small, large = (size_of(plain, batch_size=times * 100 * BATCH).activations for times in (1, 8))
    assert large == pytest.approx(8 * small, rel=0.05)


def test_mixed_precision_keeps_parameters_and_adds_their_copies():
    size, mixed = size_of(plain), size_of(plain, "bf16-mixed")
    assert mixed.parameters == size.parameters
    assert mixed.activations > WEIGHTS / 2  # the copies in 16 bits, which autocast keeps for the step


@contextmanager
def registered(alias, strategy_class):
    StrategyRegistry.register(alias, strategy_class, description="for tests")
    try:
        yield
    finally:
        StrategyRegistry.remove(alias)


class Halving(Strategy):
    """Divides parameters by two, and is registered by a user."""

    root_device = torch.device("cpu")
    is_global_zero = True

    def memory_layout(self, training):
        return MemoryLayout(parameters=training.parameters // 2, gradients=0, optimizer_state=0, host=7)

    model_to_device = reduce = broadcast = barrier = all_gather = None


class Gathering(Halving):
    """Gathers parameters in the dtype of the computation."""

    def forward_dtype(self, precision):
        return precision.compute_dtype


def test_parameters_gathered_in_the_dtype_of_the_computation_are_not_copied():
    with registered("gathering", Gathering), registered("halving", Halving):
        options = ("--accelerator", "cpu", "--precision", "bf16-mixed", "--batch-size", "1")
        listed = estimates("plain", *options, "--strategy", "gathering", "--strategy", "halving")
    # Neither the copies nor their gradients, which are those of the gathered parameters, are activations.
    assert listed["gathering"]["activations"] < 0.02 * WEIGHTS
    assert listed["halving"]["activations"] > WEIGHTS / 2


def grouped():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(4, 64, 2 * HIDDEN))

        def forward(self, x):
            ends = torch.tensor([8, 8, 16, BATCH], dtype=torch.int32)
            return torch._grouped_mm(x, self.weights, offs=ends).square().mean()

    return Experts(), torch.zeros(BATCH, 64, requires_grad=True)


def test_products_of_groups_run_in_every_dtype_and_count():
    whole, half = size_of(grouped), size_of(grouped, "bf16-true")
    assert whole.work.flops == half.work.flops == 2 * 2 * BATCH * 64 * 2 * HIDDEN  # forward, and gradients of weights
    assert whole.activations == pytest.approx(2 * half.activations, rel=0.05)


def test_half_precision_halves_everything():
    size, half = size_of(plain, batch_size=4096), size_of(plain, "bf16-true", batch_size=4096)
    assert (half.parameters, half.trainable_parameters) == (size.parameters / 2, size.trainable_parameters / 2)
    assert half.activations == pytest.approx(size.activations / 2, rel=0.05)


def test_activation_checkpointing_is_respected():
    class Checkpointed(Net):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False).square().mean()

    def deep(kind):
        net = kind()
        net.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)))
        if kind is Checkpointed:
            net.forward = lambda x: (
                torch.utils.checkpoint.checkpoint_sequential(net.layers, 5, x, use_reentrant=False).square().mean()
            )
        return net, torch.zeros(1000, 64)

    assert size_of(lambda: deep(Checkpointed)).activations < 0.6 * size_of(lambda: deep(Net)).activations


def test_attention_on_gpus_saves_no_matrix_of_all_pairs_with_dropout_either():
    def attention():
        layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
        return layer, torch.zeros(1, 2048, 64)

    assert size_of(attention).activations < 4 * 2048 * 2048


def test_frozen_parameters_have_no_gradients():
    def frozen():
        net, batch = plain()
        net.layers[0].requires_grad_(False)
        return net, batch

    size = size_of(frozen)
    assert (size.frozen_parameters, size.trainable_parameters) == (WEIGHTS / 2, WEIGHTS / 2)
    assert size.replicated.gradients == WEIGHTS / 2


def test_a_module_far_larger_than_this_machine_is_estimated():
    one = estimates("huge", "--accelerator", "cpu", "--strategy", "single_device")["single_device"]
    assert one["parameters"] > 40 * 2**30


def test_what_does_not_fit_is_said_and_exits_with_1():
    fits = estimate("plain", "--accelerator", "cpu", "--memory", "1GiB")
    assert (fits.exit_code, fits.stdout.splitlines()[1].split()[-1]) == (0, "yes")
    shown = estimate("plain", "--accelerator", "cpu", "--memory", "1KiB", "--strategy", "single_device")
    assert (shown.exit_code, shown.stdout.splitlines()[1].split()[-1]) == (1, "no")


def test_the_table_fits_into_80_columns():
    shown = estimate("plain", "--devices", "8", "--memory", "24GiB").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "model_parallel: if configure_model splits each weight matrix over 8 ranks" in shown


GIB = 2**30


def sizes(strategy, resident, peak, *, fits=True, host=0, assumption=""):
    return Estimate(
        strategy=strategy, parameters=resident * GIB, gradients=0, optimizer_state=0, activations=0, other=0,
        peak=int(peak * GIB), host=host, fits=fits, assumption=assumption,
    )  # fmt: skip


def unused():
    net = Net()
    net.unused = nn.Linear(4, 4)
    return net, torch.zeros(BATCH, 64)


def test_a_strategy_that_cannot_train_the_module_is_named_with_the_reason():
    pytest.importorskip("dstrat_ddp")
    shown = estimate("unused", "--strategy", "ddp", "--accelerator", "cpu", "--devices", "2", "--memory", "1GiB")
    assert "ddp cannot train this module: the loss does not depend on" in " ".join(shown.stdout.split())


def test_what_fits_is_first_and_of_those_what_shards_least():
    expected = [
        sizes("chosen automatically", 8, 12),
        sizes("replicates", 8, 9),
        sizes("shards", 2, 5),
        sizes("shards and gathers more", 2, 6),
        sizes("changes the module", 8, 9, assumption="it is changed"),
        sizes("offloads", 2, 3, host=GIB),
        sizes("tight", 12, 15.5),
        sizes("too large", 15, 17, fits=False),
        sizes("far too large", 15, 20, fits=False),
    ]
    ordered = ranked(sorted(expected, key=lambda one: one.strategy), 16 * GIB, {"chosen automatically": 100})
    assert [one.strategy for one in ordered] == [one.strategy for one in expected]


def test_the_first_that_fits_is_recommended():
    options = ("--accelerator", "cpu", "--strategy", "single_device")
    for memory, recommended in (("1GiB", "single_device"), ("1KiB", None)):
        assert (
            json.loads(estimate("plain", *options, "--memory", memory, "--json").stdout)["recommended"] == recommended
        )
        expected = f"recommended: {recommended}, which" if recommended else "none fits with a tenth of the memory"
        assert estimate("plain", *options, "--memory", memory).stdout.splitlines()[2].startswith(expected)
    assert "--memory 24GiB tells which" in estimate("plain", *options).stdout


def test_a_third_partys_strategy_answers_for_itself():
    with registered("halving", Halving):
        one = estimates("plain", "--accelerator", "cpu", "--strategy", "halving")["halving"]
    assert (one["parameters"], one["host"], one["gradients"]) == (WEIGHTS / 2, 7, 0)


def test_a_strategy_that_shards_and_says_nothing_is_not_estimated():
    class Silent(Halving):
        memory_layout = Strategy.memory_layout
        replicates_state = False

    assert Silent().memory_layout(size_of(plain)) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5kib", 1536), ("100B", 100), ("7MB", 7 * 10**6)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "24GiBs", "-3GiB", "much"])
def test_a_size_without_sense_is_an_error(text):
    with pytest.raises(RequestError, match="such as 24GiB"):
        read_size(text)


def test_a_size_without_a_unit_is_an_error():
    with pytest.raises(RequestError, match="'100' are 100 bytes: give a number with a unit, such as 100GiB"):
        read_size("100")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (no_batch, r"returned a Net without a batch: return \(module, batch\)"),
        (lambda: 3, "returned a int, and must return a module with example_input_array"),
        (fails, r"the training raised ValueError: no data\.  It"),
        (reads_values, r"raised .*\.  It runs on fake tensors, which have no values"),
    ],
)
def test_a_factory_of_no_use_is_an_error_that_says_why(factory, message):
    with pytest.raises(MisuseError, match=message):
        size_of(factory)


@pytest.mark.parametrize(
    ("model", "message"),
    [("nowhere:factory", "cannot be imported"), ("json:dumped", "'dumped' does not exist"), ("json", "must look like")],
)
def test_a_model_that_is_not_there_is_one_line_on_stderr(installed_dstrat, model, message):
    shown = installed_dstrat("estimate", "--model", model)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert message in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_a_strategy_that_does_not_fit_the_accelerator_is_an_error_when_it_is_named():
    shown = estimate("plain", "--accelerator", "cpu", "--devices", "2", "--strategy", "single_device")
    assert "at most 1 device" in str(shown.exception)
