"""Averages of weights that several ranks hold together: those of one device, with the buffers of each stage."""

import pytest
import torch
from tests.ranks import in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, EMAWeightAveraging, TrainModule
from dstrat.interfaces.pipeline import Pipeline
from dstrat_mesh import MeshStrategy

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Counting(nn.Module):
    """Scales by the number of batches that it has seen in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def reset_parameters(self):
        self.seen.zero_()

    def forward(self, x):
        if self.training:
            self.seen += 1
        return x * (1 + self.seen / 10)


def mean_loss(output, batch):
    return nn.functional.mse_loss(output, batch[0].sum(1, keepdim=True))


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.make_net()

    def make_net(self):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 16), Counting(), nn.Linear(16, 16), nn.Linear(16, 16), Counting(), nn.Linear(16, 1)]
        self.net = nn.Sequential(*layers)

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=mean_loss)

    def training_step(self, batch, batch_idx):
        return mean_loss(self.net(batch[0]), batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mean_loss(self.net(batch[0]), batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Split(Net):
    def configure_model(self):
        parallelize_module(self.net, self.device_mesh["tp"], {"2": ColwiseParallel(), "3": RowwiseParallel()})


class OnMeta(Net):
    def make_net(self):
        self.net = None

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                super().make_net()


class Record(Callback):
    """Keeps the validation losses and the last weights, which are the average, and saves in the second epoch."""

    saves_checkpoints = True

    def __init__(self, path=None):
        self.path, self.losses, self.weights = path, [], {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and trainer.global_step == 6:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer, module):
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer, module):
        state = trainer.strategy.module_state_dict()
        self.weights = {name: value.detach().cpu().clone() for name, value in state.items()}


def averages(cluster, strategy, module_class, path=None, ckpt_path=None):
    record = Record(path)
    callbacks = [EMAWeightAveraging(decay=0.7), record]
    trainer = quiet_trainer(strategy, cluster, callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module_class(), *(DataLoader(TensorDataset(DATA), size) for size in (6, 12)), ckpt_path=ckpt_path)
    return record


def on_two_ranks(cluster, options, module_class, folder):
    def run(**paths):
        return averages(cluster, MeshStrategy(**options), module_class, **paths)

    runs = [run(path=folder / "middle"), run(ckpt_path=folder / "middle"), run(ckpt_path=folder / "one device")]
    return [(run.losses, run.weights) for run in runs]


@pytest.mark.parametrize(
    ("options", "module_class"),
    [({"pp": 2, "microbatches": 1}, Net), ({"pp": 2, "microbatches": 1}, OnMeta), ({"tp": 2}, Split)],
    ids=str,
)
def test_the_average_is_that_of_one_device_also_after_a_resume(tmp_path, options, module_class):
    expected = averages(None, "single_device", Net, path=tmp_path / "one device")
    first, second = in_ranks(on_two_ranks, options=options, module_class=module_class, folder=tmp_path)
    for losses, _ in (*first, *second):
        assert losses == pytest.approx(expected.losses[-len(losses) :], rel=1e-5)
    for _, weights in first:  # which has those of all ranks
        assert weights.keys() == expected.weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-5, atol=1e-6, msg=name)
