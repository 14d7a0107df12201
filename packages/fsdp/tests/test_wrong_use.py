"""What cannot work says so, and what torch would lose silently is either kept or told."""

import copy
import logging
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.hand_loop import (
    Block,
    BlockNet,
    Run,
    batches,
    misuse_in_a_step,
    one_pass,
    parts,
    single_device_losses,
    start,
    train,
)
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, loader, quiet_trainer
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributions import Independent, Normal

from dstrat import TrainModule
from dstrat.errors import ConflictError, DstratError, MisuseError, RequestError
from dstrat.interfaces.optimizers import Optimization
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy
from dstrat_fsdp.gradients import clip_by_value
from dstrat_fsdp.mesh import parallel_sizes, sharding_mesh_shape


class Sharing(BlockNet):
    def configure_optimizers(self):
        return None


class Early(BlockNet):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.optimizer


class OwnLayout(BlockNet):
    class Counting(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "steps": 0}

    def configure_optimizers(self):
        return self.Counting(self.parameters(), lr=0.1)


class PartlyEarly(BlockNet):
    def __init__(self):
        super().__init__()
        self.taken = [self.last.weight]

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.first.parameters()}, {"params": self.taken}], lr=0.1)


class ReturnsViews(BlockNet):
    class ViewBlock(Block):
        def forward(self, x):
            return super().forward(x).view(-1, 10)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.ViewBlock(10) for _ in range(3))

    def layers(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.last(x)


class ChangesItself(BlockNet):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class ChangesABlock(BlockNet):
    class Changing(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Changing(10) for _ in range(3))


class ChangesLater(BlockNet):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.steps == 2:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class ChangesABlockLater(ChangesABlock):
    class Changing(Block):
        steps = 0

        def forward(self, x):
            self.steps += 1
            if self.steps == 2:
                with torch.no_grad():
                    self.up.weight.clamp_(-0.01, 0.01)
            return super().forward(x)


class HasTwoDtypes(BlockNet):
    def __init__(self):
        super().__init__()
        self.exact = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)  # which may differ


