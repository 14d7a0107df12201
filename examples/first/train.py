import torch

from dstrat import Trainer, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, x):
        return (self.layer(x) - x.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=3)
    trainer.print(trainer.plan)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(4096, 20), batch_size=32))
