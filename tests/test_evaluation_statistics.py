"""Statistics of batch norm in a validation: those of rank 0, which checkpoints have."""

from importlib.util import find_spec

import pytest
import torch
from tests.ranks import in_ranks
from tests.trainer_runs import quiet_trainer, shuffled_loader
from torch import nn

from dstrat import Callback, TrainModule

ALIASES = {"ddp": "dstrat_ddp", "fsdp": "dstrat_fsdp", "ddp_sharded": "fairscale"}
ALIASES |= dict.fromkeys(("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"), "deepspeed")


class Normalized(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Statistics(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trained = module.layers[0].running_mean.tolist()

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.validated = module.layers[0].running_mean.tolist()


def statistics(cluster, *, alias):
    """Return the means of a layer after the last training batch of a rank, and in the validation that follows."""
    torch.manual_seed(0)
    data, seen = shuffled_loader(64, batch_size=4).dataset, Statistics()
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    quiet_trainer(alias, cluster, callbacks=seen, num_sanity_val_steps=0).fit(Normalized(), loader, loader)
    return seen.trained, seen.validated


@pytest.mark.parametrize("alias", ALIASES)
def test_a_validation_has_the_statistics_of_rank_zero_on_every_rank(alias):
    if find_spec(ALIASES[alias]) is None:
        pytest.skip(f"needs {ALIASES[alias]}: nox -s complete")
    (trained, validated), (other_trained, other_validated) = in_ranks(statistics, alias=alias)
    assert trained != other_trained
    assert validated == other_validated == trained
