"""Metric objects over ranks with different numbers of batches, or none: the value is that of one device."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop, TrainModule

if find_spec("torchmetrics") is None:
    pytest.skip("torchmetrics is not installed", allow_module_level=True)

CLASSES = 3


def metrics_of_torchmetrics():
    """Metrics whose states are of every kind in torchmetrics, and the arguments of their updates."""
    import torchmetrics as tm
    from torchmetrics import wrappers
    from torchmetrics.retrieval import RetrievalMAP
    from torchmetrics.text import BLEUScore

    def of_classes(kind, **kwargs):
        return kind("multiclass", num_classes=CLASSES, **kwargs)

    def two(x, y):
        return x[:, 0], x[:, 1]

    def texts(x, y):
        words = [["the cat sat on a mat", "a dog ate the red hat", "it was on the mat"][label] for label in y.tolist()]
        return [text.replace("the", "a") for text in words], [[text] for text in words]

    classification = {
        "sum": of_classes(tm.Accuracy),
        "cat": of_classes(tm.AUROC),
        "group": tm.MetricCollection({"f1": of_classes(tm.F1Score), "precision": of_classes(tm.Precision)}),
        "nested": tm.MetricCollection({"a": tm.MetricCollection([of_classes(tm.Recall), of_classes(tm.AUROC)])}),
        "classwise": wrappers.ClasswiseWrapper(of_classes(tm.Recall, average=None)),
        "minmax": wrappers.MinMaxMetric(of_classes(tm.Accuracy)),
        "on_cpu": of_classes(tm.AUROC, compute_on_cpu=True),
    }
    return {
        **{name: (metric, lambda x, y: (x.softmax(1), y)) for name, metric in classification.items()},
        "stacked": (tm.PearsonCorrCoef(), two),
        "stacked_outputs": (tm.PearsonCorrCoef(num_outputs=2), lambda x, y: (x[:, :2], x[:, 1:])),
        "spearman": (tm.SpearmanCorrCoef(), two),
        "order": (tm.CatMetric(), lambda x, y: (x[:, 0],)),
        "max": (tm.MaxMetric(), lambda x, y: (x[:, 0],)),
        "list": (RetrievalMAP(), lambda x, y: (x[:, 0].sigmoid(), y > 0, y)),
        "outputs": (wrappers.MultioutputWrapper(tm.MeanSquaredError(), 2), lambda x, y: (x[:, :2], x[:, 1:])),
        "texts": (BLEUScore(n_gram=2), texts),
    }


def metrics_of_users():
    """Metrics of users: each reduction, other shapes and dtypes after an update than before, and other methods."""
    import torchmetrics as tm

    class States(tm.Metric):
        def __init__(self):
            super().__init__()
            for reduction in ("sum", "mean", "max", "min"):
                self.add_state(f"of_{reduction}", torch.tensor(0), dist_reduce_fx=reduction)
            self.add_state("of_function", torch.zeros(2), dist_reduce_fx=lambda values: values.amax(0))
            self.add_state("texts", [], dist_reduce_fx=None)
            self.add_state("pieces", [], dist_reduce_fx=None)
            self.add_state("joined", [], dist_reduce_fx="cat")
            self.add_state("longest", [], dist_reduce_fx=lambda values: [max(values, key=len)])

        def update(self, x, y):
            values, count = -x.double().sum(1).abs() - 1, self.update_count
            self.of_sum = self.of_sum + values.sum()
            self.of_mean = self.of_mean + (values.mean() - self.of_mean) / count
            self.of_max = values.max() if count == 1 else torch.maximum(self.of_max, values.max())
            self.of_min = torch.minimum(self.of_min, values.min())
            self.of_function = torch.maximum(self.of_function, -values.min().expand(2).float())
            self.texts += [(f"{value:.3f}", ()) for value in values.tolist()]
            dtypes = (torch.int32, torch.bfloat16, torch.bool)
            self.pieces += [torch.ones(label, 2, dtype=dtypes[label]) for label in y.tolist()]
            self.joined.append(y)
            self.longest.append(torch.arange(int(y.sum())))

        def compute(self):
            numbers = [self.of_sum, self.of_mean, self.of_max, self.of_min, self.of_function.sum()]
            numbers += [sum(float(text) for text, _ in self.texts), sum(float(piece.sum()) for piece in self.pieces)]
            numbers += [len(self.pieces), torch.cat([*self.joined]).sum(), max(map(len, self.longest))]
            return torch.tensor([float(number) for number in numbers]).double()

    class Counted(tm.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

        def add(self, x, y):
            self.count = self.count + len(y)

        def update(self):
            raise AssertionError("add is used")

        def compute(self):
            return self.count

        def forward(self, *args):
            self.add(*args)

    class Own(Counted):
        def update(self, x, y):
            self.add(x, y)

        def forward(self, *args):
            self.update(*args)

        def _sync_dist(self, *args, **kwargs):
            torch.distributed.all_reduce(self.count)

    def unchanged(x, y):
        return x, y

    return {"states": (States(), unchanged), "counted": (Counted(), unchanged), "own": (Own(), unchanged)}


class Measured(TrainModule):
    """Updates all metrics in each step, and logs what a hook computes from them.

    Args:
        in_steps: Whether some metrics are computed in steps too, which are collectives then.
    """

    def __init__(self, *, in_steps: bool = False):
        super().__init__()
        import torchmetrics as tm
        from torchmetrics.retrieval import RetrievalMAP

        self.layer = nn.Linear(CLASSES, CLASSES)
        kinds = metrics_of_torchmetrics() | metrics_of_users()
        self.metrics = nn.ModuleDict({name: metric for name, (metric, _) in kinds.items()})
        self.arguments = {name: arguments for name, (_, arguments) in kinds.items()}
        self.logged, self.logged_list, self.unused = tm.MeanMetric(), RetrievalMAP(), tm.SumMetric()
        self.tracker = tm.MetricTracker(tm.MeanSquaredError())
        self.in_steps, self.on_step = in_steps, tm.MeanSquaredError(dist_sync_on_step=in_steps)

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for name, arguments in self.arguments.items():
            # MinMaxMetric computes in forward: its extremes would be those of steps.
            (self.metrics[name].update if name == "minmax" else self.metrics[name])(*arguments(x, y))
        self.logged.update(x)
        self.logged_list.update(x[:, 0].sigmoid(), y > 0, y)
        self.tracker.update(x, x + y[:, None])
        self.on_step(x, x + y[:, None])
        if self.in_steps:
            self.metrics["cat"].compute()
        self.log_dict({"logged": self.logged, "logged_list": self.logged_list, "on_step": self.on_step})

    def on_validation_epoch_end(self):
        for name, metric in [*self.metrics.items(), ("unused", self.unused), ("tracker", self.tracker)]:
            if name != "sum" or metric.update_called:  # also on a rank without data
                values = metric.compute()
                values = values if isinstance(values, dict) else {"": values}
                for key, value in values.items():
                    for index, number in enumerate(torch.as_tensor(value).flatten().tolist()):
                        self.log(f"{name}.{key}.{index}", number)
        for metric in [*self.metrics.values(), self.tracker]:
            metric.reset()


def samples(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, CLASSES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


# Batches of ranks: 2 and 1, of which the last is smaller; 2, 1 and 1; one rank without data; one sample for each rank.
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # of a correlation of one sample, a class without any
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize(
    ("devices", "count", "batch_size"),
    [
        (3, 14, 4),
        (2, 1, 4),
        (3, 2, 1),
        pytest.param(2, 10, 4, marks=pytest.mark.variant),
        pytest.param(2, 2, 4, marks=pytest.mark.variant),
    ],
)
def test_the_value_of_each_kind_of_metric_is_that_of_one_device(
    quiet_trainer, averaging, devices, count, batch_size, in_steps
):
    if in_steps and count < devices:
        return  # a rank without any batch cannot take part in steps that communicate
    loader = DataLoader(samples(count), batch_size=batch_size)
    [alone] = quiet_trainer().validate(Measured(), loader)
    trainer = quiet_trainer(strategy=averaging(timeout=timedelta(seconds=60)), devices=devices)
    [together] = trainer.validate(Measured(in_steps=in_steps), loader)
    if count < 2 * devices:  # torchmetrics takes the deviation of one sample for too small: the correlation is nan
        alone, together = (
            {name: value for name, value in values.items() if "stacked" not in name} for values in (alone, together)
        )
    assert together == pytest.approx(alone, rel=1e-6, nan_ok=True)


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # of a class without any sample
def test_metrics_of_a_loop_of_ones_own_have_the_value_of_one_device(averaging):
    def evaluate(loop):
        from torchmetrics import AUROC, CatMetric  # after the launch
        from torchmetrics.retrieval import RetrievalMAP

        loop.setup(nn.Linear(CLASSES, 1))
        metrics = AUROC("multiclass", num_classes=CLASSES), CatMetric(), RetrievalMAP()
        auroc, order, retrieval = (metric.to(loop.device) for metric in metrics)
        with loop.evaluation():
            for x, y in loop.evaluation_loader(DataLoader(samples(10), batch_size=4)):
                auroc.update(x.softmax(1), y)
                order.update(x[:, 0])
                retrieval.update(x[:, 0].sigmoid(), y > 0, y)
        return [float(auroc.compute()), order.compute().tolist(), float(retrieval.compute())]

    alone, together = (
        OwnLoop(dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=devices)).launch(evaluate)
        for strategy, devices in (("single_device", 1), (averaging(timeout=timedelta(seconds=60)), 2))
    )
    assert together == [pytest.approx(value) for value in alone]


def test_torchmetrics_own_gathering_is_back_after_a_run(quiet_trainer, make_line, loader):
    import torchmetrics

    sync = torchmetrics.Metric.sync
    module = make_line()
    seen = []
    module.on_validation_epoch_end = lambda: seen.append(torchmetrics.Metric.sync is sync)
    quiet_trainer().validate(module, loader())
    assert (seen, torchmetrics.Metric.sync is sync) == ([False], True)
