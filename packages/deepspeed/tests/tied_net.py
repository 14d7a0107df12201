"""A network with tied and frozen parameters, and how states of it are compared."""

import torch
from deepspeed_loop import Net


class Tied(Net):
    """A network with tied and frozen parameters, of which the optimizer has two groups."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.first.bias.requires_grad_(False)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.01)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(found[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)
        else:
            assert found[key] == value