class PenalizesWeights(BlockNet):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class Renormalizing(torch.optim.SGD):
    """Does what torch cannot do with shards."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(torch.renorm(parameter, p=2, dim=0, maxnorm=1.0))


class StepsWholeParameters(BlockNet):
    def configure_optimizers(self):
        return Renormalizing(self.parameters(), lr=0.1)


def complaint(cluster, module="BlockNet", **options):
    """What setting up and training for three steps says."""
    strategy = FSDPStrategy(**options)
    try:
        start(strategy, globals()[module](), parts(cluster))
        train(strategy, steps=3)
    except DstratError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()
        if torch.accelerator.is_available():  # what a failed step has begun reads shards whose memory is free
            torch.accelerator.synchronize()
    return None


def two_optimizers(cluster):
    strategy = FSDPStrategy()
    strategy.receive(parts(cluster))
    module = BlockNet()
    strategy.connect(module)
    strategy.setup_environment()

    class Run:
        is_fitting = True

        def configure_optimizers(self):
            shared = [module.last.weight]
            return Optimization(
                optimizers=(torch.optim.SGD([*module.first.parameters(), *shared]), torch.optim.SGD(shared))
            )

    try:
        strategy.setup(Run())
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_two_optimizers_may_not_share_a_parameter():
    [message] = in_ranks(two_optimizers, 1)
    assert message.startswith("optimizers 0 and 1 share the parameter 'last.weight', and both would apply its gradient")


def test_modules_that_cannot_work_are_told_of():
    modules = (
        "Early",
        "PartlyEarly",
        "OwnLayout",
        "ChangesItself",
        "ChangesABlock",
        "ChangesLater",
        "ChangesABlockLater",
    )
    for found in in_ranks(each, function=complaint, cases={name: {"module": name} for name in modules}):
        early, partly, own_layout, *changed, outside, in_a_block = found.values()
        assert early.startswith(
            "MisuseError: the SGD has 22 of 22 parameters that are none of Early's, such as those that were"
        )
        assert partly.startswith("MisuseError: the SGD has 1 of 3 parameters that are none of PartlyEarly's")
        assert own_layout.startswith("MisuseError: the state_dict of Counting has a layout of its own (steps), which")
        for message, name in zip(changed, ("first.weight", "blocks.0.up.weight"), strict=True):
            assert message.startswith(f"MisuseError: parameter {name!r} was changed in a forward pass")
        assert outside.startswith("MisuseError: parameter 'first.weight' was changed in the step before, while it was")
        assert in_a_block.startswith("MisuseError: parameter 'blocks.0.up.weight' was changed in the step before")


class HasHook(BlockNet):
    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.register_hook(torch.zeros_like)


class HasLaterHook(BlockNet):
    def __init__(self):
        super().__init__()
        self.last.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())


class StartsFromZeros(BlockNet):
    """Makes an input of a block of its weight."""

    def training_step(self, batch, batch_idx):
        hidden = torch.zeros_like(self.blocks[0].up.weight)
        return self.blocks[1](hidden).square().mean()


CANNOT_BE_SHARDED = {
    "HasHook": "parameter 'blocks.1.up.weight' has a hook on its gradient (register_hook), and FSDPStrategy",
    "HasLaterHook": "parameter 'last.bias' has a hook on its gradient",
    "HasTwoDtypes": "parameters 'first.weight' of torch.float32 and 'exact' of torch.float64 are gathered together",
    "PenalizesWeights": "a step computes with the parameters of a block outside of the block's forward",
    "StepsWholeParameters": "Renormalizing cannot step parameters as FSDPStrategy shards them (",
}


def test_what_torch_cannot_shard_is_told_of():
    for found in in_ranks(each, function=complaint, cases={name: {"module": name} for name in CANNOT_BE_SHARDED}):
        for name, message in CANNOT_BE_SHARDED.items():
            assert found[name].startswith(f"MisuseError: {message}")


def test_an_input_made_of_a_sharded_parameter_is_told_of():
    for message in in_ranks(complaint, module="StartsFromZeros"):
        assert "An input that zeros_like has made of a parameter" in message


class Marked(BlockNet):
    """Reads in configure_optimizers what its parameters were marked with."""

    def __init__(self):
        super().__init__()
        self.scale = Scaling()
        for parameter in (self.first.weight, self.blocks[0].up.bias, self.scale.scale):
            parameter.decays = False

    def configure_optimizers(self):
        self.marked = [name for name, parameter in self.named_parameters() if not getattr(parameter, "decays", True)]
        return super().configure_optimizers()


def marks(cluster, meta):
    """Return the marked parameters of two runs, of which an evaluation comes first."""
    strategy = FSDPStrategy()
    strategy.receive(parts(cluster))
    with strategy.model_sharded_context() if meta else nullcontext():
        module = Marked()
    found = []
    for is_fitting in (False, True, True):
        strategy.setup_environment()
        strategy.connect(module)
        strategy.setup(Run(module, is_fitting))
        found.append(getattr(module, "marked", None))
        strategy.teardown()
    return found


@pytest.mark.parametrize("meta", [False, True])
def test_attributes_of_parameters_stay(meta):
    marked = ["first.weight", "blocks.0.up.bias", "scale.scale"]
    for found in in_ranks(marks, meta=meta):
        assert found == [None, marked, marked]


def replaced(cluster):
    strategy = FSDPStrategy()
    module = BlockNet()
    start(strategy, module, parts(cluster))
    train(strategy, steps=1)
    with torch.no_grad():
        module.first.weight.mul_(0.5)  # in place is fine
    train(strategy, steps=1)
    module.last.weight = nn.Parameter(torch.zeros(3, 10))
    return misuse_in_a_step(strategy)


def test_a_parameter_that_is_replaced_is_named():
    for message in in_ranks(replaced):
        assert message.startswith("parameter 'last.weight' was replaced after the module was sharded")


def assigned(cluster):
    messages = []
    for before_training in (True, False):
        strategy, module = FSDPStrategy(), BlockNet()
        start(strategy, module, parts(cluster))
        if before_training:
            module.last.weight.data = module.last.weight.data * 0.5
        else:
            train(strategy, steps=1)
            module.blocks[0].up.bias.data = module.blocks[0].up.bias.data * 0.5
        messages.append(misuse_in_a_step(strategy))
    return messages


def test_an_assignment_to_the_data_of_a_shard_is_refused():
    for messages in in_ranks(assigned):
        for name, message in zip(("last.weight", "blocks.0.up.bias"), messages, strict=True):
            assert message.startswith(f"parameter '{name}' was changed by an assignment to its .data")


PARTS = (
    lambda p: p[0].zero_(),
    lambda p: p.data[0].fill_(1.0),
    lambda p: p.detach()[1:3].mul_(2.0),
    lambda p: p.data[:2].copy_(p.data[2:4]),
    lambda p: p.view(-1)[3].fill_(1.0),
    lambda p: p.chunk(2)[1].zero_(),
    lambda p: p.data.diagonal().add_(1.0),
    lambda p: p.narrow(0, 1, 2)[0].zero_(),
)


def written_in_part(cluster):
    strategy, module = FSDPStrategy(), BlockNet()
    start(strategy, module, parts(cluster))
    train(strategy, steps=1)
    weight, messages = module.blocks[0].up.weight, []
    with torch.no_grad():
        for write in PARTS:
            with pytest.raises(MisuseError) as caught:
                write(weight)
            messages.append(str(caught.value))
        rows = weight[:2].full_tensor().clone()
        before = weight.full_tensor().clone()
        weight[:, 0].zero_()  # each rank has its rows of it
        weight.mul_(2.0)
        difference = weight.full_tensor() - 2 * before
    train(strategy, steps=1)
    return messages, torch.equal(rows, before[:2]), bool(difference[:, 0].abs().min() > 0), not difference[:, 1:].any()


def test_a_write_to_a_part_of_a_shard_is_refused_where_torch_loses_it():
    for messages, *results in in_ranks(written_in_part):
        assert all("of a part of parameter 'blocks.0.up.weight' has no effect" in message for message in messages)
        assert all(results)


def write_rows_of_mask(weight):
    mask = torch.ones_like(weight.detach())
    mask[:2].fill_(0.5)
    weight.grad.mul_(mask)


def write_sharded_mask(weight):
    mask = torch.ones(weight.shape)
    mask[:2] = 0.5
    weight.grad.mul_(distribute_tensor(mask, weight.device_mesh, weight.placements))


CHANGES_OF_GRADIENTS = {
    "rows": lambda weight: weight.grad[:2].zero_(),
    "one row": lambda weight: weight.grad[0].mul_(2.0),
    "rows of data": lambda weight: weight.grad.data[1:].fill_(0.0),
    "assigned rows": lambda weight: weight.grad.__setitem__(0, 0.0),
    "rows of a mask": write_rows_of_mask,
    "data": lambda weight: setattr(weight.grad, "data", weight.grad.data * 0.5),
    "a sharded mask": write_sharded_mask,
    "a copy of a row": lambda weight: weight.grad[0].clone().mul_(2.0),
    "columns": lambda weight: weight.grad[:, 0].zero_(),
}


class ChangingGradients(TrainModule):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(6, 3), CHANGES_OF_GRADIENTS[change]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.world_size > 1 or self.change is not write_sharded_mask:
            self.change(self.layer.weight)
        else:
            self.layer.weight.grad[:2] *= 0.5

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def losses_with_changed_gradients(cluster, change):
    strategy, noted = "single_device" if cluster is None else FSDPStrategy(), Losses()
    trainer = quiet_trainer(strategy, cluster, callbacks=[noted])
    try:
        trainer.fit(ChangingGradients(change), loader(16, 4 if cluster is None else 2))
    except MisuseError as error:
        return str(error)
    return noted.losses


def test_a_change_of_gradients_counts_or_is_refused():
    cases = {change: {"change": change} for change in CHANGES_OF_GRADIENTS}
    for found in in_ranks(each, function=losses_with_changed_gradients, cases=cases):
        message = found.pop("data")
        assert message.startswith("the gradient of 'layer.weight' was changed by an assignment to its .data")
        for change in ("a sharded mask", "a copy of a row", "columns"):
            assert found.pop(change) == pytest.approx(losses_with_changed_gradients(None, change), rel=1e-5)
        assert all("of a part of a sharded tensor has no effect" in message for message in found.values())


class Penalized(BlockNet):
    """A step whose loss has the norm of a gradient."""

    def training_step(self, batch, batch_idx):
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()


def penalized(cluster):
    strategy = FSDPStrategy(auto_wrap_policy={Block})
    start(strategy, Penalized(), parts(cluster))
    return misuse_in_a_step(strategy)


def test_a_gradient_of_blocks_in_the_loss_is_refused():
    for message in in_ranks(penalized):
        assert message.startswith("a step computes gradients within its forward pass")


def penalized_as_one_block(cluster):
    strategy = FSDPStrategy(auto_wrap_policy={Penalized})
    start(strategy, Penalized(), parts(cluster))
    losses = train(strategy, steps=3)
    strategy.teardown()
    return losses


def test_a_module_that_is_one_block_may_compute_gradients_in_steps():
    expected = single_device_losses(Penalized(), steps=3)
    for losses in in_ranks(penalized_as_one_block):
        assert losses == pytest.approx(expected, rel=1e-6)


def copied(cluster):
    strategy = FSDPStrategy()
    module = BlockNet()
    start(strategy, module, parts(cluster))
    try:
        copy.deepcopy(module)
    except MisuseError as error:
        message = str(error)
    finally:
        strategy.teardown()
    copy.deepcopy(module)  # as any module, when the run has ended
    return message


def test_a_copy_of_a_sharded_module_is_refused_with_advice():
    for message in in_ranks(copied):
        assert message.startswith("a module cannot be copied while it is sharded: for an average of its weights (EMA)")


def with_views(cluster):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("dstrat_fsdp").addHandler(handler)
    logging.getLogger("dstrat_fsdp").setLevel(logging.INFO)
    strategy = FSDPStrategy()
    start(strategy, ReturnsViews(), parts(cluster))
    losses = train(strategy, steps=3)
    strategy.teardown()
    return losses, sorted(records)


def test_blocks_may_return_views_which_are_copied():
    expected = single_device_losses(ReturnsViews(), steps=3)
    for losses, records in in_ranks(with_views):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert len(records) == 3
        assert records[0].startswith("block 'blocks.0' returns a view, which is copied in each step")


class Labelled(torch.Tensor):
    """A tensor with an attribute, which its clone reads, and the results of operations lack."""

    def clone(self, **options):
        copied = super().clone(**options)
        copied.labels = self.labels
        return copied


class ReturnsLabelledViews(ReturnsViews):
    class ViewBlock(Block):
        def forward(self, x):
            return super().forward(x).as_subclass(Labelled).view(-1, 10)

    def layers(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).as_subclass(torch.Tensor)


def with_labelled_views(cluster):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of in-place operations, which this module has not
    strategy = FSDPStrategy()
    start(strategy, ReturnsLabelledViews(), parts(cluster))
    losses = train(strategy, steps=3)
    strategy.teardown()
    return [float(loss) for loss in losses]


def test_views_may_be_tensors_whose_clone_reads_attributes():
    expected = single_device_losses(ReturnsLabelledViews(), steps=3)
    for losses in in_ranks(with_labelled_views):
        assert losses == pytest.approx([float(loss) for loss in expected], rel=1e-6)


class ReturnsDistributions(BlockNet):
    """A network whose blocks return their results in objects, as policies do that return a distribution."""

    class Policy(Block):
        def forward(self, x):
            return Independent(Normal(super().forward(x), 1.0), 1)

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(self.Policy(10) for _ in range(3))

    def layers(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).base_dist.loc
        return self.last(x)


def with_distributions(cluster):
    strategy = FSDPStrategy(auto_wrap_policy={Block})
    start(strategy, ReturnsDistributions(), parts(cluster))
    losses = train(strategy, steps=3)
    strategy.teardown()
    return losses


def test_blocks_may_return_objects_that_hold_tensors():
    expected = single_device_losses(ReturnsDistributions(), steps=3)
    for losses in in_ranks(with_distributions):
        assert losses == pytest.approx(expected, rel=1e-6)


class PassesAnObjectOn(BlockNet):
    """A network whose blocks add their results to an object that passes through all of them, as to a cache."""

    class Adding(Block):
        def forward(self, x, cache):
            cache.features.append(2.0 * super().forward(x))
            return cache

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(self.Adding(10) for _ in range(3))
        self.sharded = []

    def layers(self, x):
        x, cache = self.first(x), SimpleNamespace(features=[])
        x.register_hook(lambda _: self.sharded.append([isinstance(b.up.weight, DTensor) for b in self.blocks]))
        for block in self.blocks:
            cache = block(x, cache)
            x = cache.features[-1]
        return self.last(sum(cache.features))


def with_object_passed_on(cluster):
    strategy = FSDPStrategy(auto_wrap_policy={Block})
    network = PassesAnObjectOn()
    start(strategy, network, parts(cluster))
    losses = train(strategy, steps=3)
    strategy.barrier()
    strategy.teardown()
    return losses, network.sharded


def test_an_object_that_passes_through_blocks_gathers_none_again():
    expected = single_device_losses(PassesAnObjectOn(), steps=3)
    for losses, sharded in in_ranks(with_object_passed_on):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert all(later == [True, True] for _, *later in sharded)


class KeepsOutputs(BlockNet):
    class Keeping(Block):
        def forward(self, x):
            self.features = super().forward(x)
            return self.features.detach()

    def make_layers(self):
        super().make_layers()
        self.blocks = nn.ModuleList(self.Keeping(10) for _ in range(3))

    def layers(self, x):
        for block in self.blocks:
            block(self.first(x))
        return self.last(sum(block.features for block in self.blocks))


def with_kept_outputs(cluster):
    strategy = FSDPStrategy(auto_wrap_policy={Block})
    start(strategy, KeepsOutputs(), parts(cluster))
    return misuse_in_a_step(strategy)


def test_a_loss_of_what_blocks_keep_is_explained():
    for message in in_ranks(with_kept_outputs):
        assert "a tensor that a block keeps (self.features = x) and does not return" in message


def alone(cluster):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("dstrat_fsdp").addHandler(handler)
    logging.getLogger("dstrat_fsdp").setLevel(logging.INFO)
    strategy = FSDPStrategy()
    start(strategy, BlockNet(), parts(cluster))
    strategy.teardown()
    return records


def test_one_process_works_and_says_that_nothing_is_shared():
    assert in_ranks(alone, 1) == [["there is one process, so that nothing is sharded"]]


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.scale)


def split_scalar(cluster):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    module = BlockNet()
    module.scaling = Scaling()
    parallelize_module(module.scaling, strategy.device_mesh["tensor_parallel"], SequenceParallel())
    strategy.connect(module)
    try:
        strategy.setup(Run(module))
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_a_scalar_of_a_split_layer_is_refused():
    for message in in_ranks(split_scalar):
        assert message == (
            "parameter 'scaling.scale' is a scalar in a layer that is split over ranks, which cannot be sharded too: "
            "give it the shape (1,)"
        )


def not_split(cluster):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    try:
        start(strategy, BlockNet(), parts(cluster))
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_tensor_parallelism_without_layers_that_are_split_is_refused():
    for message in in_ranks(not_split):
        assert message.startswith("no layer of BlockNet is split over the 2 ranks of tensor_parallel_size: call")


def summands(cluster):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    strategy = FSDPStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    mesh = init_device_mesh("cpu", (cluster.world_size,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        clip_by_value([parameter], 0.5)
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_values_that_are_not_summed_yet_are_not_clipped():
    for message in in_ranks(summands):
        assert message.startswith("a gradient is not summed over the ranks yet, so that it cannot be clipped")


def test_a_step_before_setup_says_what_is_missing():
    with pytest.raises(MisuseError, match="FSDPStrategy has no device mesh yet"):
        _ = FSDPStrategy().device_mesh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_strategy": "ZERO"}, "sharding_strategy 'ZERO' is not one of 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ({"backward_prefetch": "never"}, "backward_prefetch 'never' is not one of 'BACKWARD_PRE', 'BACKWARD_POST'"),
        ({"state_dict_type": "local"}, "state_dict_type 'local' is not one of 'sharded', 'full'"),
        (
            {"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}},
            "both select layers",
        ),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "reshard_after_forward=False"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, message):
    with pytest.raises(RequestError, match=message):
        FSDPStrategy(**options)


def test_torchs_own_enumerations_are_understood():
    strategy = FSDPStrategy(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, cpu_offload=CPUOffload(offload_params=True)
    )
    strategy.receive(parts())
    from dstrat_fsdp.options import offload_policy

    assert offload_policy(strategy._cpu_offload, torch.device("cpu")) == CPUOffloadPolicy(pin_memory=False)
    assert strategy._reshard_after_forward is False


@pytest.mark.parametrize(
    ("sharding", "mesh", "shape"),
    [
        (None, None, (8,)),
        ("HYBRID_SHARD", None, (2, 4)),
        ("NO_SHARD", None, (8, 1)),
        (None, (4, 2), (4, 2)),
        ("HYBRID_SHARD", (4, 2), (4, 2)),
        ("FULL_SHARD", (8,), (8,)),
    ],
)
def test_the_mesh_follows_from_the_sharding_strategy_or_is_given(sharding, mesh, shape):
    assert sharding_mesh_shape(sharding, mesh, world_size=8, per_machine=4) == shape


@pytest.mark.parametrize(
    ("sharding", "mesh", "kind", "message"),
    [
        (None, (3, 2), RequestError, r"device_mesh \(3, 2\) has 6 processes, and the job has 8"),
        (None, (2, 2, 2), RequestError, r"has 3 dimensions: give \(shards,\) or \(replicas, shards\)"),
        ("FULL_SHARD", (2, 4), ConflictError, "'FULL_SHARD' does not fit device_mesh"),
        ("HYBRID_SHARD", (8,), ConflictError, "'HYBRID_SHARD' does not fit device_mesh"),
        ("NO_SHARD", (8,), ConflictError, "'NO_SHARD' does not fit device_mesh"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(sharding, mesh, kind, message):
    with pytest.raises(kind, match=message):
        sharding_mesh_shape(sharding, mesh, world_size=8, per_machine=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_wrap_policy": "Block"}, "auto_wrap_policy 'Block' is not a class of layers such as"),
        ({"auto_wrap_policy": [nn.Linear(1, 1)]}, "a function that returns whether it selects a module, or the least"),
        ({"auto_wrap_policy": True}, "auto_wrap_policy True is not"),
        ({"activation_checkpointing": 3}, "activation_checkpointing 3 is not 'full', 'selective', a class of layers"),
        ({"activation_checkpointing_policy": "x"}, "activation_checkpointing_policy 'x' is not"),
        ({"device_mesh": 2}, r"device_mesh 2 is not a tuple of positive numbers, such as \(2, 4\)"),
        ({"device_mesh": (0, 8)}, "is not a tuple of positive numbers"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward 'yes' is not True, False or a number of ranks"),
        ({"auto_wrap_polcy": None}, "has no option 'auto_wrap_polcy': did you mean 'auto_wrap_policy'"),
        ({"use_orig_params": True}, "has no option 'use_orig_params': with torch's fully_shard parameters always"),
    ],
)
def test_an_option_of_another_kind_is_refused_at_once(options, message):
    with pytest.raises(RequestError, match=message):
        FSDPStrategy(**options)


def test_a_smaller_mesh_has_to_divide_the_ranks():
    for message in in_ranks(complaint, reshard_after_forward=3):
        assert message.startswith("RequestError: reshard_after_forward 3 does not divide the 2 ranks")


def test_one_class_of_layers_is_a_policy():
    [(chosen,)] = [FSDPStrategy(auto_wrap_policy=Block)._auto_wrap_policy]
    assert chosen is Block


@pytest.mark.parametrize(
    ("data", "tensor", "sizes"),
    [("auto", "auto", (2, 4)), (4, "auto", (4, 2)), ("auto", 2, (4, 2)), (8, 1, (8, 1)), (1, 8, (1, 8))],
)
def test_either_size_of_model_parallelism_follows_from_the_other(data, tensor, sizes):
    assert parallel_sizes(data, tensor, world_size=8, per_machine=4) == sizes


@pytest.mark.parametrize(("data", "tensor"), [(3, "auto"), (2, 2), ("auto", 16), (0, 8), ("all", 1)])
def test_sizes_that_do_not_fit_are_refused(data, tensor):
    with pytest.raises(RequestError, match=r"do not fit 8 processes|is not 'auto' or a positive number"):
        parallel_sizes(data, tensor, world_size=8, per_machine=4)


def test_activation_checkpointing_that_matches_nothing_is_refused():
    [message] = in_ranks(nothing_to_checkpoint, 1)
    assert "matches no layer of BlockNet" in message


def nothing_to_checkpoint(cluster):
    return complaint(cluster, activation_checkpointing=nn.LSTM)


class Manual(BlockNet):
    """Two optimizers, stepped in turn inside of the step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        losses = []
        for optimizer in self.strategy.optimizers:
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.strategy.backward(loss)
            self.strategy.clip_gradients(optimizer, 0.1)
            optimizer.step()
            losses.append(loss.detach())
        return sum(losses)


