"""Experts over ranks: ways of training, ranks without tokens, and what does not fit.

Losses, resume and moves of each layout are in test_layout_conformance.py.
"""

import logging

import pytest
import torch
from tests.hand_loop import BlockNet, Run, batches, one_pass, parts, single_device_losses, start, train
from tests.ranks import each, in_ranks
from tests.ways_of_training import SHORT
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat import Pipeline
from dstrat.errors import DstratError, RequestError
from dstrat_mesh import MeshStrategy

WIDTH, EXPERTS = 10, 6


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.parameters(recurse=False):
            for expert in range(self.num_experts):
                nn.init.normal_(parameter[expert], std=0.3)

    def forward(self, tokens, index, weights):
        assert self.num_experts == len(self.weight) > int(index.max())
        computed = torch.einsum("tw,tkwo->tko", tokens, self.weight[index]) + self.bias[index]
        return (torch.tanh(computed) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x):
        assert self.experts.num_experts == EXPERTS  # also where this rank has a share of them
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


class MixtureNet(BlockNet):
    def make_layers(self):
        super().make_layers()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))

    def layers(self, x):
        x = self.first(x)
        for layer in (*self.blocks, *self.mixtures):
            x = layer(x)
        return self.last(x)

    def configure_experts(self):
        return [mixture.experts for mixture in self.mixtures]

    def configure_pipeline(self):
        layers = [self.first, *self.blocks, *self.mixtures, self.last]
        return Pipeline(model=self, layers=layers, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))


class NormedExperts(Experts):
    """Has no gradient at zero."""

    def forward(self, tokens, index, weights):
        return super().forward(tokens / tokens.norm(dim=-1, keepdim=True), index, weights)


class OneExpertNet(MixtureNet):
    """All tokens go to the same two experts, those of the first rank."""

    def make_layers(self):
        super().make_layers()
        for mixture in self.mixtures:
            mixture.experts = NormedExperts()
            mixture.router.bias.requires_grad_(False).copy_(torch.tensor([50.0, 49.0, 0, 0, 0, 0]))


