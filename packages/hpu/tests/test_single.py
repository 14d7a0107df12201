"""One Gaudi, simulated: losses of the CPU, graphs and copies of a hand-written loop, exact resume."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hpu_fit import ON_CPU, Counting, Regression, SavesAt, counters, data, fitted, losses_of, since, trainer
from torch import nn

from dstrat import Callback, OwnLoop, TrainModule, build, seed_everything
from dstrat.callbacks import DeviceStatsMonitor, ProgressBar
from dstrat.loggers import CSVLogger
from dstrat.plugins.io import TorchCheckpointIO
from dstrat_hpu import HPUCheckpointIO

IOS = {"portable": None, "hpu": HPUCheckpointIO}
WAYS = {
    "plain": {},
    "accumulating": {"accumulate_grad_batches": 4},
    "clipping": {"gradient_clip_val": 0.1},
    "accumulating and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_cpu(way):
    expected = losses_of(fitted(**ON_CPU, **WAYS[way]))
    assert expected[15:].mean() < expected[:5].mean()
    assert len(expected) == 20
    torch.testing.assert_close(losses_of(fitted(**WAYS[way])), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precisions_give_the_losses_of_the_cpu_in_them(precision, dtype):
    module = fitted(precision=precision)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    expected = losses_of(fitted(precision=precision, **ON_CPU))
    torch.testing.assert_close(losses_of(module), expected, rtol=0.05, atol=0.05)
    assert not torch.equal(losses_of(module).float(), losses_of(fitted()))


def test_the_module_comes_back_to_the_cpu():
    assert {parameter.device.type for parameter in fitted().parameters()} == {"cpu"}


# Graphs and copies, which the simulator counts


def loop_by_hand(steps=20, accumulate=1):
    """Count what the vendor's guide to training does in each step, after the first."""
    import habana_frameworks.torch.core as htcore

    module = Regression(logs=False).to("hpu")
    optimizer = module.configure_optimizers()
    batches = list(data(8 * steps * accumulate))
    htcore.mark_step()
    for step in range(steps):
        optimizer.zero_grad()
        for inputs, targets in batches[step * accumulate : (step + 1) * accumulate]:
            loss = nn.functional.mse_loss(module(inputs.to("hpu")), targets.to("hpu"))
            (loss / accumulate if accumulate > 1 else loss).backward()
            htcore.mark_step()
        optimizer.step()
        htcore.mark_step()
        if step == 0:
            before = counters()
    return since(before)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_costs_what_it_costs_by_hand(accumulate):
    loop_by_hand(steps=3, accumulate=accumulate)  # whichever comes first compiles for both
    counting = Counting()
    loader = data(8 * 20 * accumulate)
    fitted(Regression(logs=False), loader, callbacks=[counting], accumulate_grad_batches=accumulate)
    found = counting.per_step(accumulate - 1, -1)
    assert found == loop_by_hand(accumulate=accumulate)
    # As the README has it.
    assert found == {"graphs": 19 * (accumulate + 1), "compiled": 0, "to_host": 0, "to_device": 19 * 2 * accumulate}


def test_logging_and_the_bar_cost_one_copy_for_each_interval(tmp_path):
    plain, logging = Counting(), Counting()
    fitted(Regression(logs=False), data(8 * 41), callbacks=[plain])
    fitted(
        Regression(),
        data(8 * 41),
        callbacks=[logging],
        logger=CSVLogger(tmp_path),
        enable_progress_bar=True,
        log_every_n_steps=10,
    )
    without, found = plain.per_step(0, -1), logging.per_step(0, -1)
    assert without["to_host"] == 0
    assert without["graphs"] == 80
    # 10, 20, 30 and 40 are logged.  The bar is not drawn here, as nobody watches.
    assert found["to_host"] == 4
    assert found["graphs"] - without["graphs"] <= 4
    assert found["to_device"] == without["to_device"]


class Epochs(Callback):
    """Counts the sanity check, which comes first, and each epoch with its validation."""

    def __init__(self):
        self.counted, self.start = [], None

    def on_sanity_check_start(self, trainer, module):
        self.start = counters()

    def on_sanity_check_end(self, trainer, module):
        self.end()

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch:  # its end comes after all hooks of the epoch
            self.end()
        else:
            self.start = counters()

    def on_train_end(self, trainer, module):
        self.end()

    def end(self):
        self.counted.append(since(self.start))
        self.start = counters()


def loop_with_validation_by_hand(*, shown_every=None, epochs=3):
    """Count the same in a loop that prints the means of an epoch and its validation, and the loss of some steps."""
    import habana_frameworks.torch.core as htcore

    module = Regression(logs=False).to("hpu")
    optimizer = module.configure_optimizers()
    training, validation, counted, printed = list(data()), list(data(40)), [], []

    def loss_of(batch):
        return nn.functional.mse_loss(module(batch[0].to("hpu")), batch[1].to("hpu"))

    def zero():
        return torch.zeros((), dtype=torch.float64).to("hpu")

    def validate(batches):
        module.eval()
        with torch.no_grad():
            total = zero()
            for batch in batches:
                total += loss_of(batch) * len(batch[0])
                htcore.mark_step()
        printed.append((total / (8 * len(batches))).item())
        module.train()

    def run(function, *arguments):
        before = counters()
        function(*arguments)
        counted.append(since(before))

    def epoch():
        total = zero()
        for step, batch in enumerate(training, start=1):
            optimizer.zero_grad()
            loss = loss_of(batch)
            total += loss.detach() * len(batch[0])
            loss.backward()
            htcore.mark_step()
            optimizer.step()
            htcore.mark_step()
            if shown_every and step % shown_every == 0:
                printed.append(loss.item())
        validate(validation)
        printed.append((total / (8 * len(training))).item())

    run(validate, validation[:2])
    for _ in range(epochs):
        run(epoch)
    return counted