def manual_losses(cluster):
    from dstrat.builtin.single_device import SingleDeviceStrategy

    strategy = FSDPStrategy() if cluster else SingleDeviceStrategy()
    module = Manual()
    module.strategy = strategy
    strategy.receive(parts(cluster))
    strategy.connect(module)
    strategy.setup_environment()

    class Run:
        is_fitting = True

        def configure_optimizers(self):
            halves = ([*module.first.parameters(), *module.blocks[0].parameters()], [*module.last.parameters()])
            return Optimization(optimizers=tuple(torch.optim.Adam(half, lr=0.01) for half in halves))

    strategy.setup(Run())
    losses = []
    for index, batch in enumerate(batches(10)):
        where = {"rank": 0, "num_replicas": 1} | strategy.distributed_sampler_kwargs
        mine = tuple(tensor[where["rank"] :: where["num_replicas"]] for tensor in batch)
        losses.append(float(strategy.reduce(strategy.training_step(strategy.batch_to_device(mine), index))))
    strategy.teardown()
    return losses


def test_steps_that_optimize_by_themselves_give_the_losses_of_one_device():
    expected = manual_losses(None)
    for losses in in_ranks(manual_losses):
        assert losses == pytest.approx(expected, rel=1e-6)


def unused(cluster):
    strategy = FSDPStrategy()
    module = BlockNet()
    module.never = nn.Linear(2, 2)
    start(strategy, module, parts(cluster))
    losses = [float(strategy.reduce(one_pass(strategy, batch, 0, 1))) for batch in batches(2)]
    strategy.teardown()
    return losses, module.never.weight.grad is None


