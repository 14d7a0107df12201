"""Options of the strategy, and the errors for those that cannot work."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.errors import ConflictError, DstratError, LaunchError, MisuseError, RequestError

pytest.importorskip("hivemind", reason="needs hivemind")

from dstrat_hivemind import CollaborationMonitor, HivemindStrategy
from dstrat_hivemind.strategy import CollaborationScheduler, read_peers

ADDRESS = "/ip4/127.0.0.1/tcp/4/p2p/12D3KooWDL3KX2ZTDK7vUCk1uNemcGES2iJd83q3D519JnfFLrXk"
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


class Net(TrainModule):
    def __init__(self, schedule=None, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.schedule, self.number = schedule, optimizers
        self.rates, self.losses = [], []

    def training_step(self, batch, batch_idx):
        [inputs] = batch
        loss = (self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        optimizers = [torch.optim.AdamW(self.parameters(), lr=0.1) for _ in range(self.number)]
        if self.schedule is None:
            return optimizers
        return optimizers, [self.schedule(optimizers[0])]


class Saving(Callback):
    saves_checkpoints = True

    def __init__(self, path, step=10):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def data(count=64):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 4))


def train(strategy, module, loader=None, ckpt_path=None, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(data(), batch_size=8) if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


def strategy(target_batch_size=16, **options):
    return HivemindStrategy(target_batch_size, host_maddrs=LOOPBACK, matchmaking_time=0.5, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, MisuseError, "needs target_batch_size, the samples of an optimizer step of all peers"),
        ({"target_batch_size": 0}, RequestError, "target_batch_size=0 must be a whole number of samples"),
        ({"target_batch_size": 8, "batch_size": 16}, RequestError, "batch_size=16 of this peer is larger than"),
        ({"target_batch_size": 8, "compression": 1}, MisuseError, "got 'compression', which neither it nor hivemind"),
        ({"target_batch_size": 8, "dht": 1}, MisuseError, "sets 'dht' of hivemind.Optimizer itself"),
        ({"target_batch_size": 8, "matchmaking_time": 9, "averaging_timeout": 5}, RequestError, "the second longer"),
        (
            {"target_batch_size": 8, "delay_grad_averaging": True, "delay_optimizer_step": False},
            ConflictError,
            "delays the optimizer's step too",
        ),
        ({"target_batch_size": 8, "delay_optimizer_step": True}, ConflictError, "needs delay_state_averaging=True"),
        (
            {
                "target_batch_size": 8,
                "delay_optimizer_step": True,
                "delay_state_averaging": True,
                "offload_optimizer": False,
            },
            ConflictError,
            "leave offload_optimizer=False out",
        ),
        ({"target_batch_size": 8, "initial_peers": "here"}, RequestError, "has 'here', not an address of a peer"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_start(options, error, message):
    with pytest.raises(error, match=message):
        HivemindStrategy(**options)


def test_peers_come_from_the_argument_or_the_environment():
    other = ADDRESS.replace("127.0.0.1", "192.0.2.1")
    assert read_peers(None, {}) == []
    assert read_peers(f"{ADDRESS},{other}", {}) == [ADDRESS, other]
    assert read_peers(None, {"INITIAL_PEERS": ADDRESS}) == [ADDRESS]
    assert read_peers([ADDRESS], {"INITIAL_PEERS": ADDRESS}) == [ADDRESS]
    with pytest.raises(ConflictError, match="INITIAL_PEERS"):
        read_peers([ADDRESS], {"INITIAL_PEERS": other})


def test_several_devices_are_refused_by_the_plan():
    with pytest.raises(DstratError, match="device"):
        Trainer(strategy=HivemindStrategy(8), accelerator="cpu", devices=2, logger=False)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([{"text": "a"}, {"text": "b"}])


class Texts(Net):
    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(2, 4)).mean()


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "fit", "error", "message"),
    [
        (Net, {"target_batch_size": 4}, {}, RequestError, "a batch has 8 samples, and target_batch_size=4"),
        (
            Texts,
            {},
            {"loader": DataLoader(Endless(), batch_size=None)},
            MisuseError,
            "has a length, the number of samples.*pass HivemindStrategy batch_size=n",
        ),
        (lambda: Manual(optimizers=2), {}, {}, MisuseError, "returned 2 optimizers, and a collaboration has one"),
        (Net, {"initial_peers": ADDRESS}, {}, LaunchError, "none of initial_peers .* answered"),
        (Net, {"reuse_grad_buffers": True}, {"gradient_clip_val": 1.0}, ConflictError, "gradient_clip_val=1.0"),
        (
            lambda: Net(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            {"offload_optimizer": True},
            {},
            ConflictError,
            "pass HivemindStrategy a scheduler_fn",
        ),
    ],
    ids=["batch", "unknown", "optimizers", "peers", "clip", "scheduler"],
)
def test_what_cannot_train_is_an_error_that_says_what_to_do(module, options, fit, error, message):
    with pytest.raises(error, match=message):
        train(strategy(**options), module(), **fit)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param({name: True}, marks=pytest.mark.variant)
            for name in ("offload_optimizer", "reuse_grad_buffers")
        ),
    ],
    ids=str,
)
def test_one_peer_trains_as_one_device_that_accumulates(options):
    expected, trained = Net(), Net()
    train("auto", expected, accumulate_grad_batches=2)
    trainer = train(strategy(**options), trained, callbacks=[CollaborationMonitor()])
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trainer.global_step == 8  # local batches
    assert trainer.callback_metrics["collaboration/epoch"] == 4
    assert trainer.callback_metrics["collaboration/peers"] == 1


def test_a_scheduler_of_the_collaboration_is_copied():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 1)
    copied = copy.copy(CollaborationScheduler(scheduler, None))
    assert copied.scheduler is scheduler
    assert copied.last_epoch == scheduler.last_epoch


def test_schedulers_follow_the_epochs_of_the_collaboration():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    rates = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
    for module, options in ((Net(schedule), {}), (Net(), {"scheduler_fn": schedule, "offload_optimizer": True})):
        train(strategy(**options), module)
        assert module.rates == pytest.approx(rates)


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_one_peer_resumes_in_the_middle_of_an_epoch_to_the_last_bit(tmp_path, offload):
    unbroken = Net()
    train(strategy(32, offload_optimizer=offload), unbroken, max_epochs=2)
    begun, resumed = Net(), Net()
    saving = Saving(tmp_path / "saved")
    train(strategy(32, offload_optimizer=offload), begun, max_steps=10, max_epochs=2, callbacks=[saving])
    train(strategy(32, offload_optimizer=offload), resumed, max_epochs=2, ckpt_path=saving.path)
    assert begun.losses + resumed.losses == unbroken.losses


def test_the_checkpoint_continues_on_one_device(tmp_path):
    begun, resumed, expected = Net(), Net(), Net()
    saving = Saving(tmp_path / "saved", 8)
    train(strategy(8), begun, callbacks=[saving])
    train("auto", expected, max_epochs=2)
    train("auto", resumed, max_epochs=2, ckpt_path=saving.path)
    assert begun.losses + resumed.losses == pytest.approx(expected.losses, rel=1e-5)


def test_what_it_sends_to_peers_is_not_known_before_they_are_there():
    assert HivemindStrategy(target_batch_size=1).communication_layout(training=None) is None
