"""A sharded run that goes on from a checkpoint is the run that was not stopped, also between the batches of a step."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.hand_loop import BlockNet, batches, one_pass, parts, start, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import Saves, quiet_trainer, same_when_resumed, shuffled_loader
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from dstrat import TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

BATCHES = 5  # of an epoch on two ranks
ACCUMULATE = 3  # so the second step of an epoch has 2 batches


class Net(TrainModule):
    """Has dropout, and heads that take turns, so that some parameters have a gradient and some have none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 4))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def normalized(self, inputs):
        return self.norm(inputs.to(self.norm.weight.dtype))

    def chosen(self, batch_idx):
        return self.heads[batch_idx % 2]

    def training_step(self, batch, batch_idx):
        found = self.chosen(batch_idx)(self.layers(self.normalized(batch[0])))
        return nn.functional.mse_loss(found, batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class BothHeads(Net):
    """Uses everything in each batch, without which torch fails to accumulate in another dtype."""

    def chosen(self, batch_idx):
        return lambda x: self.heads[0](x) + self.heads[1](x)


class Manual(Net):
    """Steps after every third backward pass; some of them are reduced, others not."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 1:
            with self.trainer.strategy.no_backward_sync():
                self.manual_backward(loss)
            return
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Split(Net):
    """Its norm has the gradients of a part of the batch in each rank, which are summands."""

    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"]
        whole = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        plan = {"norm": SequenceParallel(sequence_dim=0, use_local_output=True), "layers": whole}
        parallelize_module(self, mesh, {**plan, "layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})

    def normalized(self, inputs):
        mesh = self.device_mesh["tensor_parallel"]
        return self.norm(DTensor.from_local(inputs, mesh, [Replicate()], run_check=False))


def fit(cluster, folder, strategy, module, *, ckpt_path=None, io=PortableCheckpointIO, **options):
    trainer = quiet_trainer(strategy, cluster, plugins=[io()], default_root_dir=folder, **options)
    trainer.fit(module, shuffled_loader(4 * BATCHES, batch_size=2), ckpt_path=ckpt_path)
    values = [*module.named_parameters(), *module.named_buffers()]  # shards have no state dict after the run
    return {name: getattr(value, "_local_tensor", value).detach().clone() for name, value in values}


def stopped_and_resumed(cluster, folder, strategy, cls, moments=(2, 4), **options):
    def fit_anew(**more):
        return fit(cluster, folder, strategy(), cls(), **options, **more)

    return same_when_resumed(fit_anew, Path(folder), moments)


class Shrinking(torch.optim.SGD):
    """Changes weights apart from its rate, by which it divides, and from gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", torch.zeros(())) + 1
                parameter.mul_(1 - 1e-3 / group["lr"])
        return result


class WithShrinking(Net):
    def configure_optimizers(self):
        return Shrinking(self.parameters(), lr=0.01, momentum=0.9)


class Wrapper(torch.optim.Optimizer):
    """Passes everything on to an optimizer, and does not call torch's constructor."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class WithWrapper(Net):
    def configure_optimizers(self):
        return Wrapper(super().configure_optimizers())


GROUPS = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}


CASES = {
    "every batch": {"strategy": FSDPStrategy, "cls": Net, **GROUPS, "max_epochs": 2, "moments": range(1, 2 * BATCHES)},
    "one file": {"strategy": FSDPStrategy, "cls": Net, **GROUPS, "io": TorchCheckpointIO},
    "mixed": {"strategy": FSDPStrategy, "cls": BothHeads, **GROUPS, "precision": "bf16-mixed"},
    "replicas": {
        "strategy": partial(FSDPStrategy, device_mesh=(2, 1), reshard_after_forward=False),
        "cls": Net,
        **GROUPS,
    },
    "manual": {"strategy": FSDPStrategy, "cls": Manual},
    "model parallel": {
        "strategy": partial(ModelParallelStrategy, tensor_parallel_size=2),
        "cls": Split,
        **GROUPS,
        "limit_train_batches": BATCHES,  # of twice as many, as the ranks share them
    },
}


def in_each_case(cluster, folder):
    cases = {name: {"folder": f"{folder}/{name}", **options} for name, options in CASES.items()}
    return each(cluster, stopped_and_resumed, cases)


@pytest.mark.slow
def test_from_the_middle_of_an_epoch_and_of_a_step(tmp_path):
    expected = {name: dict.fromkeys(options.get("moments", (2, 4)), True) for name, options in CASES.items()}
    assert in_ranks(in_each_case, folder=str(tmp_path)) == [expected, expected]


@pytest.mark.parametrize("io", [PortableCheckpointIO, TorchCheckpointIO])
def test_weights_that_an_optimizer_changes_with_any_rate_resume_exactly(tmp_path, io):
    found = in_ranks(
        stopped_and_resumed, folder=str(tmp_path), strategy=FSDPStrategy, cls=WithShrinking, moments=(2,), io=io
    )
    assert found == [{2: True}, {2: True}]


def test_optimizer_in_a_wrapper_without_torchs_constructor_resumes_exactly(tmp_path):
    found = in_ranks(stopped_and_resumed, folder=str(tmp_path), strategy=FSDPStrategy, cls=WithWrapper, moments=(2,))
    assert found == [{2: True}, {2: True}]


def moved_to_another_mesh(cluster, folder):
    folder, told = Path(folder), []
    fit(cluster, folder, FSDPStrategy(), Net(), callbacks=[Saves(folder, (1, 3))], **GROUPS)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dstrat_fsdp").addHandler(handler)
    for moment in ("1", "3"):
        fit(cluster, folder, FSDPStrategy(device_mesh=(2, 1)), Net(), ckpt_path=folder / moment, **GROUPS)
    return told


def test_gradients_of_another_mesh_are_left_out_and_one_line_says_so(tmp_path):
    [line], nothing = in_ranks(moved_to_another_mesh, folder=str(tmp_path))
    assert line == (
        "the checkpoint has gradients that were not cleared when it was saved, with mesh [2]: with mesh [2, 1] they "
        "are dropped"
    )
    assert nothing == []


def cleared(cluster, begins_in_vain):
    strategy = FSDPStrategy()
    start(strategy, BlockNet(), parts(cluster))
    if begins_in_vain:
        with strategy.no_backward_sync():
            one_pass(strategy, next(iter(batches(1))), 0, 1)
    losses = train(strategy, steps=3)
    strategy.teardown()
    return losses


def test_clearing_gradients_clears_what_was_accumulated_without_communication():
    assert in_ranks(cleared, begins_in_vain=True) == in_ranks(cleared, begins_in_vain=False)
