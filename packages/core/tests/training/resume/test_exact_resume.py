"""A run that is continued from a checkpoint equals one that never stopped, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset, get_worker_info

from dstrat import Callback, TorchCheckpointIO, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

BATCHES = 6  # of an epoch, and so of two epochs twice as many


class Net(TrainModule):
    """Has everything that could go on differently: dropout, momentum, a scheduler, logged values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("losses", torch.zeros(2 * BATCHES))

    def loss(self, batch):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses[self.trainer.fit_loop.batches_seen] = loss.detach()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Net):
    """Steps its optimizer in every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()


class Saving(Callback):
    """Saves in a hook after so many batches, and lets training end there."""

    saves_checkpoints = runs_last = True

    def __init__(self, path, at, hook):
        self.path, self.at = path, at
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.fit_loop.batches_seen == self.at and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class NotesEpochs(Callback):
    """Notes the values over each epoch."""

    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


class Stream(IterableDataset):
    """Numbers without a length; in a worker with random ones added."""

    def __iter__(self):
        noise = 0.1 if get_worker_info() else 0.0  # in this process the batch read ahead would draw them too early
        return ((x + noise * torch.rand(1) if noise else x, y) for x, y in numbers())


class KnowsItsPlace:
    """A loader without a length, which shuffles with numbers of its own and says where it is."""

    reads = 0

    def __init__(self):
        self.generator, self.left = torch.Generator().manual_seed(6), []

    def __iter__(self):
        self.left = self.left or [part.tolist() for part in torch.randperm(22, generator=self.generator).split(4)]
        while self.left:
            KnowsItsPlace.reads += 1
            yield numbers()[self.left.pop(0)]

    def state_dict(self):
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.left = state["left"]
        self.generator.set_state(state["generator"])


class Noisy(IterableDataset):
    """Numbers with noise, which says where it is, also in a worker."""

    def __init__(self):
        self.position, self.generator = 0, torch.Generator().manual_seed(4)

    def __iter__(self):
        while self.position < len(numbers()):
            x, y = numbers()[self.position]
            self.position += 1
            yield x + torch.rand(1, generator=self.generator), y
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


@cache
def numbers():
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.sum(1, keepdim=True))


def shuffled(**options):
    return DataLoader(numbers(), batch_size=4, shuffle=True, **options)


def drawn_from_a_generator():
    sampler = RandomSampler(numbers(), replacement=True, generator=torch.Generator().manual_seed(8))
    return DataLoader(numbers(), batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def check(quiet_trainer, tmp_path):
    """Checks that a run that is stopped after some batches goes on as if it had not been."""

    def fit(cls, make_loader, callbacks, ckpt_path=None, **options):
        torch.manual_seed(3 if ckpt_path is None else 4)  # what is drawn before it goes on does not matter
        module, epochs = cls(), NotesEpochs()
        trainer = quiet_trainer(max_epochs=2, val_check_interval=3, callbacks=[epochs, *callbacks], **options)
        validated = DataLoader(numbers(), batch_size=6, shuffle=True)
        trainer.fit(module, make_loader(), validated, ckpt_path=ckpt_path)
        return module, trainer, epochs.epochs

    def run(points, *, cls=Net, loader=shuffled, hook="on_train_batch_end", io=TorchCheckpointIO, **options):
        def options_of(plugin):
            return {name: value() if callable(value) else value for name, value in options.items()} | {
                "plugins": [plugin()]
            }

        whole, trainer, epochs = fit(cls, loader, [], **options_of(io))
        for at in points:
            path = tmp_path / f"{at}"
            fit(cls, loader, [Saving(path, at, hook)], **options_of(io))
            module, resumed, resumed_epochs = fit(cls, loader, [], path, **options_of(io))
            for name, value in whole.state_dict().items():
                assert torch.equal(module.state_dict()[name], value), (at, name, value)
            assert resumed.fit_loop.state_dict() == trainer.fit_loop.state_dict()
            assert resumed_epochs == epochs, at
            assert resumed.callback_metrics == trainer.callback_metrics, at

    return run


EVERY_BATCH = range(1, 2 * BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("points", "accumulate", "io"),
    [
        (EVERY_BATCH, 4, PortableCheckpointIO),
        (EVERY_BATCH, 1, TorchCheckpointIO),
        ([2, 4, 8], 4, TorchCheckpointIO),
        ([2, 8], 1, PortableCheckpointIO),
    ],
)
def test_stopped_at_every_batch(check, points, accumulate, io):
    check(points, accumulate_grad_batches=accumulate, io=io)


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_stopped_where_a_hook_saves_after_validation_or_an_epoch(check, hook):
    check([3, 9] if hook == "on_validation_end" else [BATCHES], hook=hook)


@pytest.mark.slow
def test_with_workers(check):
    check([2, 5, 6, 8], loader=lambda: shuffled(num_workers=2))


@pytest.mark.slow
@pytest.mark.parametrize("loader", [shuffled, drawn_from_a_generator])
def test_with_loaders_that_are_made_anew_for_each_epoch(check, loader):
    check([2, 6, 7, 9], loader=loader, reload_dataloaders_every_n_epochs=1)
    check([BATCHES], loader=loader, reload_dataloaders_every_n_epochs=1, hook="on_train_epoch_end")


def test_on_two_processes_with_loaders_that_are_made_anew_for_each_epoch(check, averaging):
    options = {"limit_train_batches": 3, "limit_val_batches": 1, "reload_dataloaders_every_n_epochs": 1}
    check([2, 4, 5], strategy=averaging, devices=2, **options)


class MakesLoaders(Net):
    """Makes a loader of other numbers for each epoch, whose length configure_optimizers reads."""

    def train_dataloader(self):
        x = numbers().tensors[0] + self.trainer.current_epoch
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 2 * BATCHES
        return super().configure_optimizers()


def test_with_loaders_of_an_epoch_whose_length_was_read(check):
    check([2, 8], cls=MakesLoaders, loader=lambda: None, reload_dataloaders_every_n_epochs=1)


class Counts(Net):
    """Updates metric objects in steps, and reads them at the end of an epoch only."""

    def __init__(self):
        import torchmetrics

        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.both = self.seen + torchmetrics.CatMetric()
        self.collected = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])
        self.validated = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.both.update(batch[1].sum())
        self.collected.update(batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("seen", self.seen)
        self.log("both", self.both.compute().sum())
        self.log_dict(self.collected.compute())
        self.both.reset()
        self.collected.reset()

    def validation_step(self, batch, batch_idx):
        self.validated.update(batch[1].sum())
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.log("validated", self.validated.compute())
        self.validated.reset()


def test_with_metric_objects_that_are_only_updated(check):
    check([2, 3, 8], cls=Counts)


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_with_metric_objects_where_a_hook_saves_after_or_within_validation(check, hook):
    check([BATCHES], cls=Counts, hook=hook)


def test_with_generators_of_the_users_own(check):
    check([2, 6, 8], loader=drawn_from_a_generator)
    check([BATCHES], loader=drawn_from_a_generator, hook="on_train_epoch_end")


def two_with_generators():
    return {"one": drawn_from_a_generator(), "other": shuffled(generator=torch.Generator().manual_seed(10))}


class OfTwo(Net):
    def loss(self, batch):
        if isinstance(batch, list):
            return super().loss(batch)
        return super().loss(batch["one"]) + super().loss(batch["other"])


def test_with_several_loaders_that_have_generators(check):
    check([2, 6, 8], cls=OfTwo, loader=two_with_generators)


@pytest.mark.slow
@pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO])
def test_with_a_shorter_loader_that_is_shuffled_again_after_dropout(check, io):
    def loaders():
        short = DataLoader(Subset(numbers(), range(6)), batch_size=4, shuffle=True)  # ends three times in an epoch
        return {"one": short, "other": shuffled()}

    check(range(1, 2 * BATCHES, 1 if io is TorchCheckpointIO else 4), cls=OfTwo, loader=loaders, io=io)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_with_a_stream(check, num_workers):
    check([2, 5, 8], loader=lambda: DataLoader(Stream(), batch_size=4, num_workers=num_workers))


@pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO])
def test_with_a_loader_that_knows_its_place_and_is_not_read_up_to_there_again(check, io):
    check([2, 5], loader=KnowsItsPlace, io=io)
    check([BATCHES], loader=KnowsItsPlace, hook="on_train_epoch_end", io=io)
    KnowsItsPlace.reads = 0
    check([8], loader=KnowsItsPlace, io=io)
    assert KnowsItsPlace.reads == 2 * BATCHES + 9 + (2 * BATCHES - 8)  # one ahead where it was stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "points", "num_workers"),
    [
        (lambda stateful, **options: stateful(numbers(), shuffle=True, **options), [2, 6, 8], 0),
        pytest.param(
            lambda stateful, **options: stateful(numbers(), shuffle=True, **options), [8], 2, marks=pytest.mark.variant
        ),
        pytest.param(lambda stateful, **options: stateful(Noisy(), **options), [2, 6, 8], 0, marks=pytest.mark.variant),
        (lambda stateful, **options: stateful(Noisy(), **options), [6, 8], 1),
    ],
    ids=["shuffled", "shuffled, workers", "stream", "stream, worker"],
)
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # which torchdata calls
def test_with_a_stateful_loader_of_torchdata(check, make, points, num_workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    check(points, loader=lambda: make(torchdata.StatefulDataLoader, batch_size=4, num_workers=num_workers))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, pytest.param(0, marks=pytest.mark.variant)])
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # which torchdata calls
def test_on_two_processes_with_a_stateful_loader_of_torchdata(check, averaging, num_workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader():
        return torchdata.StatefulDataLoader(numbers(), batch_size=2, shuffle=True, num_workers=num_workers)

    check([2, 5], strategy=averaging, devices=2, loader=loader)
    if num_workers == 0:
        check([6], strategy=averaging, devices=2, loader=loader, hook="on_train_epoch_end")


def test_in_manual_optimization(check):
    check([1, 2, 5, 9], cls=Manual)


@pytest.mark.parametrize(("points", "io"), [([1, 4], PortableCheckpointIO), ([5], TorchCheckpointIO)])
def test_on_two_processes(check, averaging, points, io):
    options = {"strategy": averaging, "devices": 2, "accumulate_grad_batches": 2, "io": io}
    check(points, **options, limit_train_batches=3, limit_val_batches=1)  # of what is shuffled
    if io is PortableCheckpointIO:
        check([3], **options, hook="on_train_epoch_end")


def test_on_two_processes_with_a_loader_that_knows_its_place(check, averaging):
    check([2, BATCHES], strategy=averaging, devices=2, loader=KnowsItsPlace)


def test_on_more_processes_it_goes_on_at_the_same_part_of_the_epoch(quiet_trainer, averaging_later, tmp_path):
    saved = tmp_path / "saved"
    options = {"max_epochs": 2, "plugins": [PortableCheckpointIO()]}
    quiet_trainer(callbacks=Saving(saved, 4, "on_train_batch_end"), **options).fit(Net(), shuffled())
    trainer = quiet_trainer(strategy=averaging_later(), devices=2, **options)
    trainer.fit(Net(), shuffled(), ckpt_path=saved)
    assert trainer.fit_loop.batches_seen == 4 + (3 - 2) + 3  # of the 6 batches of one process 4 are done, of 3 then 2


class WritesSamples(Callback):
    """Writes which samples each rank has trained on, the second value of a batch, up to a number of batches."""

    def __init__(self, folder, last):
        self.folder, self.last = folder, last

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        seen = trainer.fit_loop.batches_seen
        if seen <= self.last:
            name = f"samples-{seen}-of-{trainer.global_rank}"
            (self.folder / name).write_text(" ".join(str(int(value)) for value in batch[1].flatten()))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.variant)])
@pytest.mark.parametrize("devices", [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_processes_continue_the_shuffled_order_of_another_number(
    quiet_trainer, averaging_later, tmp_path, devices, num_workers
):
    def fit(folder, *numbers):
        """Train for an epoch, with another number of processes from batch 2 and from batch 4 on."""
        folder.mkdir()
        saved = None
        for seed, (num, last) in enumerate(zip(numbers, (2, 4, BATCHES), strict=True)):
            torch.manual_seed(4)
            data = TensorDataset(torch.rand(24, 4), torch.arange(24.0)[:, None])
            loader = DataLoader(data, 4 // num, shuffle=True, num_workers=num_workers)
            torch.manual_seed(seed)
            path = folder / f"saved-{last}"
            callbacks = [Saving(path, last, "on_train_batch_end"), WritesSamples(folder, last)]
            strategy = {"strategy": averaging_later(), "devices": 2} if num == 2 else {}
            options = {"max_epochs": 1, "plugins": [PortableCheckpointIO()], **strategy}
            quiet_trainer(callbacks=callbacks, **options).fit(Net(), loader, ckpt_path=saved)
            saved = path
        batches = [sorted(folder.glob(f"samples-{number}-of-*")) for number in range(1, BATCHES + 1)]
        return [sorted(int(word) for path in paths for word in path.read_text().split()) for paths in batches]

    begun_by = devices[0]
    assert fit(tmp_path / "moved", *devices) == fit(tmp_path / "stayed", begun_by, begun_by, begun_by)
