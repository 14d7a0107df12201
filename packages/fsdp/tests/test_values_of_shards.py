"""Values of shards that a program reads, and tensors that it computes with in the place of parameters."""

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, loader, quiet_trainer
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everywhere

from dstrat import TrainModule
from dstrat.errors import MisuseError
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

READS = {
    "item of a norm": lambda tensor: tensor.norm(2).item(),
    "item of a sum": lambda tensor: tensor.data.pow(2).sum().item(),
    "mean": lambda tensor: float(tensor.detach().abs().mean()),
    "largest": lambda tensor: tensor.abs().max().item(),
    "largest of a tensor": lambda tensor: tensor.max().item(),
    "smallest of a tensor": lambda tensor: tensor.min().item(),
    "index of the largest": lambda tensor: float(tensor.argmax().item()),
    "largest over all dimensions": lambda tensor: tensor.amax().item(),
    "count": lambda tensor: int((tensor > 0).sum()),
    "any": lambda tensor: float(bool((tensor < -0.3).any())),
    "all": lambda tensor: float(bool((tensor > -0.3).all())),
    "largest magnitude": lambda tensor: tensor.norm(float("inf")).item(),
    "largest magnitudes in one call": lambda tensor: torch._foreach_norm([tensor], float("inf"))[0].item(),
    "mean squared distance": lambda tensor: F.mse_loss(tensor.data, 2 * tensor.data).item(),
    "smooth distance": lambda tensor: F.smooth_l1_loss(tensor.data, 2 * tensor.data).item(),
    "sum of squared distances": lambda tensor: F.mse_loss(tensor.data, 2 * tensor.data, reduction="sum").item(),
    "cross entropy": lambda tensor: F.binary_cross_entropy_with_logits(tensor.data, (tensor.data > 0).float()).item(),
    "norms in one call": lambda tensor: torch._foreach_norm([tensor])[0].item(),
}


