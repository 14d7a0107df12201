"""Mixed precision of stages and shards: bit for bit what the same casts give by hand.

An autocast on one device gives other losses by as much as those of float32 differ from it: it keeps embeddings and
layer norms in float32, where shards are gathered in bfloat16, as FSDP does.  So losses are compared with a loop that
casts each weight before the forward pass, and adds gradients in float32.
"""

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from dstrat import Pipeline, TrainModule
from dstrat_mesh import MeshStrategy

STEPS, BATCH_SIZE, TOKENS = 6, 8, 23


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, 32), nn.Embedding(16, 32)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(32), nn.LayerNorm(32)
        self.queries_keys_values, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        heads = self.queries_keys_values(self.before_attention(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(TrainModule):
    """A small language model; the embedding of its tokens is the weight of its last layer, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            Embedding(), *[Block() for _ in range(4)], nn.LayerNorm(32), nn.Linear(32, TOKENS, bias=False)
        )
        self.net[-1].weight = self.net[0].tokens.weight
        self.losses = []

    @staticmethod
    def loss(output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=self.loss, inputs=lambda batch: batch[:, :-1])

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[:, :-1]), batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def texts():
    return torch.randint(TOKENS, (STEPS * BATCH_SIZE, 17), generator=torch.Generator().manual_seed(1))


def losses_by_hand(microbatches=1, ranks_with_data=1, stages=1):
    """Train one copy of the model; a rank with data has every n-th sample of a batch, in microbatches.

    Two stages gather the tied weight each, and add its gradients in float32; a single one adds them in bfloat16.
    """
    module = GPT()
    optimizer, losses = module.configure_optimizers(), []
    weights = dict(module.net.named_parameters(remove_duplicate=stages == 1))
    for batch in texts().split(BATCH_SIZE):
        gathered = {name: weight.detach().bfloat16().requires_grad_() for name, weight in weights.items()}
        sums, of_ranks = {}, []
        for rank in range(ranks_with_data):
            gradients, of_rank = {}, torch.zeros(())
            for microbatch in batch[rank::ranks_with_data].chunk(microbatches):
                with torch.autocast("cpu", torch.bfloat16):
                    output = functional_call(module.net, gathered, (microbatch[:, :-1],), tie_weights=stages == 1)
                    loss = module.loss(output, microbatch) / microbatches
                loss.backward()
                of_rank += loss.detach()
                for name, weight in gathered.items():
                    gradients[name] = weight.grad.float() + gradients.get(name, 0)
                    weight.grad = None
            for name, gradient in gradients.items():
                sums[name] = gradient + sums.get(name, 0)
            of_ranks.append(of_rank)
        optimizer.zero_grad()
        for name, weight in weights.items():
            gradient = sums[name] / ranks_with_data
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        optimizer.step()
        losses.append(float(torch.stack(of_ranks).mean()))
    return losses


def losses(cluster, **layout):
    module = GPT()
    trainer = quiet_trainer(MeshStrategy(**layout), cluster, precision="bf16-mixed", max_epochs=1)
    trainer.fit(module, DataLoader(texts(), batch_size=BATCH_SIZE // layout.get("dp_shard", 1)))
    return module.losses


LAYOUTS = {
    2: [
        {"dp_shard": 2},
        {"pp": 2, "microbatches": 1},
        {"pp": 2},
        {"pp": 2, "microbatches": 4, "schedule": "GPipe"},
        {"pp": 2, "microbatches": 4, "schedule": "Interleaved1F1B"},
        {"pp": 2, "microbatches": 4, "schedule": "InterleavedZeroBubble"},
    ],
    4: [
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "dp_shard": 2, "reshard_after_forward": True},
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layouts_in_bfloat16_equal_the_same_casts_by_hand(ranks):
    cases = {str(layout): layout for layout in LAYOUTS[ranks]}
    expected = {}
    for name, layout in zip(cases, LAYOUTS[ranks], strict=True):
        stages = layout.get("pp", 1)
        by_hand = losses_by_hand(layout.get("microbatches", stages), layout.get("dp_shard", 1), stages)
        expected[name] = pytest.approx(by_hand, rel=2e-7, abs=0)  # the last digit of a sum of losses
    for found in in_ranks(each, ranks, function=losses, cases=cases):
        assert found == expected
