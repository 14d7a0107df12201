"""Random trainings of layouts that resume after a random batch: equal to those that never stopped, bit for bit."""

import math
import random

import pytest
import torch
from packages.mesh.tests.context_fits import LENGTH, TOKENS, WIDTH, Attention, Embedding
from packages.mesh.tests.context_fits import Net as ContextNet
from tests.ranks import in_ranks
from tests.trainer_runs import Saves, quiet_trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from dstrat import Pipeline, seed_everything
from dstrat.parallel.shards import local_tensor
from dstrat.testing.ranks.layouts import Mixture
from dstrat_mesh import MeshStrategy

BATCHES, EPOCHS, GLOBAL_BATCH = 5, 2, 8
FIRST = (4, 17, 25)  # with dropout, saved within accumulated batches; the others are variants
LAYOUTS = [  # whose sizes multiply to 2 or 4 ranks, but for ep, which divides ranks of the others
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"ep": 2, "dp_shard": 2},
    {"pp": 4},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "cp": 2},
    {"pp": 2, "ep": 2, "dp_shard": 2},
    {"tp": 2, "dp_shard": 2},
    {"cp": 2, "dp_shard": 2},
    {"cp": 2, "tp": 2},
    {"ep": 4, "tp": 2, "dp_shard": 2},
]


def random_case(seed):
    """Return a layout, each of which comes again after all others, and what is drawn for its training."""
    draw = random.Random(seed)
    sizes = LAYOUTS[seed % len(LAYOUTS)]
    options = dict(sizes)
    if "pp" in sizes:
        schedules = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS") if sizes["pp"] == 2 else ("1F1B", "GPipe")
        options |= {"schedule": draw.choice(schedules), "microbatches": draw.choice((2, 4)) if sizes["pp"] == 2 else 4}
    if "cp" in sizes:
        # To exchange heads, cp must divide those that tp leaves, which are one of keys.
        options["context_parallel"] = draw.choice(("ulysses", "ring")) if "tp" not in sizes else "ring"
    options["activation_checkpointing"] = draw.choice((None, None, "full"))
    options["reshard_after_forward"] = draw.choice((None, True, False))
    return {
        "seed": seed,
        "options": options,
        "accumulate": draw.choice((1, 2, 3)),
        "dropout": draw.choice((0.0, 0.2)),
        "noise": draw.choice((False, True)),
        "shuffle": draw.choice((False, True)),
        "weights": draw.choice((False, True)),
        "optimizer": draw.choice(("adamw", "sgd")),
        "scheduler": draw.choice((None, "step", "epoch")),
        "clip": draw.choice((None, ("norm", 0.05), ("value", 0.01))),
        "format": draw.choice(("portable", "portable", "torch")),
        "saved_at": draw.choice([batch for batch in range(1, BATCHES * EPOCHS) if batch % BATCHES]),
    }


class Tokens(Dataset):
    """Tokens, positions, and the next tokens, of which each sequence counts another number; some tokens are random."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return BATCHES * GLOBAL_BATCH

    def __getitem__(self, index):
        tokens = torch.randint(TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        if self.noise:
            tokens = torch.where(torch.rand(LENGTH + 1) < 0.2, torch.randint(TOKENS, (LENGTH + 1,)), tokens)
        positions = torch.arange(LENGTH)
        return tokens[:-1], positions, tokens[1:].where(positions < 3 + 5 * index % (LENGTH - 3), -100)


class DroppedAttention(Attention):
    """Attention with dropout, so that stages draw."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return functional.dropout(super().forward(x), self.dropout, self.training)


def mean_loss(logits, batch):
    """Return the mean over the labels; a part of the sequences may have none."""
    total = functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten(), reduction="sum")
    return total / count(batch).clamp(min=1)


def count(batch):
    return (batch[2] != -100).sum()


class Net(ContextNet):
    """Has experts between layers of attention, and records what it computes."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        first, second = (DroppedAttention(case["dropout"]) for _ in range(2))
        self.net = nn.Sequential(Embedding(), first, Mixture(), second, nn.Linear(WIDTH, TOKENS))
        self.case, self.weights = case, {}

    def configure_pipeline(self):
        weight = {"weight": count} if self.case["weights"] else {}
        return Pipeline(model=self.net, inputs=self.inputs, loss=mean_loss, **weight)

    def configure_experts(self):
        return [self.net[2].experts]

    def training_step(self, batch, batch_idx):
        loss = mean_loss(self.net(self.inputs(batch)), batch)
        return {"loss": loss, "weight": count(batch)} if self.case["weights"] else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self):
        weights = self.trainer.strategy.local_weights()
        self.weights = {name: local_tensor(value).clone() for name, value in weights.items()}

    def configure_optimizers(self):
        if self.case["optimizer"] == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        if self.case["scheduler"] is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.case["scheduler"]}}


def fit(cluster, case, seed, callbacks=(), ckpt_path=None):
    """Return the losses, the rank's weights and a random number at the end."""
    seed_everything(seed, verbose=False)
    net, (algorithm, clip) = Net(case), case["clip"] or ("norm", None)
    trainer = quiet_trainer(
        MeshStrategy(**case["options"]),
        cluster,
        plugins=[case["format"]],
        max_epochs=EPOCHS,
        callbacks=list(callbacks),
        accumulate_grad_batches=case["accumulate"],
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
    )
    sizes = case["options"]
    readers = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    loader = DataLoader(Tokens(case["noise"]), GLOBAL_BATCH // readers, shuffle=case["shuffle"])
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    return net.losses, net.weights, torch.rand(4)


def differences(cluster, case, folder):
    """Return how a training that resumes differs from the one that has saved the checkpoint, in this rank."""
    losses, weights, drawn = fit(cluster, case, seed=3, callbacks=[Saves(folder, [case["saved_at"]])])
    other_losses, other_weights, other_drawn = fit(cluster, case, seed=4, ckpt_path=folder / str(case["saved_at"]))
    found = [name for name, value in weights.items() if not torch.equal(value, other_weights[name])]
    if len(losses) != BATCHES * EPOCHS or other_losses != losses[case["saved_at"] :]:
        found.append(f"losses {losses[case['saved_at'] :]} and {other_losses}")
    if not torch.equal(drawn, other_drawn):
        found.append(f"random numbers {drawn} and {other_drawn}")
    return found


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.variant] * (seed not in FIRST)) for seed in range(30)]
)
def test_a_resume_of_a_layout_after_a_random_batch_changes_nothing(tmp_path, seed):
    case = random_case(seed)
    ranks = math.prod(size for axis, size in LAYOUTS[seed % len(LAYOUTS)].items() if axis != "ep")
    for rank, found in enumerate(in_ranks(differences, ranks, case=case, folder=tmp_path)):
        assert found == [], (rank, case)
