"""One replica group with a loop of one's own, as a program; it prints a JSON line for each batch."""

import hashlib
import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat


def train(loop, steps):
    torch.manual_seed(int(os.environ["REPLICA_GROUP_ID"]))  # weights that differ until a group joins
    net = nn.Linear(4, 1)
    loop.setup(net, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01))
    inputs = torch.randn(4096, 4, generator=torch.Generator().manual_seed(1))
    loader = loop.training_loader(DataLoader(TensorDataset(inputs), batch_size=4))
    while loop.strategy.current_step < steps:
        for (batch,) in loader:
            loss = loop.compute(lambda batch: net(batch).square().mean(), batch)
            loop.backward(loss)
            loop.step()
            weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
            line = {
                "pid": os.getpid(),
                "step": loop.strategy.current_step,
                "groups": loop.strategy.num_live_groups,
                "state": hashlib.sha256(weights).hexdigest()[:16],
                "lr": 0.01,
            }
            print(json.dumps(line), flush=True)
            time.sleep(0.1)
            if loop.strategy.current_step >= steps:
                break


if __name__ == "__main__":
    strategy = dstrat.build(strategy=sys.argv[2] if sys.argv[2:] else "torchft_ddp", accelerator="cpu", devices=1)
    dstrat.OwnLoop(strategy).launch(train, steps=int(sys.argv[1]))
