"""Modules within a module."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from torch import nn

from dstrat import TrainModule


class Backbone(TrainModule):
    """A module that logs, and knows where the training is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.seen = []

    def forward(self, x):
        y = self.layer(x)
        self.log("mean", y.detach().mean())
        self.log_dict({"number": float(self.global_step)}, on_step=False, on_epoch=True)
        self.seen.append((self.current_epoch, self.global_step))
        return y


@pytest.mark.parametrize("where", ["attribute", "list", "configure_model"])
def test_a_module_within_another_logs_and_knows_the_epoch(quiet_trainer, line_class, loader, where):
    class Outer(line_class):
        def __init__(self):
            super().__init__()
            if where != "configure_model":
                self.parts = nn.ModuleList([Backbone()]) if where == "list" else Backbone()

        def configure_model(self):
            if where == "configure_model":
                self.parts = Backbone()

        @property
        def backbone(self):
            return self.parts[0] if where == "list" else self.parts

        def loss(self, batch):
            return nn.functional.mse_loss(self.backbone(batch[0]), batch[1])

    module = Outer()
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, loader(24))
    assert module.backbone.seen == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert trainer.callback_metrics["number"] == 2.5
    assert "mean" in trainer.callback_metrics


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
@pytest.mark.parametrize("attribute", [None, "metric", "part.metric"])
def test_a_module_within_another_logs_a_metric_object(quiet_trainer, line_class, loader, averaging, attribute):
    from torchmetrics import SumMetric

    class Counting(TrainModule):
        def __init__(self):
            super().__init__()
            self.metric = SumMetric()

        def count(self, batch):
            self.metric.update(len(batch[0]))
            self.log("samples", self.metric, metric_attribute=attribute)

    class Outer(line_class):
        def __init__(self):
            super().__init__()
            self.part = Counting()

        def test_step(self, batch, batch_idx):
            self.part.count(batch)

    [result] = quiet_trainer(strategy=averaging(), devices=2).test(Outer(), loader(48))  # a batch for one process
    assert result == {"samples": 48.0}
