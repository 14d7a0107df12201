"""A small language model that learns a Markov chain, and its training with a Trainer."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

VOCABULARY, WIDTH, CONTEXT, BATCH = 32, 64, 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.inputs(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(TrainModule):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight))

    def loss(self, batch):
        tokens = batch[0]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0][:, :-1]).float()

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-3)


class Adapted(LanguageModel):
    """Everything frozen but the head and an adapter before it."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False))
        self.head.requires_grad_(True)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        x = self.blocks(x + self.adapter(x))  # gradients of the adapter flow through frozen layers
        return self.head(x)


def sequences(number, seed=1):
    """Sequences of a chain with a few likely successors of each token."""
    transitions = torch.softmax(3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)), 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (number,), generator=generator)]
    for _ in range(CONTEXT):
        tokens.append(torch.multinomial(transitions[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def loader(steps, seed=1, batch=BATCH):
    return DataLoader(TensorDataset(sequences(steps * BATCH, seed)), batch_size=batch)


class SavesHalfway(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"]
        self.losses.append(float(trainer.strategy.reduce(loss.detach())))


def quiet_trainer(strategy="single_device", cluster=None, device="cpu", **options):
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing", "use_distributed_sampler")
    options = {**dict.fromkeys(names, False), "max_epochs": 1, **options}
    devices = 1 if cluster is None else cluster.world_size
    plugins = [] if cluster is None else [cluster]
    return Trainer(strategy=strategy, accelerator=device, devices=devices, plugins=plugins, **options)


def losses_of(precision, model=None, steps=40, strategy="single_device", cluster=None, device="cpu", **options):
    """Return the loss of each step, over all ranks."""
    recorder = Losses()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = quiet_trainer(strategy, cluster, device, precision=precision, callbacks=callbacks, **options)
    trainer.fit(model or LanguageModel(), loader(steps))
    return recorder.losses