def test_parameters_without_a_gradient_are_left_alone():
    for losses, without in in_ranks(unused):
        assert len(losses) == 2
        assert without


class ComputesByData(BlockNet):
    """Computes one of two blocks, or all in one of two orders, or uses one of two parameters, as a rank's data says."""

    def __init__(self, way, branch):
        super().__init__()
        self.way, self.branch = way, branch
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))])

    def layers(self, x):
        x = self.first(x)
        if self.way == "parameter":
            x = x * self.scales[self.branch]
        blocks = {
            "block": [self.blocks[self.branch]],
            "order": [self.blocks[self.branch], self.blocks[1 - self.branch]],
        }
        for block in blocks.get(self.way, self.blocks):
            x = block(x)
        return self.last(x)


def computed_by_data(cluster, way):
    strategy = FSDPStrategy(auto_wrap_policy={Block})
    start(strategy, ComputesByData(way, cluster.global_rank), parts(cluster))
    return misuse_in_a_step(strategy)


@pytest.mark.parametrize(
    ("way", "difference"),
    {
        "block": "'blocks.0' on 1 of 2 ranks",
        "order": "this one has computed ",
        "parameter": "'scales.0' on 1 of 2",
    }.items(),
)
def test_ranks_that_compute_other_blocks_are_told_of(way, difference):
    for message in in_ranks(computed_by_data, way=way):
        assert message.startswith("in step 1 ranks have computed other blocks, or the same ones in another order")
        assert difference in message
