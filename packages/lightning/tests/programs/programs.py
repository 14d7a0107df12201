"""Modules of third parties with small synthetic data, none of them changed."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def generator():
    return torch.Generator().manual_seed(11)


def tensors(*shapes, batch_size=4, count=80, shuffle=True):
    """Return a loader of random tensors; an int as a shape is the number of classes of labels."""
    data = [
        torch.randint(0, shape, (count,), generator=generator())
        if isinstance(shape, int)
        else torch.randn(count, *shape, generator=generator())
        for shape in shapes
    ]
    return DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=shuffle)


class Samples(Dataset):
    """Dicts of tensors."""

    def __init__(self, make, count=80):
        torch.manual_seed(5)
        self.samples = [make() for _ in range(count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def samples(make, batch_size=4, **options):
    return DataLoader(Samples(make, **options), batch_size=batch_size, shuffle=True)


# Lightning's demos


def boring_data():
    """Return the demo's data, shuffled: an unshuffled training loader stays so in dstrat, and not in Lightning."""
    from lightning.pytorch.demos.boring_classes import RandomDataset

    data = RandomDataset(32, 64)
    return {"train_dataloaders": DataLoader(data, shuffle=True), "val_dataloaders": DataLoader(data)}


@program
def lightning_boring():
    from lightning.pytorch.demos.boring_classes import BoringModel

    return BoringModel(), boring_data(), {}


@program
def lightning_boring_manual():
    from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

    return ManualOptimBoringModel(), boring_data(), {}


@program
def lightning_transformer():
    from lightning.pytorch.demos import LightningTransformer

    file = Path("data", "wikitext-2.txt")  # which its prepare_data would download
    file.parent.mkdir(exist_ok=True)
    file.write_text("one two three four\n" * 100)
    tokens = torch.randint(0, 100, (80, 36), generator=generator())
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4, shuffle=True)
    return LightningTransformer(vocab_size=100), {"train_dataloaders": loader}, {}


# torchgeo


def image_and_label():
    return {"image": torch.randn(3, 64, 64), "label": torch.randint(0, 5, ()).long()}


def image_and_mask():
    return {"image": torch.randn(3, 64, 64), "mask": torch.randint(0, 4, (64, 64)).long()}


@program
def torchgeo_classification():
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(model="resnet18", weights=None, in_channels=3, num_classes=5, lr=1e-3)
    return task, {"train_dataloaders": samples(image_and_label), "val_dataloaders": samples(image_and_label)}, {}


@program
def torchgeo_segmentation():
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(model="unet", backbone="resnet18", weights=None, in_channels=3, num_classes=4)
    return task, {"train_dataloaders": samples(image_and_mask), "val_dataloaders": samples(image_and_mask)}, {}


@program
def torchgeo_segmentation_float64():
    """The same in float64, where the strategies' orders of summation differ less than 1e-6 after ten steps."""
    task, data, options = torchgeo_segmentation()
    return task, {name: doubles(loader) for name, loader in data.items()}, {**options, "precision": "64-true"}


def doubles(loader):
    for sample in loader.dataset.samples:
        sample["image"] = sample["image"].double()
    return loader


@program
def torchgeo_regression():
    from torchgeo.trainers import RegressionTask

    def make():
        return {"image": torch.randn(3, 64, 64), "label": torch.randn(1)}

    task = RegressionTask(model="resnet18", weights=None, in_channels=3, num_outputs=1)
    return task, {"train_dataloaders": samples(make), "val_dataloaders": samples(make)}, {}


@program
def torchgeo_simclr():
    from torchgeo.trainers import SimCLRTask

    task = SimCLRTask(
        model="resnet18", weights=None, in_channels=3, size=64, memory_bank_size=0, gather_distributed=False
    )
    return task, {"train_dataloaders": samples(image_and_label)}, {}


@program
def torchgeo_simclr_float64():
    task, data, options = torchgeo_simclr()
    return task, {name: doubles(loader) for name, loader in data.items()}, {**options, "precision": "64-true"}


@program
def torchgeo_byol():
    from torchgeo.trainers import BYOLTask

    return BYOLTask(model="resnet18", weights=None, in_channels=3), {"train_dataloaders": samples(image_and_label)}, {}


# pytorch-forecasting


