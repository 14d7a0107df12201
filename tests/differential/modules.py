"""The module, data and logger of a random program, for the classes of Lightning or of dstrat."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

FEATURES, CLASSES, VOCABULARY = 3, 2, 7

HOOKS = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_after_backward", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)
OF_MODULES = (*HOOKS, "on_validation_model_eval", "on_validation_model_train")


# Data


class Table(Dataset[Any]):
    def __init__(self, spec: dict[str, Any], size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        if spec["embed"]:
            self.inputs = torch.randint(0, VOCABULARY, (size, FEATURES), generator=generator)
        else:
            self.inputs = torch.randn(size, FEATURES, generator=generator)
        total = self.inputs.float().sum(1)
        is_classification = spec["loss"] == "ce"
        middle = self.inputs.float().mean() * FEATURES
        self.targets = (total > middle).long() if is_classification else total[:, None] / FEATURES
        self.is_dict = spec["batch"] == "dict"

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inputs[index], self.targets[index]
        return {"x": x, "y": y, "i": index} if self.is_dict else (x, y)


class Stream(IterableDataset[Any]):
    def __init__(self, table: Table) -> None:
        self.table = table

    def __iter__(self) -> Any:
        return (self.table[index] for index in range(len(self.table)))


def evaluation_loader(spec: dict[str, Any], size: int, batch_size: int, seed: int) -> DataLoader[Any]:
    return DataLoader(Table(spec, size, seed), batch_size=batch_size)


def train_loader(spec: dict[str, Any], combined: Any) -> Any:
    """Return the training loader; ``combined`` is the library's CombinedLoader, for programs with two."""

    def one(size: int, seed: int) -> DataLoader[Any]:
        options = {"batch_size": spec["bs"], "drop_last": spec["drop_last"]}
        table = Table(spec, size, seed)
        if spec["iterable"]:
            return DataLoader(Stream(table), **options)
        return DataLoader(table, shuffle=spec["shuffle"], **options)

    if spec["train_loaders"] == 1:
        return one(spec["n"], 0)
    both = {"a": one(spec["n"], 0), "b": one(max(2, spec["n"] // 2), 9)}
    return both if spec["combined"] == "max_size_cycle" else combined(both, spec["combined"])


def val_loader(spec: dict[str, Any]) -> Any:
    if not spec["val_n"]:
        return None
    several = [
        evaluation_loader(spec, spec["val_n"] + 3 * k, spec["val_bs"], 1 + k) for k in range(spec["val_loaders"])
    ]
    return several if len(several) > 1 else several[0]


# Records


def number(value: Any) -> float:
    return float(value.detach().float()) if isinstance(value, torch.Tensor) else float(value)


def shape(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return list(batch.shape)
    if isinstance(batch, dict):
        return {key: shape(value) for key, value in sorted(batch.items())}
    return [shape(value) for value in batch] if isinstance(batch, (list, tuple)) else type(batch).__name__


# Classes of a library


@functools.cache
def logger_class(library: Any) -> Any:
    class Rows(library.Logger):
        """Keeps all rows."""

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        @property
        def name(self) -> str:
            return "rows"

        @property
        def version(self) -> int:
            return 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.rows.append([step, {name: float(value) for name, value in metrics.items()}])

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            pass

    return Rows


@functools.cache
def data_class(library: Any, *, validates: bool) -> Any:
    class Data(library.DataModule):
        def __init__(self, spec: dict[str, Any], events: list[Any]) -> None:
            super().__init__()
            self.spec, self.events = spec, events

        def prepare_data(self) -> None:
            self.events.append(("data.prepare_data", ""))

        def setup(self, stage: str) -> None:
            self.events.append(("data.setup", str(getattr(stage, "value", stage))))

        def teardown(self, stage: str) -> None:
            self.events.append(("data.teardown", str(getattr(stage, "value", stage))))

        def train_dataloader(self) -> Any:
            self.events.append(("data.train_dataloader", ""))
            return train_loader(self.spec, library.CombinedLoader)

        if validates:  # an overridden method means that there is validation

            def val_dataloader(self) -> Any:
                self.events.append(("data.val_dataloader", ""))
                return val_loader(self.spec)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.events.append(("data.on_after_batch_transfer", dataloader_idx))
            return batch

    return Data


@functools.cache
def module_class(library: Any, *, has_loaders: bool, validates: bool) -> Any:
    """Return the class of a program's module, which records its hooks and logs in those that the spec names."""

    class Net(library.Module):
        def __init__(self, spec: dict[str, Any], events: list[Any]) -> None:
            super().__init__()
            self.spec, self.events = spec, events
            self.losses: list[Any] = []
            self.val_losses: list[Any] = []
            size, width = FEATURES, spec["width"]
            if spec["embed"]:
                self.embedding, size = nn.Embedding(VOCABULARY, width), width
            layers: list[nn.Module] = []
            for _ in range(spec["layers"] - 1):
                layers += [nn.Linear(size, width), *([nn.BatchNorm1d(width)] if spec["bn"] else []), nn.ReLU()]
                layers += [nn.Dropout(spec["dropout"])] if spec["dropout"] else []
                size = width
            outputs = CLASSES if spec["loss"] == "ce" else 1
            self.body, self.head, self.twin = nn.Sequential(*layers), nn.Linear(size, outputs), nn.Linear(size, outputs)
            if spec["tied"]:
                self.twin.weight = self.head.weight
            if spec["frozen"]:
                (self.embedding if spec["embed"] else self.twin).requires_grad_(False)
            self.automatic_optimization = not spec["manual"]
            self.mean_metric, self.val_metric = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

        def record(self, name: str, value: Any = "", **context: Any) -> None:
            self.events.append((name, value))
            self.log_in(name, **context)

        def log_in(self, where: str, *, loss: Any = None, batch_idx: int = 0, loader: int = 0, size: int = 1) -> None:
            for entry in self.spec["logs"]:
                if entry["where"] == where:
                    value = self.value_of(entry["value"], where, loss, batch_idx, loader, size)
                    self.log(entry["name"], value, **entry.get("kw", {}))

        def value_of(self, kind: str, where: str, loss: Any, batch_idx: int, loader: int, size: int) -> Any:
            if kind == "loss":
                return torch.tensor(float(self.trainer.global_step)) if loss is None else loss
            if kind == "metric":
                metric = self.val_metric if "validation" in where else self.mean_metric
                metric(1.0 if loss is None else loss.detach().float(), size)
                return metric
            values = {
                "float": 0.5 * (batch_idx + 1) + self.trainer.global_step,
                "int": batch_idx + 3 * loader + 1,
                "bool": batch_idx % 2 == 0,
            }
            return values[kind]

        # Steps

        def forward(self, x: Any) -> Any:
            x = self.embedding(x).mean(1) if self.spec["embed"] else x
            z = self.body(x)
            return self.head(z) + 0.1 * self.twin(z)

        def loss_of(self, batch: Any) -> Any:
            if isinstance(batch, dict) and "a" in batch:
                return sum(self.loss_of(one) for one in batch.values() if one is not None)
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            outputs = self(x)
            if self.spec["loss"] == "ce":
                return nn.functional.cross_entropy(outputs, y)
            return nn.functional.mse_loss(outputs, y.to(outputs.dtype))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss_of(batch)
            self.losses.append([self.current_epoch, batch_idx, self.global_step, number(loss)])
            self.events.append(("training_step", [batch_idx, shape(batch), self.training, torch.is_grad_enabled()]))
            first = batch["a"] if isinstance(batch, dict) and "a" in batch else batch
            size = 1 if first is None else len(first["x"] if isinstance(first, dict) else first[0])
            self.log_in("training_step", loss=loss, batch_idx=batch_idx, size=size)
            if self.spec["manual"]:
                self.optimize(batch, loss)
            if [self.current_epoch, batch_idx] in (self.spec["none"] or []):
                return None
            return loss * self.spec.get("factor", lambda *_: 1.0)(self.trainer, batch_idx)

        def optimize(self, batch: Any, loss: Any) -> None:
            optimizers = self.optimizers()
            for index, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
                optimizer.zero_grad()
                self.manual_backward(self.loss_of(batch) if index else loss)
                if self.spec["manual_clip"]:
                    self.clip_gradients(
                        optimizer, gradient_clip_val=self.spec["manual_clip"], gradient_clip_algorithm="norm"
                    )
                optimizer.step()
            if self.spec["manual_sched"] and self.trainer.is_last_batch:
                schedulers = self.lr_schedulers()
                for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                    if scheduler is not None:
                        scheduler.step()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss_of(batch)
            self.val_losses.append([self.current_epoch, batch_idx, dataloader_idx, number(loss)])
            described = [batch_idx, dataloader_idx, shape(batch), self.training, torch.is_grad_enabled()]
            self.events.append(("validation_step", described))
            size = len(batch["x"] if isinstance(batch, dict) else batch[0])
            self.log_in("validation_step", loss=loss, batch_idx=batch_idx, loader=dataloader_idx, size=size)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss_of(batch)
            self.log("test_loss", loss)
            self.log("test_max", loss, reduce_fx="max")

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["x"] if isinstance(batch, dict) else batch[0])

        # Loaders and optimizers

        if has_loaders:

            def train_dataloader(self) -> Any:
                self.events.append(("train_dataloader", ""))
                return train_loader(self.spec, library.CombinedLoader)

            if validates:

                def val_dataloader(self) -> Any:
                    self.events.append(("val_dataloader", ""))
                    return val_loader(self.spec)

        def configure_optimizers(self) -> Any:
            self.events.append(("configure_optimizers", ""))
            optimizers = [make_optimizer(self.spec, self.parameters())]
            if self.spec["manual"] == 2:
                optimizers.append(make_optimizer(self.spec, self.head.parameters()))
            if self.spec["scheduler"] is None:
                return optimizers if len(optimizers) > 1 else optimizers[0]
            configs = [{"scheduler": self.make_scheduler(o), **self.spec["sched"]} for o in optimizers]
            if self.spec["sched_format"] == "bare" and not self.spec["sched"]:
                return optimizers, [config["scheduler"] for config in configs]
            if self.spec["sched_format"] == "lists" or len(optimizers) > 1:
                return optimizers, configs
            return {"optimizer": optimizers[0], "lr_scheduler": configs[0]}

        def make_scheduler(self, optimizer: Any) -> Any:
            kind, schedulers = self.spec["scheduler"], torch.optim.lr_scheduler
            if kind == "onecycle":
                total = self.trainer.estimated_stepping_batches
                self.events.append(("estimated_stepping_batches", float(total)))
                steps = int(min(total, 10000)) + 2
                return schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps, cycle_momentum=False)
            if kind == "warmup":
                warmup = schedulers.LinearLR(optimizer, 0.1, 1.0, 2)
                return schedulers.SequentialLR(optimizer, [warmup, schedulers.ExponentialLR(optimizer, 0.9)], [2])
            makers = {
                "step": lambda: schedulers.StepLR(optimizer, 1, 0.7),
                "exp": lambda: schedulers.ExponentialLR(optimizer, 0.9),
                "lambda": lambda: schedulers.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
                "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 5),
                "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
            }
            return makers[kind]()

        # Hooks

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            self.record("on_train_batch_start", [batch_idx, shape(batch)], batch_idx=batch_idx)
            return -1 if [self.current_epoch, batch_idx] in (self.spec["skip"] or []) else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            described = sorted(outputs) if isinstance(outputs, dict) else type(outputs).__name__
            self.record("on_train_batch_end", [batch_idx, described], batch_idx=batch_idx)

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            described = [batch_idx, dataloader_idx]
            self.record("on_validation_batch_start", described, batch_idx=batch_idx, loader=dataloader_idx)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            described = [batch_idx, dataloader_idx, type(outputs).__name__]
            self.record("on_validation_batch_end", described, batch_idx=batch_idx, loader=dataloader_idx)

        def on_before_backward(self, loss: Any) -> None:
            self.record("on_before_backward", round(number(loss), 4))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.record("on_before_optimizer_step", type(optimizer).__name__)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.record("on_before_zero_grad")

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.events.append(("optimizer_step", [epoch, batch_idx]))
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.events.append(("lr_scheduler_step", None if metric is None else round(number(metric), 4)))
            super().lr_scheduler_step(scheduler, metric)

        def setup(self, stage: str) -> None:
            self.events.append(("setup", str(getattr(stage, "value", stage))))

        def configure_model(self) -> None:
            self.events.append(("configure_model", ""))

    for hook in OF_MODULES:
        setattr(Net, hook, _recorded(hook, getattr(Net, hook)))
    return Net


def _recorded(name: str, original: Any) -> Any:
    def hook(self: Any) -> Any:
        self.record(name)
        return original(self)

    return hook


def make_optimizer(spec: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    trainable: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    rate, kind, momentum = spec["lr"], spec["optimizer"], spec["momentum"]
    if spec["groups"] == 2 and len(trainable) > 1 and kind != "lbfgs":
        trainable = [{"params": trainable[:1]}, {"params": trainable[1:], "lr": rate / 2}]
    if kind == "sgd":
        return torch.optim.SGD(trainable, lr=rate, momentum=momentum)
    if kind == "adam":
        return torch.optim.Adam(trainable, lr=rate)
    if kind == "adamw":
        return torch.optim.AdamW(trainable, lr=rate, weight_decay=0.1)
    if kind == "rmsprop":
        return torch.optim.RMSprop(trainable, lr=rate / 5, momentum=momentum)
    return torch.optim.LBFGS(trainable, lr=rate, max_iter=2, history_size=2)