def started(cluster, module_class="MixtureNet", meta=False, **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    if meta:
        with strategy.model_sharded_context():
            module = globals()[module_class]()
    else:
        module = globals()[module_class]()
    strategy.connect(module)
    strategy.setup(Run(module))
    return strategy


def losses(cluster, training=SHORT, **options):
    strategy = started(cluster, **options)
    found = train(strategy, **training)
    module = strategy.module
    strategy.teardown()
    layer = module.mixtures[0].experts
    return found, layer.num_experts, "forward" in vars(layer)


WAYS = {
    "accumulation, clipping, experts that compute again": {
        "training": {"accumulate": 2, "clip": 0.05, **SHORT},
        "activation_checkpointing": Experts,
    },
    "experts as blocks that are made without memory, in layers that compute again": {
        "activation_checkpointing": Mixture,
        "auto_wrap_policy": Experts,
        "meta": True,
    },
    "ranks without tokens": {
        "training": {"clip": 0.05, **SHORT},
        "module_class": "OneExpertNet",
        "reshard_after_forward": False,
    },
}


def one_device(training=SHORT, module_class="MixtureNet", **_):
    return pytest.approx(single_device_losses(globals()[module_class](), **training), rel=1e-6, abs=0), EXPERTS, False


def test_losses_are_those_of_one_device():
    expected = {way: one_device(**options) for way, options in WAYS.items()}
    for found in in_ranks(each, 2, function=losses, cases={way: {"ep": 2, **options} for way, options in WAYS.items()}):
        assert found == expected


LAYOUTS = [{"ep": 2, "dp_replicate": 2}, {"ep": 2, "dp_shard": 4}, {"ep": 2, "pp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_experts_go_together_with_other_axes(way):
    cases = {str(layout): {**layout, **WAYS[way]} for layout in LAYOUTS}
    for found in in_ranks(each, 4, function=losses, cases=cases):
        assert found == dict.fromkeys(cases, one_device(**WAYS[way]))


class Opposed(nn.Module):
    """Two experts, whose outputs differ in their sign."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([[256.0], [-256.0]]))

    def forward(self, tokens, index, weights):
        return (tokens.unsqueeze(1) * self.factors[index] * weights.unsqueeze(-1)).sum(1)


class OpposedNet(MixtureNet):
    def make_layers(self):
        self.experts = Opposed()

    def layers(self, x):
        weights = torch.tensor([1 + 2**-10, 1], device=x.device)  # the same in bfloat16
        return self.experts(
            torch.ones_like(x), torch.arange(2, device=x.device).expand(len(x), 2), weights.expand(len(x), 2)
        )

    def configure_experts(self):
        return [self.experts]


def output_in_mixed_precision(cluster):
    strategy = MeshStrategy(ep=2)
    start(strategy, OpposedNet(), parts(cluster, precision="bf16-mixed"))
    output = strategy.run_step("predict_step", strategy.module.layers, strategy.from_host(torch.ones(4, 6)))
    strategy.teardown()
    return output.unique().tolist()


def test_weights_stay_in_their_precision():
    assert in_ranks(output_in_mixed_precision) == [[0.25], [0.25]]


def warnings_of_moved_gradients(cluster, saved, loaded):
    strategy = started(cluster, **saved)
    with strategy.no_backward_sync():
        one_pass(strategy, next(batches()), 0, 1)
    state = strategy.rank_state()
    strategy.teardown()
    strategy, told = started(cluster, **loaded), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dstrat_fsdp").addHandler(handler)
    strategy.load_rank_state(state)
    logging.getLogger("dstrat_fsdp").removeHandler(handler)
    strategy.teardown()
    return told


def test_gradients_that_wait_for_other_experts_or_stages_are_left_out_and_one_line_says_so():
    cases = {
        "mesh [1, 1, 2, 1], ep 2, stages 1: with mesh [1, 1, 2, 1], ep 1, stages 1 they are dropped": {
            "saved": {"ep": 2},
            "loaded": {},
        },
        "mesh [2, 1, 1, 1], ep 1, stages 2: with mesh [2, 1, 1, 1], ep 1, stages 4 they are dropped": {
            "saved": {"pp": 2},
            "loaded": {"pp": 2, "schedule": "LoopedBFS"},
        },
    }
    first, other = in_ranks(each, 2, function=warnings_of_moved_gradients, cases=cases)
    for expected, [line] in first.items():
        assert line.endswith(f"when it was saved, with {expected}")
    assert not any(other.values())


# What does not fit is refused


class NamesNone(MixtureNet):
    def configure_experts(self):
        return []


class OneBias(MixtureNet):
    def make_layers(self):
        super().make_layers()
        self.mixtures[0].experts.scale = nn.Parameter(torch.ones(3))


class NamesOne(MixtureNet):
    def configure_experts(self):
        return self.mixtures[0].experts


class Listed(MixtureNet):
    """Has each expert as a layer, whose first dimension is not the experts."""

    def make_layers(self):
        super().make_layers()
        experts = self.mixtures[0].experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)])
        experts.num_experts = 1


class Unrouted(MixtureNet):
    def layers(self, x):
        self.mixtures[0].experts(x.unsqueeze(1), torch.zeros(len(x), 1), torch.ones(len(x), 1))


class DroppingExperts(Experts):
    def forward(self, tokens, index, weights):
        return nn.functional.dropout(super().forward(tokens, index, weights), 0.5, self.training)


class DroppingNet(MixtureNet):
    def make_layers(self):
        super().make_layers()
        for mixture in self.mixtures:
            mixture.experts = DroppingExperts()


def error_of_random_experts(cluster):
    strategy = MeshStrategy(tp=2, ep=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    net = DroppingNet()
    for block in net.blocks:
        parallelize_module(block, strategy.device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    strategy.connect(net)
    strategy.setup(Run(net))
    with pytest.raises(DstratError) as error:
        strategy.training_step((torch.ones(4, 6), torch.ones(4, 3)), 0)
    strategy.barrier()  # the other rank may still exchange tokens
    strategy.teardown()
    return str(error.value)


def test_experts_that_draw_random_numbers_are_refused_with_tensor_parallelism():
    for message in in_ranks(error_of_random_experts):
        assert message.startswith("the experts 'mixtures.0.experts' draw random numbers, such as for dropout, which ep")


def refusal(cluster, module_class, **options):
    strategy = MeshStrategy(**options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    strategy.connect(globals()[module_class]())
    try:
        strategy.setup(Run(strategy.module))
        strategy.training_step((torch.ones(4, 6), torch.ones(4, 3)), 0)
    except DstratError as error:
        return str(error)
    finally:
        strategy.teardown()


def test_what_experts_cannot_do_is_refused():
    cases = {
        "BlockNet has no configure_experts, which experts (ep) need": {"module_class": "BlockNet", "ep": 2},
        "configure_experts of NamesNone returned no layer": {"module_class": "NamesNone", "ep": 2},
        "configure_experts of NamesOne returned one Experts: return a list, such as [block.experts for": {
            "module_class": "NamesOne",
            "ep": 2,
        },
        "the experts 'mixtures.0.experts' (ModuleList) have num_experts=1 and mixtures.0.experts.0.weight (10, 10): "
        "each needs": {"module_class": "Listed", "ep": 2},
        "the experts 'mixtures.0.experts' (Experts) have num_experts=6 and mixtures.0.experts.weight (6, 10, 10), "
        "mixtures.0.experts.bias (6, 10), mixtures.0.experts.scale (3,): each needs": {
            "module_class": "OneBias",
            "ep": 2,
        },
        "mixtures.0.experts was called with a Tensor of shape (4, 1, 6), an index of (4, 1)": {
            "module_class": "Unrouted",
            "ep": 2,
        },
        "the 4 ranks of ep do not divide the 6 experts of 'mixtures.0.experts': choose ep among 1, 2, 3, 6": {
            "module_class": "MixtureNet",
            "ep": 4,
        },
    }
    for found in in_ranks(each, 4, function=refusal, cases=cases):
        for expected, message in found.items():
            assert message.startswith(expected)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (4, {"ep": 3}, "ep=3 does not divide the 4 ranks of dp_shard * cp * tp (a replica, or its stage): choose ep=2"),
        (8, {"ep": 2, "tp": 4}, "ep=2 is no multiple of tp=4, whose ranks have the same tokens: choose ep=4 or 8"),
        (4, {"ep": 4, "pp": 2}, "choose ep=2"),
        (2, {"ep": 2, "dp_replicate": 2}, "leave ep out"),
        (2, {"ep": 0}, "ep=0 is not a positive number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(ranks, sizes, message):
    with pytest.raises(RequestError) as error:
        MeshStrategy(**sizes).describe_layout(ranks, ranks)
    assert message in str(error.value)


def test_the_plan_shows_the_groups_of_experts():
    rows = {subject.strip(): value for subject, value, _ in MeshStrategy(ep=4, tp=2, pp=2).describe_layout(16, 16)}
    assert rows["mesh"] == "pp 2 x dp_shard 4 x tp 2"
    assert rows["ep"] == "[0, 1, 2, 3] [4, 5, 6, 7] [8, 9, 10, 11] [12, 13, 14, 15]"


class TiedExperts(Experts):
    """A sublayer has one of the parameters too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = self.weight


class TiedNet(MixtureNet):
    def make_layers(self):
        super().make_layers()
        self.mixtures[0].experts = TiedExperts()


def is_tied(cluster):
    strategy = started(cluster, "TiedNet", ep=2)
    layer = strategy.module.mixtures[0].experts
    tied = layer.inner.weight is layer.weight
    train(strategy, **SHORT)
    strategy.teardown()
    return tied, layer.inner.weight is layer.weight


def test_a_parameter_of_two_sublayers_of_experts_stays_shared():
    assert in_ranks(is_tied) == [(True, True)] * 2


def held(cluster, **options):
    strategy = started(cluster, **options)
    counts = {
        name: parameter.to_local().numel()
        for name, parameter in strategy.module.named_parameters()
        if "experts" in name
    }
    strategy.teardown()
    return counts


def test_a_rank_has_its_share_of_the_experts_only():
    whole = {name: parameter.numel() for name, parameter in MixtureNet().named_parameters() if "experts" in name}
    for counts in in_ranks(held, 2, ep=2):
        assert counts == {name: numel // 2 for name, numel in whole.items()}
