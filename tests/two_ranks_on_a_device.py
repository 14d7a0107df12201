"""Program: train on two ranks that share one device, over gloo, and write the global losses."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import dstrat
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy

STEPS, BATCH, WIDTH = 6, 16, 32
STRATEGIES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(0.0), nn.Linear(2 * WIDTH, WIDTH)
        )

    def loss(self, x):
        return nn.functional.mse_loss(self.layers(x), x)


def train(loop, out):
    loop.setup(Net(), lambda net: torch.optim.AdamW(net.parameters(), lr=0.01))
    x = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, rank = [], loop.strategy.global_rank
    for batch in x.split(BATCH):
        share = batch[rank::2].to(loop.strategy.root_device)
        loss = loop.compute(loop.strategy.module.loss, share)
        loop.backward(loss)
        loop.step()
        losses.append(float(loop.strategy.reduce(loss.detach())))
    if rank == 0:
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    alias, device_type, out = sys.argv[1:]
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    strategy = STRATEGIES[alias](
        parallel_devices=[device, device], process_group_backend="gloo", timeout=timedelta(seconds=60)
    )
    dstrat.OwnLoop(dstrat.build(strategy=strategy, accelerator=device_type)).launch(train, out)
