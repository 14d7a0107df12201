"""ModelPruning decides alike on all ranks, also where their random states or the user's functions differ."""

from __future__ import annotations

import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, ModelPruning, TrainModule


class Averaging(GradientSyncStrategy):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Net(TrainModule):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)  # as without a seed
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pruned(cluster, resample=False, differs=""):
    """Return the weights of this rank after two epochs, pruned after the first one."""
    rank, module = cluster.global_rank, Net(cluster.global_rank)
    only_rank_0 = lambda epoch: rank == 0 and epoch == 0  # noqa: E731 - one line for each
    first_epoch = lambda epoch: epoch == 0  # noqa: E731 - likewise
    pruning = ModelPruning(
        "random_unstructured",
        amount=(lambda _: 0.5 if rank == 0 else 0.0) if differs == "amount" else 0.5,
        apply_pruning=only_rank_0 if differs == "applies" else first_epoch,
        use_lottery_ticket_hypothesis=only_rank_0 if differs == "ticket" else True,
        resample_parameters=resample,
    )
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    quiet_trainer(Averaging(), cluster, max_epochs=2, callbacks=[pruning]).fit(module, data)
    return module.layer.weight.tolist()


def test_replicas_are_the_same_after_pruning():
    cases = {
        "first values": {},
        "resampled": {"resample": True},
        **{what: {"differs": what} for what in ("amount", "applies", "ticket")},
    }
    one, other = in_ranks(each, function=pruned, cases=cases)
    assert one == other
    assert all(0 < sum(row.count(0.0) for row in weights) < 16 for weights in one.values())
