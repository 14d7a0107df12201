"""Checkpoints with the optimizer's state move between all layouts: the next losses are those of one device."""

import warnings

import pytest
from packages.mesh.tests.pipeline_fits import fit
from tests.ranks import in_ranks

pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed: nox -s complete has")

LAYOUTS = {  # alias, and the numbers of ranks and of shares of the data
    "single_device": (1, 1),
    "ddp": (2, 2),
    "fsdp": (2, 2),
    "deepspeed_stage_2": (2, 2),
    "deepspeed_stage_3": (2, 2),
    "mesh(pp=2)": (2, 1),
    "mesh(pp=2, dp_shard=2)": (4, 2),
    "mesh(pp=2, tp=2)": (4, 1),
}
STEPS = 3


def losses(cluster, alias, path=None, checkpoints=(None,), max_steps=STEPS):
    """Train from each checkpoint, and return the losses of each training."""
    warnings.simplefilter("ignore")  # of DeepSpeed
    shares, plugins = LAYOUTS[alias][1], {} if cluster is None else {"plugins": [cluster]}
    size = 1 if cluster is None else cluster.world_size
    return [
        fit(alias, size, 8 // shares, path, checkpoint, max_steps, **plugins)[0].losses for checkpoint in checkpoints
    ]


def run(alias, **arguments):
    """Return the losses of rank 0."""
    ranks = LAYOUTS[alias][0]
    return losses(None, alias, **arguments) if ranks == 1 else in_ranks(losses, ranks, alias=alias, **arguments)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the losses of one device, and a checkpoint of each layout."""
    ((expected),) = run("single_device", max_steps=2 * STEPS)
    folder = tmp_path_factory.mktemp("saved")
    paths = {alias: str(folder / str(number)) for number, alias in enumerate(LAYOUTS)}
    for alias, path in paths.items():
        assert run(alias, path=path) == [pytest.approx(expected[:STEPS], rel=1e-6)], alias
    return expected, paths


@pytest.mark.slow
@pytest.mark.xdist_group("moves")
@pytest.mark.parametrize("alias", LAYOUTS)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(saved, alias):
    expected, paths = saved
    found = run(alias, checkpoints=list(paths.values()), max_steps=2 * STEPS)
    for source, values in zip(paths, found, strict=True):
        assert values == pytest.approx(expected[STEPS:], rel=1e-6), source
