from __future__ import annotations

import pytest
import torch

from dstrat import GradientAccumulationScheduler, SingleDeviceStrategy
from dstrat.errors import ConflictError, RequestError


def test_the_number_of_batches_for_a_step_follows_the_epochs(fit, make_line, line_class):
    steps = []

    class Counting(line_class):
        def on_train_epoch_end(self):
            steps.append(self.global_step)

    callback = GradientAccumulationScheduler({3: 4, 1: 3})
    trainer = fit(callback, module=make_line(Counting), validates=False, limit_train_batches=6, max_epochs=5)
    assert steps == [6, 8, 10, 12, 14]  # of six batches in groups of four, the last group has two
    assert trainer.accumulate_grad_batches == 1


def test_weights_equal_those_of_a_fixed_number(fit, make_line, quiet_trainer, loader):
    scheduled, fixed = make_line(), make_line()
    fit(GradientAccumulationScheduler({0: 4}), module=scheduled, validates=False, limit_train_batches=6)
    fit(None, module=fixed, validates=False, limit_train_batches=6, accumulate_grad_batches=4)
    assert torch.equal(scheduled.layer.weight, fixed.layer.weight)


@pytest.mark.parametrize("max_epochs", [1, 3, 5])
def test_the_steps_are_known_before_training(fit, make_line, line_class, max_epochs):
    expected = []

    class Asking(line_class):
        def configure_optimizers(self):
            expected.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    callback = GradientAccumulationScheduler({3: 4, 1: 3, 9: 1})
    options = {"validates": False, "limit_train_batches": 5}
    trainer = fit(callback, module=make_line(Asking), max_epochs=max_epochs, **options)
    assert expected == [trainer.global_step]
    trainer = fit(callback, module=make_line(Asking), max_epochs=max_epochs, max_steps=4, **options)
    assert expected[1] == trainer.global_step == min(4, expected[0])


def test_the_number_of_an_epoch_can_be_asked_for():
    callback = GradientAccumulationScheduler({8: 1, 2: 8, 4: 4})
    assert [callback.get_accumulate_grad_batches(epoch) for epoch in range(10)] == [1, 1, 8, 8, 4, 4, 4, 4, 1, 1]


def test_a_run_that_goes_on_is_where_the_epoch_says(fit, make_line, tmp_path):
    def train(max_epochs, ckpt_path=None):
        return fit(
            GradientAccumulationScheduler({1: 3}),
            module=make_line(),
            validates=False,
            limit_train_batches=6,
            max_epochs=max_epochs,
            ckpt_path=ckpt_path,
            enable_checkpointing=True,
        )

    first = train(2)
    assert train(3, first.checkpoint_callback.best_model_path).global_step == 6 + 2 + 2


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        ({}, r"scheduling=\{\} is empty"),
        ({-1: 2}, r"the epoch -1 in scheduling must be an int of at least 0"),
        ({"0": 2}, r"the epoch '0' in scheduling must be an int of at least 0"),
        ({2: 0}, r"the number of batches 0 from epoch 2 on in scheduling must be an int of at least 1"),
    ],
)
def test_what_makes_no_schedule_is_refused(scheduling, message):
    with pytest.raises(RequestError, match=message):
        GradientAccumulationScheduler(scheduling)


def test_what_else_decides_about_accumulation_is_a_conflict(fit, make_line, line_class, quiet_trainer, loader):
    class Manual(line_class):
        automatic_optimization = False

    class Engine(SingleDeviceStrategy):
        accumulates_gradients = True

    callback = GradientAccumulationScheduler({0: 2})
    trainer = quiet_trainer(callbacks=callback, accumulate_grad_batches=4)
    with pytest.raises(ConflictError, match=r"conflicts with accumulate_grad_batches=4 of the Trainer"):
        trainer.fit(make_line(), loader())
    assert trainer.accumulate_grad_batches == 4
    with pytest.raises(ConflictError, match=r"conflicts with the manual optimization of Manual"):
        fit(callback, module=make_line(Manual))
    with pytest.raises(ConflictError, match=r"conflicts with Engine, which accumulates gradients by itself"):
        fit(callback, strategy=Engine())


def test_several_ranks_change_together(fit, make_line, averaging):
    callback = GradientAccumulationScheduler({1: 3})
    module = make_line()
    trainer = fit(callback, module=module, validates=False, limit_train_batches=3, devices=2, strategy=averaging())
    assert trainer.global_step == 3 + 1 + 1