@pytest.mark.parametrize("shown_every", [None, 5])
def test_an_epoch_with_validation_logger_and_bar_costs_what_it_costs_by_hand(tmp_path, shown_every):
    options = {}
    if shown_every:
        bar = ProgressBar(refresh_seconds=0)
        bar.refresh_rate = shown_every
        options = {"callbacks": [bar], "enable_progress_bar": True, "logger": CSVLogger(tmp_path)}
    epochs = Epochs()
    options["callbacks"] = [epochs, *options.get("callbacks", [])]
    seed_everything(3, verbose=False)
    trainer(max_epochs=3, log_every_n_steps=10, **options).fit(Regression(), data(), data(40))
    by_hand = loop_with_validation_by_hand(shown_every=shown_every)
    for counted in (epochs.counted[:2], by_hand[:2]):  # whichever comes first compiles for both
        for of_first_epoch in counted:
            of_first_epoch.pop("compiled")
    assert epochs.counted == by_hand
    # As the README has it: 20 steps and 5 batches of validation, with the two means, and 4 losses that are shown.
    shown = 4 if shown_every else 0
    assert by_hand[-1] == {"graphs": 40 + 5 + 2, "compiled": 0, "to_host": 2 + shown, "to_device": 40 + 10 + 2}


EAGER = """
import sys
import torch
from hpu_fit import ON_CPU, Regression, SavesAt, counters, data, fitted, losses_of, since

assert "habana_frameworks.torch" in sys.modules
whole, before = fitted(callbacks=[SavesAt(7, sys.argv[1])]), counters()
resumed = fitted(ckpt_path=sys.argv[1])
assert torch.equal(losses_of(resumed), losses_of(whole)[7:])
torch.testing.assert_close(losses_of(whole), losses_of(fitted(**ON_CPU)), rtol=1e-5, atol=0)
print(since(before)["graphs"])
"""


def test_eager_mode_has_the_same_losses_and_no_graphs(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "PT_HPU_LAZY_MODE"}
    ended = subprocess.run(
        [sys.executable, "-c", EAGER, str(tmp_path / "checkpoint")],
        cwd=Path(__file__).parent,
        env={**environ, "HABANA_SIMULATOR_MACHINE": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=400,
    )
    assert ended.stdout.splitlines()[-1] == "0"


def test_manual_optimization_ends_its_graphs():
    class Adversaries(TrainModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(16, 1), nn.Linear(16, 1)

        def training_step(self, batch, batch_idx):
            for part, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.one, self.other)]

    counting = Counting()
    trainer(callbacks=[counting]).fit(Adversaries(), data())
    assert counting.per_step(0, -1)["graphs"] == 4 * 19
    assert counting.per_step(0, -1)["compiled"] == 0


def test_an_own_loop_ends_its_graphs():
    def train(loop):
        module = nn.Linear(16, 1)
        loop.setup(module, lambda module: torch.optim.Adam(module.parameters()))
        counts = []
        for batch in loop.training_loader(data(400)):
            loop.backward(loop.compute(nn.functional.mse_loss, module(batch[0]), batch[1]))
            loop.step()
            counts.append(counters())
        return {name: counts[-1][name] - counts[1][name] for name in counts[0]}  # Adam makes its state first

    counted = OwnLoop(build(strategy="hpu_single", accelerator="hpu", devices=1)).launch(train)
    assert (counted["graphs"], counted["compiled"], counted["to_host"]) == (96, 0, 0)


# Resume, random numbers and statistics


@pytest.mark.parametrize("io", ["portable", "hpu"])
def test_resume_equals_never_having_stopped(tmp_path, io):
    path = str(tmp_path / "checkpoint")
    whole = fitted(
        Regression(dropout=0.2),
        data(shuffle=True),
        callbacks=[SavesAt(9, path)],
        plugins=IOS[io] and IOS[io](),
        max_epochs=2,
    )
    resumed = fitted(
        Regression(dropout=0.2), data(shuffle=True), ckpt_path=path, plugins=IOS[io] and IOS[io](), max_epochs=2
    )
    assert torch.equal(losses_of(resumed), losses_of(whole)[9:])
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_second_fit_goes_on_with_the_random_numbers():
    trainer(max_steps=1).fit(Regression(dropout=0.5), data())
    state = torch.hpu.get_rng_state()
    trainer(max_steps=0).fit(Regression(dropout=0.5), data())
    assert torch.equal(torch.hpu.get_rng_state(), state)


@pytest.mark.parametrize("io", ["portable", "hpu"])
def test_checkpoints_move_to_and_from_the_cpu(tmp_path, io):
    expected = losses_of(fitted(**ON_CPU))
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    fitted(callbacks=[SavesAt(7, there)], plugins=IOS[io] and IOS[io]())
    on_cpu = fitted(ckpt_path=there, callbacks=[SavesAt(14, back)], plugins=IOS[io] and TorchCheckpointIO(), **ON_CPU)
    on_hpu = fitted(ckpt_path=back, plugins=IOS[io] and IOS[io]())
    torch.testing.assert_close(losses_of(on_cpu), expected[7:], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses_of(on_hpu), expected[14:], rtol=1e-5, atol=0)


def test_statistics_of_the_device_are_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    fitted(callbacks=[DeviceStatsMonitor()], logger=logger, log_every_n_steps=5)
    (logged,) = tmp_path.rglob("metrics.csv")
    assert "memory_used" in logged.read_text()