def series():
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "time": np.tile(np.arange(40), 8),
            "group": np.repeat([str(n) for n in range(8)], 40),
            "value": rng.normal(size=320) + 10,
        }
    )
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )


def forecasting(cls, **options):
    data = series()
    loaders = {"train_dataloaders": data.to_dataloader(train=True, batch_size=8, num_workers=0)}
    return cls.from_dataset(data, **options), loaders, {"gradient_clip_val": 0.1}


@program
def forecasting_tft():
    from pytorch_forecasting import TemporalFusionTransformer

    return forecasting(TemporalFusionTransformer, hidden_size=8, attention_head_size=1, dropout=0.1, log_interval=-1)


@program
def forecasting_nbeats():
    from pytorch_forecasting import NBeats

    return forecasting(NBeats, widths=[16, 32], backcast_loss_ratio=0.1, log_interval=-1)


@program
def forecasting_nhits():
    from pytorch_forecasting import NHiTS

    return forecasting(NHiTS, hidden_size=16, log_interval=-1)


@program
def forecasting_deepar():
    from pytorch_forecasting import DeepAR

    return forecasting(DeepAR, hidden_size=8, rnn_layers=1, log_interval=-1)


# lightly


@program
def lightly_linear_classifier():
    from lightly.utils.benchmarking import LinearClassifier
    from torch import nn

    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.BatchNorm1d(32), nn.ReLU())
    task = LinearClassifier(backbone, 4, lr=0.1, feature_dim=32, num_classes=5, topk=(1,))
    return task, {"train_dataloaders": tensors((3, 8, 8), 5), "val_dataloaders": tensors((3, 8, 8), 5)}, {}


lightly_linear_classifier.library = "pytorch_lightning"


# anomalib


@program
def anomalib_ganomaly():
    from anomalib.data import ImageBatch
    from anomalib.models import Ganomaly

    def collate(images):
        return ImageBatch(image=torch.stack(images), gt_label=torch.zeros(len(images), dtype=torch.bool))

    images = torch.rand(80, 3, 32, 32, generator=generator())
    loader = DataLoader(list(images), batch_size=4, shuffle=True, collate_fn=collate)
    off = dict.fromkeys(("evaluator", "visualizer", "post_processor"), False)
    resized = Ganomaly.configure_pre_processor((32, 32))
    task = Ganomaly(batch_size=4, n_features=8, latent_vec_size=16, pre_processor=resized, **off)
    return task, {"train_dataloaders": loader}, {}


# Programs whose source is not on the index: a folder with their files, in PROGRAM_SOURCES


def source(name):
    """Return a third party's file, executed up to where it would download data or train."""
    text = Path(os.environ["PROGRAM_SOURCES"], name).read_text()
    module = types.ModuleType(name.removesuffix(".py"))
    sys.modules[module.__name__] = module
    exec(compile(text, name, "exec"), vars(module))
    return module


def pairs():
    return (torch.randn(3, 32, 32), torch.randn(3, 32, 32)), 0, "name"


@program
def lightly_simclr():
    return source("simclr.py").SimCLR(), {"train_dataloaders": samples(pairs, batch_size=4)}, {}


lightly_simclr.library = "pytorch_lightning"


@program
def lightning_gan():
    data = tensors((1, 28, 28), 10)
    return source("generative_adversarial_net.py").GAN(), {"train_dataloaders": data}, {}


@program
def transformers_glue():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    small = DistilBertConfig(vocab_size=100, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=32)
    DistilBertForSequenceClassification(small).save_pretrained("tiny-bert")

    def make():
        ids = torch.randint(0, 100, (16,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, ())}

    model = source("text_transformers.py").GLUETransformer(
        "tiny-bert", num_labels=2, task_name="mrpc", learning_rate=1e-3
    )
    return model, {"train_dataloaders": samples(make)}, {}


transformers_glue.library = "pytorch_lightning"


@program
def smp_camvid():
    model = source("smp_model.py").CamVidModel("FPN", "resnet18", in_channels=3, out_classes=4)
    images = torch.randn(80, 3, 64, 64, generator=generator())
    masks = torch.randint(0, 4, (80, 64, 64), generator=generator())
    return model, {"train_dataloaders": DataLoader(TensorDataset(images, masks), batch_size=4, shuffle=True)}, {}
