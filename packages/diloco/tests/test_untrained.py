"""Buffers and frozen parameters: constants stay, and what modules and validations change is that of all groups."""

import warnings

import pytest
import torch
from tests.hand_loop import BlockNet, parts, start, train
from tests.hand_loop import Net as HandNet
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer, same_when_resumed, shuffled_loader
from torch import nn

from dstrat import Callback, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.interfaces.state_dict import canonical_name
from dstrat_diloco import DiLoCoStrategy
from dstrat_diloco.average import average, digest

EVERY, BATCHES = 4, 9


class Target(TrainModule):
    """Has constants, a frozen layer that follows the trained one, and buffers that validations change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
        self.register_buffer("mask", torch.full((3, 3), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("largest", torch.tensor(3e38), persistent=False)
        self.register_buffer("losses", torch.zeros(2))  # of trainings and validations
        self.register_buffer("validations", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.online(batch[0]) - self.target(batch[0]), batch[1])
        self.losses[0].add_(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.data.lerp_(online, 0.2)

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        self.validations += 1
        self.losses[1].add_(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unfreezes(Target):
    """Trains the frozen layer from the second step of the second round on."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step >= EVERY + 1:
            self.target.requires_grad_(True)


class Differences(Callback):
    """After each batch, the largest difference of the groups in what should be the same after a round."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx:
            # The target follows after the exchange, by the same outer weights.
            values = [getattr(one, "_local_tensor", one).detach() for one in (*module.parameters(), *module.buffers())]
            gathered = trainer.strategy.all_gather(torch.cat([one.double().flatten() for one in values]))
            self.seen.append(float((gathered[0] - gathered[-1]).abs().max()))


def fit(cluster, cls, inner="ddp", callbacks=(), ckpt_path=None):
    trainer = quiet_trainer(
        DiLoCoStrategy(inner=inner, groups=2, every=EVERY),
        cluster,
        plugins=[PortableCheckpointIO()],
        callbacks=[*callbacks],
        val_check_interval=3,
        num_sanity_val_steps=0,
    )
    module, data = cls(), shuffled_loader(2 * BATCHES * cluster.world_size, 2)
    trainer.fit(module, data, shuffled_loader(8, 2), ckpt_path=ckpt_path)
    values = [*module.named_parameters(), *module.named_buffers()]
    return {name: getattr(value, "_local_tensor", value).detach().clone() for name, value in values}


def trained_and_resumed(cluster, folder, cls, moments=(2, 4, 5, 6, 8), **options):
    differences = Differences()
    values = fit(cluster, cls, callbacks=[differences], **options)

    def fit_anew(**more):
        return fit(cluster, cls, **options, **more)

    return values, differences.seen, same_when_resumed(fit_anew, folder, moments)


@pytest.mark.parametrize("inner", ["ddp", "fsdp"])
def test_a_target_network_and_buffers_are_those_of_all_groups(inner, tmp_path):
    cases = {
        cls.__name__: {"cls": cls, "folder": tmp_path / cls.__name__, "inner": inner} for cls in (Target, Unfreezes)
    }
    for found in in_ranks(each, 2, function=trained_and_resumed, cases=cases):
        for name, (values, differences, same) in found.items():
            assert [bool(one) for one in differences] == [bool((step + 1) % EVERY) for step in range(BATCHES - 1)], name
            assert same == dict.fromkeys(same, True), name
            assert torch.equal(values["mask"], Target().mask)
            assert torch.equal(values["largest"], Target().largest)
            assert (float(values["validations"]), float(values["losses"][1])) == (3, 3)


def means_of_equal(cluster):
    """Return values, and their means over three groups."""
    strategy = DiLoCoStrategy(groups=3)
    start(strategy, HandNet(), parts(cluster))
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ends = torch.tensor([torch.finfo(dtype).min, torch.finfo(dtype).max, torch.inf, -torch.inf, 0.0], dtype=dtype)
        values = torch.cat([ends, torch.rand(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)])
        [mean] = average([values], strategy.groups, is_shared=False)
        results.append((values, mean))
        [mean] = average([torch.full((3,), strategy.groups.index, dtype=dtype)], strategy.groups, is_shared=False)
        results.append((torch.ones(3, dtype=dtype), mean))
    strategy.teardown()
    return results


def test_means_of_equal_values_are_these_to_the_bit():
    for found in in_ranks(means_of_equal, 3):
        for values, mean in found:
            assert torch.equal(values, mean), values.dtype


def test_a_digest_sees_opposite_changes_and_other_places():
    tensor = torch.tensor([0.6, 0.7, 0.8])
    others = [torch.tensor(one) for one in ([0.7, 0.6, 0.8], [0.65, 0.65, 0.8], [0.61, 0.68, 0.81], [-0.6, 0.7, 0.8])]
    assert len({int(digest(one)) for one in (tensor, tensor.clone(), *others)}) == 1 + len(others)


def state_within_a_round(cluster, wraps):
    """Return the state for a checkpoint, of the weights and a buffer that differ between all ranks."""
    # Dynamo looks at the gradient of what an earlier layer has computed.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    module = BlockNet()
    for index, block in enumerate(module.blocks):
        block.register_buffer("rank", torch.zeros(()))
        module.blocks[index] = torch.compile(block, backend="eager") if wraps else block
    strategy = DiLoCoStrategy(groups=2, every=EVERY)
    start(strategy, module, parts(cluster))
    train(strategy, steps=2)
    for name, buffer in module.named_buffers():
        if name.endswith("rank"):
            buffer.add_(strategy.global_rank)
    named = strategy.sharded_module_state().items()
    state = {canonical_name(name): value.detach().tolist() for name, value in named}
    strategy.barrier()
    strategy.teardown()
    return state


def test_the_state_has_the_means_of_compiled_layers():
    cases = {wraps: {"wraps": wraps} for wraps in (True, False)}
    found = in_ranks(each, 4, function=state_within_a_round, cases=cases)
    for rank, states in enumerate(found):
        assert states[True] == states[False]
        assert states[True]["blocks.0.rank"] == rank % 2 + 1  # of ranks 0 and 2, or 1 and 3
    weights = [{name: value for name, value in one[True].items() if not name.endswith("rank")} for one in found]
    assert weights == [weights[0]] * 4
