"""Fits with divided sequences, for test_context.py: a module with attention, and functions of the ranks."""

import torch
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Pipeline, TrainModule

LENGTH, TOKENS, WIDTH, HEADS, KEY_HEADS = 16, 11, 16, 4, 2
STEPS = 5


def data(size=40):
    """Tokens with their positions and the next tokens, of which each sequence counts another number."""
    tokens = torch.randint(TOKENS, (size, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[torch.arange(LENGTH).expand(size, -1) >= 3 + 5 * torch.arange(size)[:, None] % LENGTH] = -100
    return TensorDataset(tokens[:, :-1], torch.arange(LENGTH).expand(size, -1), labels)


class Attention(nn.Module):
    """Causal attention, of whose key heads each serves two of queries."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.pair = nn.ModuleList(nn.Linear(WIDTH, WIDTH * KEY_HEADS // HEADS) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, *self.pair))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, pair):
        return self.tokens(pair[..., 0]) + self.positions(pair[..., 1])


def loss(logits, batch):
    return functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten())


def count(batch):
    return (batch[2] != -100).sum()


class Net(TrainModule):
    path = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Embedding(), Attention(), nn.Tanh(), Attention(), nn.Linear(WIDTH, TOKENS))
        self.losses, self.validated = [], []

    def configure_model(self):
        strategy = self.trainer.strategy
        if getattr(strategy, "tensor_parallel_size", 1) > 1:
            plan = {
                "query": ColwiseParallel(),
                "pair.0": ColwiseParallel(),
                "pair.1": ColwiseParallel(),
                "out": RowwiseParallel(),
            }
            for layer in (self.net[1], self.net[3]):
                parallelize_module(layer, strategy.device_mesh["tp"], plan)

    def configure_pipeline(self):
        return Pipeline(model=self.net, inputs=self.inputs, loss=loss, weight=count)

    @staticmethod
    def inputs(batch):
        return torch.stack(batch[:2], -1)

    def training_step(self, batch, batch_idx):
        return {"loss": torch.nan_to_num(loss(self.net(self.inputs(batch)), batch)), "weight": count(batch)}

    def validation_step(self, batch, batch_idx):
        value, weight = loss(self.net(self.inputs(batch)), batch), int(count(batch))
        self.log("val_loss", value if weight else 0.0, batch_size=weight)

    def predict_step(self, batch, batch_idx):
        return self.net(self.inputs(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        reduce, weight = self.trainer.strategy.reduce, outputs["weight"].float()
        self.losses.append(float(reduce(outputs["loss"].detach() * weight) / reduce(weight)))

    def on_validation_epoch_end(self):
        self.validated.append(float(self.trainer.callback_metrics.get("val_loss", torch.zeros(()))))

    def on_train_end(self):
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(strategy, world_size, batch_size, module=None, path=None, ckpt=None, **options):
    module = Net() if module is None else module
    module.path = path
    trainer = quiet_trainer(
        strategy, devices=world_size, **{"max_epochs": -1, "max_steps": STEPS, "gradient_clip_val": 0.5, **options}
    )
    trainer.fit(module, DataLoader(data(), batch_size), DataLoader(data(8), batch_size), ckpt_path=ckpt)
    return module
