"""A loop with Accelerate, its own or with a strategy, which writes its losses, a metric and a resumed run's losses.

    python accelerated.py OUT STRATEGY DEVICES

STRATEGY is ``own`` for Accelerate itself, in this process or under torchrun.
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

OUT, STRATEGY, DEVICES = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if STRATEGY != "own":
    import dstrat_transformers

    dstrat_transformers.use(STRATEGY, accelerator="cpu", devices=DEVICES)

import accelerate  # noqa: E402 - the process that starts others needs none of these
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

Accelerator = accelerate.Accelerator if STRATEGY == "own" else dstrat_transformers.DstratAccelerator
BATCH = 16 // DEVICES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def data(number):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(number, 8, generator=generator)
    return TensorDataset(features, features[:, :4].argmax(1))


def prepared(precision):
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    loader = DataLoader(data(96), batch_size=BATCH, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(run, epochs, save_after=None):
    accelerator, model, optimizer, loader, scheduler = run
    losses, norms = [], []
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        if epoch == save_after:
            accelerator.save_state(str(OUT / "state"))
    return losses, norms


def accuracy(accelerator, model):
    model.eval()
    loader, right = accelerator.prepare(DataLoader(data(21), batch_size=BATCH)), []
    for x, y in loader:
        with torch.no_grad():
            predicted = model(x).argmax(1)
        all_predicted, labels = accelerator.gather_for_metrics((predicted, y))
        right += (all_predicted == labels).tolist()
    model.train()
    return len(right), sum(right)


def prepared_one_by_one():
    """Prepare the loss, the model and the optimizer each by itself, in this order, as skorch does."""
    accelerator = Accelerator()
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss = nn.CrossEntropyLoss()
    if STRATEGY != "own":  # whose DDP refuses a module without parameters
        loss = accelerator.prepare(loss)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    return accelerator, loss, model, optimizer


def train_one_by_one():
    accelerator, criterion, model, optimizer = prepared_one_by_one()
    losses = []
    for x, y in accelerator.prepare(DataLoader(data(96), batch_size=BATCH)):
        loss = criterion(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    return losses


def main():
    run = prepared("no")
    accelerator, model = run[:2]
    losses, norms = train(run, 2, save_after=0)
    state = accelerator.get_state_dict(model)
    result = {
        "losses": losses,
        "norms": norms,
        "accuracy": accuracy(accelerator, model),
        "names": sorted(state),
        "sums": [float(state[name].double().sum()) for name in sorted(state)],
        "unwrapped": type(accelerator.unwrap_model(model)).__name__,
        "rate": run[4].get_last_lr(),
    }
    again = prepared("no")
    again[0].load_state(str(OUT / "state"))
    result["resumed"] = train(again, 1)[0]
    result["one by one"] = train_one_by_one()
    if accelerator.is_main_process:
        (OUT / "result.json").write_text(json.dumps(result))


main()
if STRATEGY == "own":
    sys.stdout.flush()
    os._exit(0)  # a thread of torch's own process group may abort the process while it ends
