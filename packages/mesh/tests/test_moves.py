"""Checkpoints with the state of optimizer and scheduler move between all layouts, which go on as one device does."""

import warnings

import pytest
import torch
from packages.mesh.tests.context_fits import TOKENS, WIDTH, Attention, Embedding, fit
from packages.mesh.tests.context_fits import Net as ContextNet
from tests.ranks import in_ranks
from torch import nn

from dstrat.testing.ranks.layouts import Mixture

pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed: nox -s complete has")

LAYOUTS = {  # alias, and the numbers of ranks and of shares of the data
    "single_device": (1, 1),
    "ddp": (2, 2),
    "fsdp": (2, 2),
    "deepspeed_stage_2": (2, 2),
    "deepspeed_stage_3": (2, 2),
    "deepspeed_stage_0": (2, 2),
    "mesh(pp=2)": (2, 1),
    "mesh(pp=2, tp=2)": (4, 1),
    "mesh(pp=2, dp_shard=2)": (4, 2),
    "mesh(cp=2)": (2, 1),
    "mesh(ep=2)": (2, 2),
    "deepspeed_stage_1": (2, 2),
}
NAMES = list(LAYOUTS)
# By the layout that goes on: that before it, and that five before it.
SOURCES = {alias: [NAMES[number - 1], NAMES[number - 5]] for number, alias in enumerate(NAMES)}
STEPS = 3


class Net(ContextNet):
    """Has experts between its layers of attention, and a rate that falls with each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Embedding(), Attention(), Mixture(), Attention(), nn.Linear(WIDTH, TOKENS))

    def configure_experts(self):
        return [self.net[2].experts]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def losses(cluster, alias, path=None, checkpoints=(None,), max_steps=STEPS):
    """Train from each checkpoint, and return the losses of each training."""
    warnings.simplefilter("ignore")  # of DeepSpeed
    shares, plugins = LAYOUTS[alias][1], {} if cluster is None else {"plugins": [cluster]}
    size = 1 if cluster is None else cluster.world_size
    return [
        fit(
            alias, size, 8 // shares, Net(), path, checkpoint, max_steps=max_steps, limit_val_batches=0, **plugins
        ).losses
        for checkpoint in checkpoints
    ]


def run(alias, **arguments):
    """Return the losses of rank 0."""
    ranks = LAYOUTS[alias][0]
    return losses(None, alias, **arguments) if ranks == 1 else in_ranks(losses, ranks, alias=alias, **arguments)[0]


class Saved:
    """Checkpoints of layouts, which are made when they are first read.

    Attributes:
        expected: The losses of one device.
    """

    def __init__(self, folder):
        self.folder, self.paths = folder, {}
        ((self.expected,)) = run("single_device", max_steps=2 * STEPS)

    def path(self, alias):
        if alias not in self.paths:
            path = str(self.folder / str(len(self.paths)))
            assert run(alias, path=path) == [pytest.approx(self.expected[:STEPS], rel=1e-6)], alias
            self.paths[alias] = path
        return self.paths[alias]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


def go_on(saved, alias, sources):
    found = run(alias, checkpoints=[saved.path(source) for source in sources], max_steps=2 * STEPS)
    for source, values in zip(sources, found, strict=True):
        assert values == pytest.approx(saved.expected[STEPS:], rel=1e-6), source


@pytest.mark.slow
@pytest.mark.xdist_group("moves")
@pytest.mark.parametrize("alias", LAYOUTS)
def test_checkpoints_of_two_layouts_go_on_in_each(saved, alias):
    go_on(saved, alias, SOURCES[alias])


@pytest.mark.variant
@pytest.mark.xdist_group("moves")
@pytest.mark.parametrize("alias", LAYOUTS)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(saved, alias):
    go_on(saved, alias, [source for source in LAYOUTS if source not in SOURCES[alias]])
