"""Checkpoints of IPUs: exact resume, and the way to other strategies and back; on the simulator."""

from __future__ import annotations

import pytest
import torch
from ipu_fit import ON_CPU, data, fit, made, state_of
from tests.ranks import each, in_ranks

from dstrat import Callback
from dstrat_bagua import BaguaStrategy
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_ipu import IPUStrategy

ON_IPUS = {"accelerator": "ipu", "devices": 4}


class SavesAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Writing(Callback):
    """Writes the losses of all processes' batches to a file, as these processes end with the fit."""

    def __init__(self, path):
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"]
        self.losses.append(trainer.strategy.reduce(loss.detach()))

    def on_train_end(self, trainer, module) -> None:
        if trainer.is_global_zero:
            torch.save(torch.stack(self.losses), self.path)


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("plugins", [None, "torch"], ids=["portable", "one file"])
@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({"devices": 2}, {"dropout": 0.3, "scheduled": "step"}),
        ({"devices": 2, "accumulate_grad_batches": 2}, {"optimizer": "SGD", "momentum": 0.9}),
        ({"precision": "16-true"}, {"optimizer": "Adam"}),
        ({"devices": 1}, {"normalizes": True}),
    ],
    ids=["dropout", "momentum", "half", "buffers"],
)
def test_resume_equals_never_having_stopped(tmp_path, plugins, options, module):
    path = tmp_path / "checkpoint"
    options = {**options, "plugins": plugins, "max_epochs": 2}
    whole, _ = fit(made(**module), data(192, batch_size=4), **options)
    fit(made(**module), data(192, batch_size=4), **options, callbacks=[SavesAt(path, 15)])
    rest, trainer = fit(made(**module), data(192, batch_size=4), **options, ckpt_path=path)
    done = 15 * options.get("accumulate_grad_batches", 1)
    assert rest.losses == whole.losses[done:]
    assert same(state_of(rest), state_of(whole))
    assert trainer.current_epoch == 2


def test_resume_is_exact_with_device_iterations(tmp_path):
    path = tmp_path / "checkpoint"

    def run(**options):
        strategy = IPUStrategy(device_iterations=4)
        return fit(made(dropout=0.3), data(256), max_epochs=2, strategy=strategy, devices=2, **options)[0]

    whole = run()
    run(callbacks=[SavesAt(path, 24)])
    rest = run(ckpt_path=path)
    assert rest.losses == whole.losses[24:]
    assert same(state_of(rest), state_of(whole))


def test_random_numbers_of_other_replicas_are_left_out(tmp_path, caplog):
    path = tmp_path / "checkpoint"
    fit(made(dropout=0.3), data(), devices=2, max_steps=2, callbacks=[SavesAt(path, 2)])
    fit(made(dropout=0.3), data(), devices=4, max_steps=3, ckpt_path=path)
    assert "has random numbers of 2 replicas, and this run has 4: they start from the seed again" in caplog.text


def test_saving_and_validating_change_nothing(tmp_path):
    plain, _ = fit(made(dropout=0.3), data(), devices=2)
    saved, _ = fit(
        made(dropout=0.3),
        data(),
        val=data(32),
        val_check_interval=3,
        devices=2,
        callbacks=[SavesAt(tmp_path / "one", 2), SavesAt(tmp_path / "two", 7)],
    )
    assert saved.losses == plain.losses


@pytest.fixture(scope="module")
def unbroken():
    """Losses of one device over 20 steps with batches of 16, and the weights after them."""
    module, _ = fit(made(), data(320, batch_size=16, shuffle=False), **ON_CPU)
    return module.losses, state_of(module)


@pytest.mark.parametrize("plugins", [None, "torch"], ids=["portable", "one file"])
def test_checkpoints_move_to_one_device_and_back(tmp_path, unbroken, plugins):
    losses = {}
    for name, first, second in (("to", ON_IPUS, ON_CPU), ("from", ON_CPU, ON_IPUS)):
        path = tmp_path / name
        loaders = [data(320, batch_size=16 // where["devices"], shuffle=False) for where in (first, second)]
        before, _ = fit(made(), loaders[0], **first, plugins=plugins, callbacks=[SavesAt(path, 10)], max_steps=10)
        after, trainer = fit(made(), loaders[1], **second, plugins=plugins, ckpt_path=path)
        assert trainer.global_step == 20
        losses[name] = before.losses + after.losses
    for found in losses.values():
        torch.testing.assert_close(torch.tensor(found), torch.tensor(unbroken[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("family", "processes"),
    [("ddp", 2), ("fsdp", 2), ("bagua", 2), ("deepspeed", 1), ("fairscale", 2)],
    ids=["ddp", "fsdp", "bagua", "deepspeed", "fairscale"],
)
def test_checkpoints_move_to_other_families_and_back(tmp_path, unbroken, family, processes):
    made_of = {"bagua": BaguaStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy}
    if family in {"deepspeed", "fairscale"}:
        pytest.importorskip(family, reason=f"needs {family}")
    if family == "fairscale":
        from dstrat_fairscale import DDPShardedStrategy

        made_of[family] = DDPShardedStrategy
    strategy = made_of.get(family, lambda **_: "deepspeed")(start_method="fork")
    elsewhere = {"strategy": strategy, "accelerator": "cpu", "devices": processes}
    for name, first, second in (("to", ON_IPUS, elsewhere), ("from", elsewhere, ON_IPUS)):
        path = tmp_path / name
        loaders = [data(320, batch_size=16 // where["devices"], shuffle=False) for where in (first, second)]
        fit(made(), loaders[0], **first, callbacks=[SavesAt(path, 10)], max_steps=10)
        writing = [Writing(tmp_path / "losses")] if second is elsewhere else []
        module, trainer = fit(made(), loaders[1], **second, ckpt_path=path, callbacks=writing)
        assert trainer.global_step == 20
        losses = torch.load(tmp_path / "losses") if writing else torch.tensor(module.losses)
        torch.testing.assert_close(losses, torch.tensor(unbroken[0][10:]), rtol=1e-5, atol=0)
        for key, tensor in state_of(module).items():
            torch.testing.assert_close(tensor, unbroken[1][key], rtol=1e-4, atol=1e-6)


def as_peer(cluster, start=None, save=None):
    """Train as the only peer of a collaboration, in a process of its own; return the losses and the weights."""
    from dstrat_hivemind import HivemindStrategy

    alone = HivemindStrategy(16, matchmaking_time=0.5, averaging_timeout=2.0, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    options = {"callbacks": [SavesAt(save, 10)], "max_steps": 10} if save else {"ckpt_path": start}
    loader = data(320, batch_size=16, shuffle=False)
    module, _ = fit(made(), loader, strategy=alone, accelerator="cpu", devices=1, **options)
    return module.losses, state_of(module)


def test_checkpoints_move_to_a_peer_of_hivemind_and_back(tmp_path, unbroken):
    pytest.importorskip("hivemind", reason="needs hivemind")
    loader = data(320, batch_size=4, shuffle=False)
    fit(made(), loader, **ON_IPUS, callbacks=[SavesAt(tmp_path / "to", 10)], max_steps=10)
    cases = {"from": {"save": tmp_path / "from"}, "to": {"start": tmp_path / "to"}}
    (found,) = in_ranks(each, 1, function=as_peer, cases=cases)
    module, _ = fit(made(), loader, **ON_IPUS, ckpt_path=tmp_path / "from")
    for losses, weights in (found["to"], (module.losses, state_of(module))):
        assert losses == pytest.approx(unbroken[0][10:], rel=1e-5)
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, unbroken[1][key], rtol=1e-4, atol=1e-6)