class Reading(TrainModule):
    """Its loss has a factor that a program computes from what it reads of weights and gradients."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        # A bias of three values: uneven shards.  Of the slope's one value a rank has none.
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.PReLU())
        self.read, self.factor = READS[read], 1.0

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets) * self.factor

    def on_before_optimizer_step(self, optimizer):
        self.factor = 1 + sum(self.read(parameter.grad) for parameter in self.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.factor += sum(self.read(parameter) for parameter in self.parameters())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def losses(read, strategy="single_device", cluster=None):
    noted = Losses()
    trainer = quiet_trainer(strategy, cluster, callbacks=[noted])
    trainer.fit(Reading(read), loader(16, 4 if cluster is None else 2))
    return noted.losses


def losses_of_shards(cluster, read):
    return losses(read, FSDPStrategy(), cluster)


def test_losses_that_depend_on_reads_are_those_of_one_device():
    first, second = in_ranks(each, function=losses_of_shards, cases={read: {"read": read} for read in READS})
    assert first == second
    for read, found in first.items():
        assert found == pytest.approx(losses(read), rel=1e-5), read


class Split(Reading):
    def configure_model(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def reads_of_split_layers(cluster):
    noted, strategy = Losses(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    quiet_trainer(strategy, cluster, callbacks=[noted]).fit(Split("item of a norm"), loader(16, 2))
    return noted.losses


def test_a_read_of_split_layers_is_over_all_ranks():
    for found in in_ranks(reads_of_split_layers, 4):
        assert found == pytest.approx(losses("item of a norm"), rel=1e-5)


def read_after_a_run(cluster):
    module = Reading("mean")
    quiet_trainer(FSDPStrategy(), cluster).fit(module, loader(16, 2))
    with pytest.raises(MisuseError, match="read it in on_train_end"):
        module.net[0].weight.norm().item()


def test_a_read_after_the_run_is_an_error():
    in_ranks(read_after_a_run)


# Tensors that functional_call passes in the place of parameters


class Adapted(nn.Module):
    """Computes with its weights after a step on a sample of ones, as MAML does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def forward(self, x):
        weights = dict(self.layers.named_parameters())
        loss = functional_call(self.layers, weights, (torch.ones_like(x[:1]),)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        adapted = {name: weights[name] - 0.1 * gradient for name, gradient in zip(weights, gradients, strict=True)}
        return functional_call(self.layers, adapted, (x,))


class Passing(TrainModule):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.how = Adapted(), how

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if self.how == "other weights":
            given = {"2.bias": torch.ones(3, device=self.device)}
            return nn.functional.mse_loss(functional_call(self.net.layers, given, (inputs,)), targets)
        output = self.net(inputs) if self.how == "in a layer" else Adapted.forward(self.net, inputs)
        return nn.functional.mse_loss(output, targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses_of_passed(cluster, how, **options):
    strategy, noted = "single_device" if cluster is None else FSDPStrategy(**options), Losses()
    try:
        quiet_trainer(strategy, cluster, callbacks=[noted]).fit(Passing(how), loader(16, 4 if cluster is None else 2))
    except MisuseError as error:
        return str(error)
    return noted.losses


def test_parameters_that_a_call_replaces_count_or_are_an_error():
    blocks = {"other weights": nn.Linear, "in the step": nn.Linear, "in a layer": Adapted}
    cases = {how: {"how": how, "auto_wrap_policy": {block}} for how, block in blocks.items()}
    for found in in_ranks(each, function=losses_of_passed, cases=cases):
        assert "called with another tensor as its parameter 'bias'" in found["other weights"]
        assert "'net.layers.2'" in found["other weights"]
        assert "auto_wrap_policy={Net}" in found["in the step"]
        assert found["in a layer"] == pytest.approx(losses_of_passed(None, "in a layer"), rel=1e-5)


class Drawing(Reading):
    """Its weights are drawn anew while they are sharded."""

    def __init__(self):
        super().__init__("mean")
        self.drawn = {}

    @torch.no_grad()
    def on_train_start(self):
        torch.manual_seed(5)
        self.net[0].reset_parameters()
        nn.init.trunc_normal_(self.net[2].weight)
        self.net[2].bias.bernoulli_(0.5)
        self.net[3].weight.uniform_(0.1, 0.2)
        self.net[0].bias.mul_(torch.bernoulli(self.net[0].bias.abs().clamp(max=1.0)))
        self.net[0].weight.add_(torch.randn_like(self.net[0].weight))
        self.net[2].weight.add_(torch.rand_like(self.net[2].weight, dtype=torch.float64))
        assert self.net[0].weight.detach().to("meta").normal_().is_meta
        values = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in self.named_parameters()}
        self.drawn = {name: value.tolist() for name, value in values.items()}


def drawn_weights(cluster=None):
    module, noted = Drawing(), Losses()
    strategy = "single_device" if cluster is None else FSDPStrategy()
    quiet_trainer(strategy, cluster, callbacks=[noted]).fit(module, loader(16, 4 if cluster is None else 2))
    return module.drawn, noted.losses


def test_values_drawn_for_shards_are_those_of_one_device():
    weights, expected = drawn_weights()
    for drawn, found in in_ranks(drawn_weights):
        assert drawn == weights
        assert found == pytest.approx(expected, rel=1e-5)


# New tensors beside a parameter


class Recurrent(TrainModule):
    """Makes its first hidden state in the dtype and on the device of a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def first_state(self, size):
        weight = next(self.cell.parameters())
        return weight.new_zeros(1, size, 5) + weight.data.new_full((1, size, 5), 0.5)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs, _ = self.cell(inputs[:, None], self.first_state(len(inputs)))
        return nn.functional.mse_loss(self.last(outputs[:, 0]), targets)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.parameters():
            parameter.add_(parameter.new_ones(parameter.shape), alpha=0.01)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RowWise(torch.optim.Optimizer):
    """Has state of other shapes than the parameters, uses parts of gradients up, and computes the loss in its step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["rows"] = parameter.new_zeros((len(parameter),) + (1,) * (parameter.dim() - 1))
            square = gradient.pow(2)
            state["rows"].mul_(0.9).add_(square.mean(1, keepdim=True) if parameter.dim() > 1 else square, alpha=0.1)
            parameter.sub_(gradient / (state["rows"].sqrt() + 1.0), alpha=0.1)
            gradient[:2].abs_()
        return loss


class RecurrentByRows(Recurrent):
    def configure_optimizers(self):
        return RowWise(self.parameters())


def losses_of_recurrent(cluster=None, module_class=Recurrent, **options):
    noted, strategy = Losses(), "single_device" if cluster is None else FSDPStrategy(**options)
    trainer = quiet_trainer(strategy, cluster, callbacks=[noted])
    trainer.fit(module_class(), loader(16, 4 if cluster is None else 2))
    return noted.losses


def test_a_first_hidden_state_is_made_beside_a_sharded_parameter():
    expected = losses_of_recurrent()
    for found in in_ranks(losses_of_recurrent, auto_wrap_policy={nn.GRU, nn.Linear}):
        assert found == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_has_state_of_rows_and_uses_gradients_up():
    expected = losses_of_recurrent(module_class=RecurrentByRows)
    options = {"module_class": RecurrentByRows, "auto_wrap_policy": {nn.GRU, nn.Linear}}
    for found in in_ranks(losses_of_recurrent, **options):
        assert found == pytest.approx(expected, rel=1e-5)
