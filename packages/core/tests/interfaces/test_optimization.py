"""The shapes of what ``configure_optimizers`` returns."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from dstrat.errors import MisuseError
from dstrat.interfaces.optimizers import SchedulerConfig, read_optimizers

ONE, OTHER = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
STEPPED, WATCHING = StepLR(ONE, 1), ReduceLROnPlateau(OTHER)


class Own:
    """A scheduler that is none of torch's."""

    def step(self, value):
        """Do nothing."""


OWN = Own()


def watched(scheduler, reduce_on_plateau):
    return {"scheduler": scheduler, "monitor": "x", "reduce_on_plateau": reduce_on_plateau}


def configs(*given):
    return [(config.scheduler, config.interval, config.frequency, config.monitor) for config in given]


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        (None, [], []),
        (ONE, [ONE], []),
        ([ONE, OTHER], [ONE, OTHER], []),
        ((ONE, OTHER), [ONE, OTHER], []),
        (([ONE], [STEPPED]), [ONE], [(STEPPED, "epoch", 1, None)]),
        (([ONE], [{"scheduler": STEPPED, "interval": "step"}]), [ONE], [(STEPPED, "step", 1, None)]),
        ({"optimizer": ONE}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": None}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": STEPPED}, [ONE], [(STEPPED, "epoch", 1, None)]),
        (
            {"optimizer": OTHER, "lr_scheduler": WATCHING, "monitor": "loss"},
            [OTHER],
            [(WATCHING, "epoch", 1, "loss")],
        ),
        (
            [{"optimizer": ONE, "lr_scheduler": {"scheduler": STEPPED, "frequency": 3}}, {"optimizer": OTHER}],
            [ONE, OTHER],
            [(STEPPED, "epoch", 3, None)],
        ),
        (([OTHER], [SchedulerConfig(scheduler=WATCHING, monitor="x")]), [OTHER], [(WATCHING, "epoch", 1, "x")]),
        (([ONE], {"scheduler": STEPPED, "interval": "step"}), [ONE], [(STEPPED, "step", 1, None)]),
        (([ONE], STEPPED), [ONE], [(STEPPED, "epoch", 1, None)]),
        (([ONE], None), [ONE], []),
        (([ONE], OTHER), [ONE, OTHER], []),
        (([ONE], [{"scheduler": OWN, "monitor": "x"}]), [ONE], [(OWN, "epoch", 1, "x")]),
        (([ONE], [watched(STEPPED, True)]), [ONE], [(STEPPED, "epoch", 1, "x")]),
        (([ONE], [watched(STEPPED, False)]), [ONE], [(STEPPED, "epoch", 1, None)]),
        (([OTHER], [watched(WATCHING, True)]), [OTHER], [(WATCHING, "epoch", 1, "x")]),
    ],
)
def test_shapes_that_are_known(returned, optimizers, schedulers):
    read = read_optimizers(returned)
    assert list(read.optimizers) == optimizers
    assert configs(*read.schedulers) == schedulers


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("adam", "configure_optimizers returned 'adam'; it must return an optimizer, a list of optimizers"),
        ({"optimiser": ONE}, "has unknown keys ['optimiser']; it must return"),
        ({"lr_scheduler": STEPPED}, 'has no "optimizer"; it must return'),
        ({"optimizer": STEPPED}, "where an optimizer is expected"),
        (([STEPPED], []), "where an optimizer is expected"),
        (([ONE], ["cosine"]), "a scheduler needs a step method, and 'cosine' has none"),
        (([ONE], [{"sched": STEPPED}]), "a scheduler's dict has unknown keys ['sched']; possible keys are scheduler,"),
        (([ONE], [{"interval": "step"}]), 'a scheduler\'s dict has no "scheduler"; possible keys are'),
        (([ONE], [{"scheduler": STEPPED, "interval": "batch"}]), "interval 'batch' of a scheduler is not 'step' or"),
        (([ONE], [{"scheduler": STEPPED, "frequency": 0}]), "frequency 0 of a scheduler must be an int of at least 1"),
        (([ONE], [{"scheduler": STEPPED, "frequency": "2"}]), "frequency '2' of a scheduler must be an int"),
        (
            ([OTHER], [STEPPED]),
            "returned a StepLR of another SGD than those it returned, so that it would have no effect",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": WATCHING, "monitor": "x"}},
            "ReduceLROnPlateau of another SGD",
        ),
        (([OTHER], [WATCHING]), "ReduceLROnPlateau needs a value to watch"),
        (([ONE], [{"scheduler": STEPPED, "reduce_on_plateau": True}]), "StepLR needs a value to watch"),
        (([OTHER], [watched(WATCHING, False)]), "ReduceLROnPlateau takes the monitored value, and has reduce_on_pl"),
        (([ONE], [{"scheduler": STEPPED, "monitor": "x"}]), "StepLR takes no value, and has monitor='x': leave it out"),
        ({"optimizer": ONE, "lr_scheduler": STEPPED, "monitor": "x"}, "StepLR takes no value, and has monitor='x'"),
    ],
)
def test_other_shapes_are_errors_that_say_what_is_possible(returned, message):
    with pytest.raises(MisuseError, match=re.escape(message)):
        read_optimizers(returned)


def test_a_scheduler_may_be_of_an_optimizer_that_a_returned_one_wraps():
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, wrapped):
            self.param_groups, self.wrapped = wrapped.param_groups, wrapped

    wrapping = Wrapping(ONE)
    assert configs(*read_optimizers(([wrapping], [STEPPED])).schedulers) == [(STEPPED, "epoch", 1, None)]
